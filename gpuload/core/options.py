"""The options of a load, validated once.

They have the names of verl's `data:` section, which can therefore be passed unchanged: `load(files, tokenizer,
**config.data)`. Keys of that section that do not concern the loading of prompts are ignored. Any other unknown key is
an error.
"""

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gpuload.core.errors import OptionError

Truncation = Literal["error", "left", "right", "middle"]
Verify = Literal["sample", "full", "off"]
Padding = Literal["max_length", "longest"]
LossOn = Literal["assistant", "last", "completion", "all"]
Objective = Literal["dpo", "rm", "kto"]
Trainer = Literal["trl", "llamafactory", "axolotl", "skyrl", "areal"]
TokensOn = Literal["auto", "device", "host"]
Store = Literal["auto", "memory", "disk"]
Overlong = Literal["drop", "keep_start", "keep_end"]

NO_LIMIT = 2**31 - 1
"""A length in tokens that no row has."""

# Keys of verl 0.9.1's `data:` section (trainer/config/data/legacy_data.yaml) that do not concern how prompts are read,
# rendered and tokenized.
_IGNORED = frozenset(
    "tokenizer use_shm train_files val_files train_max_samples val_max_samples reward_fn_key max_response_length "
    "train_batch_size gen_batch_size val_batch_size tool_config_path function_tool_path return_raw_input_ids "
    "dataloader_num_workers image_patch_size validation_shuffle filter_overlong_prompts_workers image_key video_key "
    "audio_key custom_cls return_multi_modal_inputs mm_processor_kwargs sampler datagen filter_prompts "
    "need_tools_kwargs chat_template_func".split()
)

# Arguments of `apply_chat_template` that are not variables of the template and would change the type or shape of its
# result: the loader sets them.
_SET_BY_LOADER = {
    "tokenize": "",
    "return_dict": "",
    "return_tensors": "",
    "padding": "use the loader's padding option",
    "truncation": "use the truncation option",
    "max_length": "use the max_prompt_length option",
    "chat_template": "use the chat_template option",
    "conversation": "",
}


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `gpuload.load`.

    Examples:
        >>> from gpuload import Options
        >>> Options.parse({"max_prompt_length": 2048, "train_batch_size": 256}).max_prompt_length
        2048

    What each of them means is said once, in `gpuload.core.keywords`.
    """

    prompt_key: str = "prompt"
    max_prompt_length: int = 1024
    filter_overlong_prompts: bool = True
    truncation: Truncation = "error"
    return_raw_chat: bool = False
    return_full_prompt: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | os.PathLike[str] | None = "default"
    max_samples: int = -1
    shuffle: bool = False
    seed: int | None = None
    pad_token_id: int | None = None
    cache_dir: str | None = None
    remote_timeout: float = 60.0
    token_cache: bool = True
    token_cache_bytes: int = 0
    device: str = "auto"
    tokens_on: TokensOn = "auto"
    store: Store = "auto"
    gpu_memory_limit: int = 0
    verify: Verify = "sample"
    strict: bool = False
    progress: bool | None = None
    trust_remote_code: bool = False
    distributed: bool = False

    @staticmethod
    def parse(given: Mapping[str, Any]) -> "Options":
        """Validate keyword arguments, or a trainer's `data:` section.

        Args:
            given: A dict or an OmegaConf mapping.

        Returns:
            The options, with defaults for missing keys.

        Raises:
            OptionError: A key is unknown (the message names the nearest known one), or a value is invalid.
        """
        known = {f.name for f in dataclasses.fields(Options)}
        unknown = sorted(set(given) - known - _IGNORED)
        if unknown:
            raise OptionError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}{nearest(unknown[0], known)}"
            )
        values = {key: plain(value) for key, value in given.items() if key in known}
        if values.get("apply_chat_template_kwargs", {}) is None:
            del values["apply_chat_template_kwargs"]
        if isinstance(values.get("chat_template"), str | os.PathLike):
            values["chat_template"] = template_source(values["chat_template"])
        options = Options(**values)
        options._check()
        return options

    def of_tokenizer(self) -> dict[str, Any]:
        """The arguments of `Reference` that are options."""
        return {
            "chat_template": self.chat_template,
            "template_kwargs": self.apply_chat_template_kwargs,
            "pad_token_id": self.pad_token_id,
            "trust_remote_code": self.trust_remote_code,
        }

    def _check(self) -> None:
        base, _, number = self.device.partition(":") if isinstance(self.device, str) else ("", "", "")
        known_device = self.device in ("auto", "cpu", "cuda") or (base == "cuda" and number.isdigit())
        for name in ("prompt_key", "device"):
            _expect(self, name, _is_string(getattr(self, name)), "a string")
        _expect(self, "cache_dir", self.cache_dir is None or _is_string(self.cache_dir), "a path, or None")
        for name in _FLAGS:
            _expect(self, name, isinstance(getattr(self, name), bool), "True or False")
        for name, choices in (
            ("truncation", Truncation),
            ("tokens_on", TokensOn),
            ("store", Store),
            ("verify", Verify),
        ):
            _expect(self, name, getattr(self, name) in get_args(choices), f"one of {_names(choices)}")
        _expect(
            self, "max_prompt_length", _is_int(self.max_prompt_length) and self.max_prompt_length > 0, "an integer > 0"
        )
        several = _is_int(self.max_samples) and (self.max_samples > 0 or self.max_samples == -1)
        _expect(self, "max_samples", several, "an integer > 0, or -1 for all rows")
        _expect(self, "seed", self.seed is None or (_is_int(self.seed) and self.seed >= 0), "an integer >= 0, or None")
        pad = self.pad_token_id
        _expect(self, "pad_token_id", pad is None or (_is_int(pad) and pad >= 0), "an integer >= 0, or None")
        _expect(
            self,
            "chat_template",
            self.chat_template is None or isinstance(self.chat_template, str),
            "a template's name or text, the path of a .jinja file, or None",
        )
        timeout = self.remote_timeout
        seconds = isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < float("inf")
        _expect(self, "remote_timeout", seconds, "a number of seconds > 0")
        for name in ("gpu_memory_limit", "token_cache_bytes"):
            _expect(self, name, _is_int(getattr(self, name)) and getattr(self, name) >= 0, "a number of bytes, or 0")
        _expect(self, "device", known_device, "'auto', 'cpu', 'cuda' or 'cuda:N'")
        kwargs = self.apply_chat_template_kwargs
        _expect(self, "apply_chat_template_kwargs", isinstance(kwargs, Mapping), "a mapping")
        check_template_kwargs(kwargs)


_FLAGS = "filter_overlong_prompts return_raw_chat return_full_prompt shuffle strict token_cache distributed".split()


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Checks arguments for the chat template.

    Raises:
        OptionError: one of them would change what `apply_chat_template` returns.
    """
    for key, remedy in _SET_BY_LOADER.items():
        if key in kwargs:
            raise OptionError(f"apply_chat_template_kwargs.{key} is set by the loader: {remedy or 'remove it'}")


def template_source(template: str | os.PathLike[str]) -> str:
    """Reads a chat template that is given as a file.

    Args:
        template: a path: any `PathLike`, or a string that ends in `.jinja`; any other string is returned unchanged.

    Raises:
        OptionError: the file cannot be read.
    """
    path = os.fspath(template)
    if isinstance(template, str) and (is_template(path) or not path.lower().endswith(".jinja")):
        return path
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OptionError(f"chat_template={path!r}: no such file: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"chat_template={path!r}: cannot read the file: {error}") from error


def is_template(text: str) -> bool:
    """Whether a string is the text of a Jinja template, and not a name or a path."""
    return any(mark in text for mark in ("{{", "{%", "{#"))


def _expect(options: Options, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        value = getattr(options, name)
        number = wanted.startswith(("an integer", "a number"))
        got = ", got a string" if number and isinstance(value, str) else ""
        raise OptionError(f"{name}={value!r}: expected {wanted}{got}")


def _names(literal: Any) -> str:
    return ", ".join(repr(value) for value in get_args(literal))


def _is_string(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def nearest(name: str, known: set[str]) -> str:
    """The end of a message about an unknown name: suggests the nearest known one, or lists all."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.65)
    return f": did you mean {close[0]}?" if close else f"; expected one of {', '.join(sorted(known))}"


def plain(value: Any) -> Any:
    """Converts mappings and sequences of a configuration library (OmegaConf and others) to dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value
