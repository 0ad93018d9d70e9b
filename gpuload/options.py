"""The options of one load, checked once, at the door.

They carry verl's own key names, so that a trainer's `data:` section can be passed as it is: `load(files, tokenizer,
**config.data)`. Keys of that section which are not about loading prompts are accepted and ignored; any other unknown
key is an error.
"""

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gpuload.errors import OptionError

Truncation = Literal["error", "left", "right", "middle"]
Verify = Literal["sample", "full", "off"]
Padding = Literal["max_length", "longest"]
TokensOn = Literal["device", "host"]

# The keys of verl 0.9.1's `data:` section (trainer/config/data/legacy_data.yaml) that say nothing about how prompts
# are read, rendered and tokenized here.
_IGNORED = frozenset(
    "tokenizer use_shm train_files val_files train_max_samples val_max_samples reward_fn_key max_response_length "
    "train_batch_size gen_batch_size val_batch_size tool_config_path function_tool_path return_raw_input_ids "
    "dataloader_num_workers image_patch_size validation_shuffle filter_overlong_prompts_workers image_key video_key "
    "audio_key custom_cls return_multi_modal_inputs mm_processor_kwargs sampler datagen filter_prompts "
    "need_tools_kwargs chat_template_func".split()
)

# What `apply_chat_template` takes besides the template's own variables, and that would change the shape of its answer:
# this is decided by the loader.
_DECIDED_HERE = {
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
    """What `gpuload.load` takes besides files and a tokenizer.

    Attributes:
        prompt_key: the column that holds prompts: messages (list of {role, content}) or plain strings.
        max_prompt_length: the limit in tokens, and the width of padded rows.
        filter_overlong_prompts: drop rows longer than the limit.
        truncation: what a batch does to a row over the limit that was not dropped.
        return_raw_chat: rows carry `raw_prompt`, the messages as they are in the file.
        return_full_prompt: rows carry `full_prompts`, the rendered text.
        apply_chat_template_kwargs: constants for the chat template (`tools`, `enable_thinking`, `documents`, ...).
        chat_template: "default" (the tokenizer's own), the name of one of its templates, the text of a template, or
            None: prompts are plain strings, tokenized as they are.
        max_samples: at most this many rows, taken before the filter; -1 for all.
        shuffle: take `max_samples` at random rather than the first ones; also the loader's default.
        seed: for `shuffle`; None draws a fresh one.
        pad_token_id: overrides the tokenizer's.
        cache_dir: where remote files are copied to, once, and token ids are kept; `$GPULOAD_CACHE` where that is set.
        token_cache: keep the ids of files in `cache_dir`/tokens, and use what is kept there.
        token_cache_bytes: what they may take there; those not used for the longest time go first. 0: a tenth of the
            free disk, and at most 20 GB.
        device: "auto" (a GPU where one works, else the CPU; the report says why), "cpu", "cuda" or "cuda:N".
        tokens_on: where the GPU engine keeps the ids that batches are made of: on the "device" (4 bytes a token), or
            pinned on the "host", from where each batch's ids cross the bus one batch ahead.
        gpu_memory_limit: bytes of GPU memory that a load may take beside the store of ids; 0: half of what is free.
        verify: compare the fast path with the reference on a "sample" of rows, on all ("full") or on none ("off").
        strict: a row that cannot be rendered, or a token that differs, is an error rather than a dropped row and a
            slower path.
        progress: show a progress bar; None: where there is a terminal.
        trust_remote_code: passed on to transformers when the tokenizer is given by name.
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
    cache_dir: str = field(default_factory=lambda: os.environ.get("GPULOAD_CACHE") or "~/.cache/gpuload")
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
        """Options from keyword arguments or a trainer's `data:` section (a dict or an OmegaConf mapping).

        Raises:
            OptionError: for an unknown key (naming the nearest known one) or a value that makes no sense.
        """
        known = {f.name for f in dataclasses.fields(Options)}
        unknown = sorted(set(given) - known - _IGNORED)
        if unknown:
            raise OptionError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}{nearest(unknown[0], known)}"
            )
        options = Options(**{key: plain(value) for key, value in given.items() if key in known})
        options._check()
        return options

    def _check(self) -> None:
        for name in ("prompt_key", "cache_dir", "device"):
            _expect(self, name, bool(getattr(self, name)) and isinstance(getattr(self, name), str), "a string")
        flags = "filter_overlong_prompts return_raw_chat return_full_prompt shuffle strict token_cache"
        for name in flags.split():
            _expect(self, name, isinstance(getattr(self, name), bool), "True or False")
        _expect(self, "max_prompt_length", _is_int(self.max_prompt_length) and self.max_prompt_length > 0, "tokens > 0")
        _expect(self, "truncation", self.truncation in get_args(Truncation), f"one of {_names(Truncation)}")
        _expect(self, "tokens_on", self.tokens_on in get_args(TokensOn), f"one of {_names(TokensOn)}")
        _expect(self, "verify", self.verify in get_args(Verify), f"one of {_names(Verify)}")
        _expect(self, "max_samples", _is_int(self.max_samples) and self.max_samples >= -1, "a number of rows, or -1")
        _expect(self, "max_samples", self.max_samples != 0, "a number of rows, or -1 for all")
        _expect(self, "seed", self.seed is None or (_is_int(self.seed) and self.seed >= 0), "an integer >= 0, or None")
        _expect(self, "pad_token_id", self.pad_token_id is None or _is_int(self.pad_token_id), "a token id, or None")
        _expect(self, "chat_template", self.chat_template is None or isinstance(self.chat_template, str), "a string")
        for name in ("gpu_memory_limit", "token_cache_bytes"):
            _expect(self, name, _is_int(getattr(self, name)) and getattr(self, name) >= 0, "bytes, or 0")
        base, _, number = self.device.partition(":")
        _expect(
            self,
            "device",
            self.device in ("auto", "cpu", "cuda") or (base == "cuda" and number.isdigit()),
            "'auto', 'cpu', 'cuda' or 'cuda:N'",
        )
        kwargs = self.apply_chat_template_kwargs
        _expect(self, "apply_chat_template_kwargs", isinstance(kwargs, Mapping), "a mapping")
        check_template_kwargs(kwargs)


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises OptionError where an argument for the chat template would change what a load returns."""
    for key, remedy in _DECIDED_HERE.items():
        if key in kwargs:
            raise OptionError(f"apply_chat_template_kwargs.{key} is set by the loader: {remedy or 'remove it'}")


def _expect(options: Options, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name}={getattr(options, name)!r}: expected {wanted}")


def _names(literal: Any) -> str:
    return ", ".join(repr(value) for value in get_args(literal))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def nearest(name: str, known: set[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.65)
    return f": did you mean {close[0]}?" if close else f": there are {', '.join(sorted(known))}"


def plain(value: Any) -> Any:
    """Mappings and sequences of a configuration library (OmegaConf and others) as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value
