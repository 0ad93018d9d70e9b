"""The options of a load, checked once.

They have verl's key names, so that a trainer's `data:` section can be passed as it is: `load(files, tokenizer,
**config.data)`. Keys of that section that do not concern prompts are accepted and ignored. Any other unknown key is an
error.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gpuload.errors import OptionError

Truncation = Literal["error", "left", "right", "middle"]
Verify = Literal["sample", "full", "off"]
Padding = Literal["max_length", "longest"]
TokensOn = Literal["device", "host"]

# The keys of verl 0.9.1's `data:` section (trainer/config/data/legacy_data.yaml) that have no effect on how gpuload
# reads, renders and tokenizes prompts.
_IGNORED = frozenset(
    "tokenizer use_shm train_files val_files train_max_samples val_max_samples reward_fn_key max_response_length "
    "train_batch_size gen_batch_size val_batch_size tool_config_path function_tool_path return_raw_input_ids "
    "dataloader_num_workers image_patch_size validation_shuffle filter_overlong_prompts_workers image_key video_key "
    "audio_key custom_cls return_multi_modal_inputs mm_processor_kwargs sampler datagen filter_prompts "
    "need_tools_kwargs chat_template_func".split()
)

# Arguments of `apply_chat_template` that would change what it returns → what to use instead.
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
    """The options of `gpuload.load`.

    Attributes:
        prompt_key: the column with the prompts: messages (lists of {role, content}) or plain strings.
        max_prompt_length: the limit in tokens, and the width of padded rows.
        filter_overlong_prompts: drop rows over the limit.
        truncation: what a batch does with a row over the limit that was not dropped: raise an "error", or truncate it
            on the "left", on the "right" or in the "middle".
        return_raw_chat: rows have `raw_prompt`, the messages as they are in the file.
        return_full_prompt: rows have `full_prompts`, the rendered text.
        apply_chat_template_kwargs: constants for the chat template (`tools`, `enable_thinking`, `documents`, ...).
        chat_template: "default" (the tokenizer's own), the name of one of its templates, the text of a template, or
            None: prompts are plain strings, tokenized without a template.
        max_samples: take at most this many rows, before the filter; -1 for all.
        shuffle: take `max_samples` at random instead of the first ones; also the loader's default.
        seed: for `shuffle`; None for a random one.
        pad_token_id: the padding token; None for the tokenizer's `pad_token_id`, or else its `eos_token_id`.
        cache_dir: directory for copies of remote files and for cached token ids; None for `$GPULOAD_CACHE`, else
            `$XDG_CACHE_HOME/gpuload`, else `~/.cache/gpuload`.
        token_cache: cache the token ids of files in `cache_dir`/tokens, and reuse them.
        token_cache_bytes: limit of that cache; least recently used entries are removed first. 0: a tenth of the free
            disk space, and at most 20 GB.
        device: "auto" (a GPU if one works, else the CPU; the report says why), "cpu", "cuda" or "cuda:N".
        tokens_on: where the GPU engine stores ids: on the "device" (4 bytes per token), or in pinned memory of the
            "host", from which each batch is read one batch ahead.
        gpu_memory_limit: bytes of GPU memory that a load may use in addition to the stored ids; 0 for half of what is
            free.
        verify: compare the fast path with the tokenizer on a "sample" of rows, on all ("full") or on none ("off").
        strict: raise an error for a row that cannot be rendered, and for a token that differs, instead of dropping the
            row and of falling back to the tokenizer.
        progress: show a progress bar; None: if standard error is a terminal.
        trust_remote_code: passed to transformers if the tokenizer is given by name.
    """

    prompt_key: str = "prompt"
    max_prompt_length: int = 1024
    filter_overlong_prompts: bool = True
    truncation: Truncation = "error"
    return_raw_chat: bool = False
    return_full_prompt: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = "default"
    max_samples: int = -1
    shuffle: bool = False
    seed: int | None = None
    pad_token_id: int | None = None
    cache_dir: str | None = None
    token_cache: bool = True
    token_cache_bytes: int = 0
    device: str = "auto"
    tokens_on: TokensOn = "device"
    gpu_memory_limit: int = 0
    verify: Verify = "sample"
    strict: bool = False
    progress: bool | None = None
    trust_remote_code: bool = False

    @staticmethod
    def parse(given: Mapping[str, Any]) -> "Options":
        """Checks keyword arguments, or a trainer's `data:` section (a dict or an OmegaConf mapping).

        Raises:
            OptionError: an unknown key (the message names the nearest known one), or an invalid value.

        Example:
            >>> Options.parse({"max_prompt_length": 512, "train_batch_size": 1024}).max_prompt_length
            512
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
        options = Options(**values)
        options._check()
        return options

    def _check(self) -> None:
        base, _, number = self.device.partition(":") if isinstance(self.device, str) else ("", "", "")
        known_device = self.device in ("auto", "cpu", "cuda") or (base == "cuda" and number.isdigit())
        for name in ("prompt_key", "device"):
            _expect(self, name, bool(getattr(self, name)) and isinstance(getattr(self, name), str), "a string")
        _expect(self, "cache_dir", self.cache_dir is None or _is_string(self.cache_dir), "a path, or None")
        for name in _FLAGS:
            _expect(self, name, isinstance(getattr(self, name), bool), "True or False")
        for name, choices in (("truncation", Truncation), ("tokens_on", TokensOn), ("verify", Verify)):
            _expect(self, name, getattr(self, name) in get_args(choices), f"one of {_names(choices)}")
        _expect(
            self, "max_prompt_length", _is_int(self.max_prompt_length) and self.max_prompt_length > 0, "an integer > 0"
        )
        several = _is_int(self.max_samples) and (self.max_samples > 0 or self.max_samples == -1)
        _expect(self, "max_samples", several, "an integer > 0, or -1 for all rows")
        _expect(self, "seed", self.seed is None or (_is_int(self.seed) and self.seed >= 0), "an integer >= 0, or None")
        _expect(self, "pad_token_id", self.pad_token_id is None or _is_int(self.pad_token_id), "a token id, or None")
        _expect(
            self,
            "chat_template",
            self.chat_template is None or isinstance(self.chat_template, str),
            "a string, or None",
        )
        for name in ("gpu_memory_limit", "token_cache_bytes"):
            _expect(self, name, _is_int(getattr(self, name)) and getattr(self, name) >= 0, "a number of bytes, or 0")
        _expect(self, "device", known_device, "'auto', 'cpu', 'cuda' or 'cuda:N'")
        kwargs = self.apply_chat_template_kwargs
        _expect(self, "apply_chat_template_kwargs", isinstance(kwargs, Mapping), "a mapping")
        check_template_kwargs(kwargs)


_FLAGS = "filter_overlong_prompts return_raw_chat return_full_prompt shuffle strict token_cache".split()


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Checks arguments for the chat template.

    Raises:
        OptionError: one of them would change what `apply_chat_template` returns.
    """
    for key, remedy in _SET_BY_LOADER.items():
        if key in kwargs:
            raise OptionError(f"apply_chat_template_kwargs.{key} is set by the loader: {remedy or 'remove it'}")


def _expect(options: Options, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name}={getattr(options, name)!r}: expected {wanted}")


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
