"""The options of a load, validated once.

They have the names of verl's `data:` section, which can therefore be passed unchanged: `load(files, tokenizer,
**config.data)`. Keys of that section that do not concern the loading of prompts are ignored. Any other unknown key is
an error.
"""

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from gpuload.core.errors import OptionError

Truncation = Literal["error", "left", "right", "middle"]
Verify = Literal["sample", "full", "off"]
Padding = Literal["max_length", "longest"]
LossOn = Literal["assistant", "last", "last_turn", "completion", "all", "marked"]
TurnsMode = Literal["conversation", "served"]
MissingReasoning = Literal["prompt", "learn", "skip"]
History = Literal["rendered", "sampled"]
Normalize = Literal["auto"]
Objective = Literal["dpo", "rm", "kto"]
Trainer = Literal["trl", "llamafactory", "axolotl", "skyrl", "areal", "megatron"]
TokensOn = Literal["auto", "device", "host"]
Store = Literal["auto", "memory", "disk"]
Overlong = Literal["drop", "keep_start", "keep_end"]

NO_LIMIT = 2**31 - 1  # a length in tokens that no row has

# Keys of verl 0.9.1's `data:` section (trainer/config/data/legacy_data.yaml) that do not concern how prompts are read,
# rendered and tokenized.
IGNORED = frozenset(
    "tokenizer use_shm train_files val_files train_max_samples val_max_samples reward_fn_key max_response_length "
    "train_batch_size gen_batch_size val_batch_size tool_config_path function_tool_path return_raw_input_ids "
    "dataloader_num_workers image_patch_size validation_shuffle filter_overlong_prompts_workers image_key video_key "
    "audio_key custom_cls return_multi_modal_inputs mm_processor_kwargs sampler datagen filter_prompts "
    "need_tools_kwargs chat_template_func".split()
)

_OF_LOADERS = frozenset(
    "batch_size rank world_size drop_last padding packing pack_length max_tokens padded group_by_length".split()
)

# Arguments of `apply_chat_template` that are not variables of the template and would change the type or shape of its
# result: the loader sets them.
SET_BY_LOADER = {
    "tokenize": "",
    "return_dict": "",
    "return_tensors": "",
    "padding": "use the loader's padding option",
    "truncation": "use the option truncation, or overlong for data to train on",
    "max_length": "use the option max_prompt_length, or max_length for data to train on",
    "chat_template": "use the chat_template option",
    "conversation": "",
    "messages": "",
}


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `gpuload.load`.

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

        Examples:
            >>> from gpuload import Options
            >>> Options.parse({"max_prompt_length": 2048, "train_batch_size": 256}).max_prompt_length
            2048

        Args:
            given: A dict or an OmegaConf mapping.

        Returns:
            The options, with defaults for missing keys.

        Raises:
            OptionError: A key is unknown (the message names the nearest known one), or a value is invalid.
        """
        known = {f.name for f in dataclasses.fields(Options)}
        unknown = sorted(set(given) - known - IGNORED)
        if unknown:
            check_of_loaders(unknown)
            raise OptionError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}{nearest(unknown[0], known)}"
            )
        values = {key: plain(value) for key, value in given.items() if key in known}
        if values.get("apply_chat_template_kwargs", {}) is None:
            del values["apply_chat_template_kwargs"]
        if isinstance(values.get("chat_template"), str | os.PathLike):
            values["chat_template"] = template_source(values["chat_template"])
        if isinstance(values.get("cache_dir"), os.PathLike):
            values["cache_dir"] = os.fspath(values["cache_dir"])
        options = Options(**values)
        check_fields(options, _CHECKS)
        check_template_kwargs(options.apply_chat_template_kwargs)
        return options

    def of_tokenizer(self) -> dict[str, Any]:
        """The arguments of `Reference` that are options."""
        return {
            "chat_template": self.chat_template,
            "template_kwargs": self.apply_chat_template_kwargs,
            "pad_token_id": self.pad_token_id,
            "trust_remote_code": self.trust_remote_code,
        }


class Must(NamedTuple):
    """What a value must be: in words, and as a test."""

    wanted: str
    holds: Callable[[Any], object]


def or_none(must: Must) -> Must:
    """The same, or None."""
    return Must(f"{must.wanted}, or None", lambda value: value is None or must.holds(value))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(least: int, wanted: str) -> Must:
    return Must(wanted, lambda value: _is_int(value) and value >= least)


def _string(wanted: str) -> Must:
    return Must(wanted, lambda value: isinstance(value, str) and value)


def is_path_name(value: Any) -> bool:
    """Whether a file or directory of this system could have such a name: it has no null byte and no lone surrogate."""
    try:
        return "\0" not in value and bool(os.fsencode(value))
    except (TypeError, UnicodeEncodeError):
        return False


POSITIVE = _integer(1, "an integer > 0")
COLUMN = _string("the name of a column")
BOOLEAN = Must("True or False", lambda value: isinstance(value, bool))

_CHECKS: Mapping[str, Must] = {
    "prompt_key device": _string("a string"),
    "cache_dir": or_none(Must("a path", is_path_name)),
    "filter_overlong_prompts return_raw_chat return_full_prompt shuffle strict token_cache distributed": BOOLEAN,
    "progress": or_none(BOOLEAN),
    "max_prompt_length": POSITIVE,
    "max_samples": Must(
        "an integer > 0, or -1 for all rows", lambda value: _is_int(value) and (value > 0 or value == -1)
    ),
    "seed pad_token_id": or_none(_integer(0, "an integer >= 0")),
    "chat_template": or_none(
        Must("a template's name or text, the path of a .jinja file", lambda value: isinstance(value, str))
    ),
    "remote_timeout": Must(
        "a number of seconds > 0", lambda value: (_is_int(value) or isinstance(value, float)) and 0 < value < inf
    ),
    "gpu_memory_limit token_cache_bytes": _integer(0, "a number of bytes, or 0"),
    "device": Must("'auto', 'cpu', 'cuda' or 'cuda:N'", lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value)),
    "apply_chat_template_kwargs": Must("a mapping", lambda value: isinstance(value, Mapping)),
}


def check_fields(values: Any, checks: Mapping[str, Must]) -> None:
    """Checks the fields of a dataclass: those with the type `Literal`, with or without None, by their types; others by
    `checks`, which have the names of some fields and what these must be.

    Raises:
        OptionError: a field has another value.
    """
    found = [(name, must) for names, must in checks.items() for name in names.split()]
    for name, hint in get_type_hints(type(values)).items():
        if literal := next((each for each in (hint, *get_args(hint)) if get_origin(each) is Literal), None):
            must = Must(f"one of {', '.join(map(repr, get_args(literal)))}", get_args(literal).__contains__)
            found.append((name, must if literal is hint else or_none(must)))
    for name, must in found:
        value = getattr(values, name)
        if not must.holds(value):
            number = must.wanted.startswith(("an integer", "a number"))
            got = ", got a string" if number and isinstance(value, str) else ""
            raise OptionError(f"{name}={value!r}: expected {must.wanted}{got}")


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Checks arguments for the chat template; an `OptionError` if one of them would change what `apply_chat_template`
    returns."""
    for key in kwargs:
        if not isinstance(key, str):
            raise OptionError(
                f"apply_chat_template_kwargs: {key!r:.80} is not the name of an argument: expected a string"
            )
    for key, remedy in SET_BY_LOADER.items():
        if key in kwargs:
            raise OptionError(f"apply_chat_template_kwargs.{key} is set by the loader: {remedy or 'remove it'}")


def template_source(template: str | os.PathLike[str], option: str = "chat_template") -> str:
    """The text of a chat template that an option gives as a file.

    It is any `PathLike`, or a string that ends in `.jinja`; any other string is returned unchanged.

    Raises:
        OptionError: the file cannot be read.
    """
    path = os.fspath(template)
    if isinstance(template, str) and (is_template(path) or not path.lower().endswith(".jinja")):
        return path
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OptionError(f"{option}={path!r}: no such file: check the path") from None
    except (OSError, ValueError) as error:  # the latter: not UTF-8, or a null byte in the name
        raise OptionError(f"{option}={path!r}: cannot read the file: {error}") from error


def is_template(text: str) -> bool:
    """Whether a string is the text of a Jinja template, and not a name or a path."""
    return any(mark in text for mark in ("{{", "{%", "{#"))


def check_format(given: Any, names: Sequence[str]) -> None:
    """Checks the option `format`; an `OptionError` if it is neither None nor one of these."""
    if given is not None and given not in names:
        raise OptionError(f"format={given!r}{nearest(str(given), set(names))}")


def check_of_loaders(names: Sequence[str]) -> None:
    """Checks names that are not those of options of a load; an `OptionError` if one is an option of `loader`."""
    for name in names:
        if name in _OF_LOADERS:
            raise OptionError(
                f"{name} is an option of batches, not of a load: remove it, and pass it to .loader({name}=...) of the "
                "dataset that is returned"
            )


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Checks that an option has one of some values; with None if it may be left out, which the message does not list.

    Raises:
        OptionError: it is none of the choices.
    """
    if value not in choices:
        named = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise OptionError(f"{name}={value!r}: expected one of {named}")


def nearest(name: str, known: set[str]) -> str:
    """The end of a message about an unknown name: suggests the nearest known one, or lists all."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.65)
    return f": did you mean {close[0]}?" if close else f"; expected one of {', '.join(sorted(known))}"


def tokenizer_of(tokenizer: Any, given: dict[str, Any]) -> Any:
    """The tokenizer of a load, which may be the keyword argument `tokenizer`; that one is removed from `given`."""
    by_name = given.pop("tokenizer", None)
    if tokenizer is not None and by_name is not None:
        raise OptionError("two tokenizers are given: pass one, as the second argument or as tokenizer=")
    return by_name if tokenizer is None else tokenizer


def plain(value: Any) -> Any:
    """Converts mappings and sequences of a configuration library (OmegaConf and others) to dicts and lists. What Python
    has itself stays as it is: templates print a tuple, a range and an ordered dict in other ways than a list and a
    dict."""
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    if type(value) not in (dict, list) and type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple):
        return [plain(item) for item in value]
    return value
