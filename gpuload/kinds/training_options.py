"""The options of data to train on, as those of the pipeline, and the engine that they name."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gpuload.core.errors import OptionError
from gpuload.core.options import POSITIVE, Normalize, Options, Overlong, check_fields, check_of_loaders, nearest
from gpuload.engines.choose import choose_engine
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.protocol import Engine

_TRUNCATION = {"drop": "error", "keep_start": "right", "keep_end": "left"}
"""What becomes of longer rows → the option `truncation` of `load`."""


@dataclass(frozen=True)
class TrainingDefaults:
    """Defaults of what all loads of training data take."""

    max_length: int = 4096
    overlong: Overlong = "drop"


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    """What becomes of messages before they are rendered: as for `load_chats` and `load_pairs`."""

    drop_nulls: bool = False
    normalize_messages: Normalize | None = None

    def of_messages(self) -> dict[str, Any]:
        """These options, as arguments of `TrainingReference`."""
        return {name: getattr(self, name) for name in OF_MESSAGES}

    def changes(self) -> list[str]:
        """For the report: what becomes of messages."""
        nulls = "keys that are null are removed from messages (drop_nulls=True)"
        forms = "null contents and arguments as text are normalized (normalize_messages='auto')"
        return [nulls] * self.drop_nulls + [forms] * (self.normalize_messages is not None)


OF_MESSAGES = ("drop_nulls", "normalize_messages")
"""Names of these options."""

_REPLACED = {"prompt_key", "max_prompt_length", "filter_overlong_prompts", "truncation"}
"""Options of the pipeline that training data has by other names."""


def training_options(given: Mapping[str, Any], prompt_key: str, own: Collection[str]) -> Options:
    """The options of a load of training data, which has `max_length` and `overlong`.

    Its column is `prompt_key`; the names in `own` are those of arguments that are no options of the pipeline.

    Raises:
        OptionError: an unknown name or an invalid value.
    """
    options = set(Options.__dataclass_fields__) - _REPLACED - {"return_raw_chat", "return_full_prompt"}
    known = {*own, "max_length", "overlong", *options}
    if unknown := sorted(set(given) - known):
        check_of_loaders(unknown)
        raise OptionError(f"unknown option {unknown[0]}{nearest(unknown[0], known)}")
    limits = TrainingDefaults(**{name: given[name] for name in ("max_length", "overlong") if name in given})
    check_fields(limits, {"max_length": POSITIVE})
    return Options.parse(
        {name: value for name, value in given.items() if name in options}
        | {
            "prompt_key": prompt_key,
            "max_prompt_length": limits.max_length,
            "filter_overlong_prompts": limits.overlong == "drop",
            "truncation": _TRUNCATION[limits.overlong],
        }
    )


def check_template(options: Options, format: str) -> None:
    """Checks that data of a format with messages has a template; an `OptionError` if not."""
    if options.chat_template is None:
        raise OptionError(
            f"chat_template=None is for texts: data in the format {format} has messages, which a template renders: "
            "remove it"
        )


def training_engine(options: Options, reference: Any, exact_only: bool, on_host: type[HostEngine]) -> Engine:
    """The engine of a load of data to train on. For the arguments see `choose_engine`."""

    def on_device(*given: Any, **more: Any) -> Engine:
        from gpuload.kinds.training_device import DeviceTrainingEngine

        return DeviceTrainingEngine(*given, **more)

    return choose_engine(options, reference, exact_only, on_host, on_device)
