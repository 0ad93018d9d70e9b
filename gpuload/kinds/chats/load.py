"""load_chats(): data for SFT, by the stages of `load`."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged
from gpuload.core.errors import DataError, NoRowsError, OptionError
from gpuload.core.marks import without_loss
from gpuload.core.options import LossOn, Options, Store, TokensOn, Verify, nearest
from gpuload.engines.choose import EngineBuilder
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.chats.device import chat_engine
from gpuload.kinds.chats.formats import FORMATS, LABELS, Format, as_prompts, find_format, is_plain, one_format
from gpuload.kinds.chats.reference import ChatReference
from gpuload.pipeline.ranks import joined
from gpuload.pipeline.run import load_sources
from gpuload.sources.open import open_all
from gpuload.sources.read import Source
from gpuload.template.marks import UnknownAnswersError
from gpuload.template.turns import unknown

Overlong = Literal["drop", "keep_start", "keep_end"]

_TRUNCATION = {"drop": "error", "keep_start": "right", "keep_end": "left"}
"""What becomes of longer rows → the option `truncation` of `load`."""

_CHOICES: dict[str, tuple[LossOn, ...]] = {
    **dict.fromkeys(("messages", "sharegpt", "alpaca"), ("assistant", "last", "all")),
    "prompt-completion": ("completion", "assistant", "all"),
    "text": ("all",),
}
"""What can have loss in data of each format; the first is the default."""

_LABELED = ("messages", "sharegpt", "prompt-completion")
"""Formats that data for KTO may have, too."""


def load_chats(
    files: Any,
    tokenizer: Any = None,
    /,
    *,
    format: str | None = None,
    messages_key: str | None = None,
    loss_on: LossOn | None = None,
    max_length: int = 4096,
    overlong: Overlong = "drop",
    apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | os.PathLike[str] | None = "default",
    max_samples: int = -1,
    shuffle: bool = False,
    seed: int | None = None,
    pad_token_id: int | None = None,
    cache_dir: str | None = None,
    remote_timeout: float = 60.0,
    token_cache: bool = True,
    token_cache_bytes: int = 0,
    device: str = "auto",
    tokens_on: TokensOn = "auto",
    store: Store = "auto",
    gpu_memory_limit: int = 0,
    verify: Verify = "sample",
    strict: bool = False,
    progress: bool | None = None,
    trust_remote_code: bool = False,
    distributed: bool = False,
) -> ChatDataset:
    """Loads data for SFT as exact tokens, with a loss mask.

    The ids of a conversation are those of `tokenizer.apply_chat_template(messages)`. For a template with
    `{% generation %}` blocks the mask is that of `return_assistant_tokens_mask=True`; for other templates it has the
    answers of assistants, see `gpuload.template.answers`.

    Args:
        files: as for `load`.
        tokenizer: as for `load`.
        format: "messages", "sharegpt", "prompt-completion", "alpaca" or "text"; None: found by the columns.
        messages_key: the column with messages or texts, if it has another name than usual.
        loss_on: the tokens with loss: those of the answers of the "assistant", of the "last" answer, of the
            "completion", or "all". None: of answers for conversations, of the completion for prompt-completion, all
            for texts.
        max_length: the limit in tokens.
        overlong: what becomes of longer rows: "drop" them, or "keep_start" or "keep_end" of each. Rows without loss in
            what is kept are dropped.
        apply_chat_template_kwargs: constants for the chat template.
        chat_template: as for `load`.
        max_samples: take at most this many rows, before anything is dropped; -1 for all.
        shuffle: take `max_samples` at random; also the loader's default.
        seed: for `shuffle`.
        pad_token_id: the padding token, instead of the tokenizer's.
        cache_dir: directory for copies of remote files and for cached token ids.
        remote_timeout: seconds that a web server may be silent before an attempt to download fails.
        token_cache: cache the token ids of files with their loss mask, and reuse them.
        token_cache_bytes: limit of that cache.
        device: "auto", "cpu", "cuda" or "cuda:N". On a GPU, messages are rendered and encoded by kernels; data in other
            forms is prepared on the CPU, and its batches are made on the GPU.
        tokens_on: where the GPU engine stores ids.
        store: as for `load`.
        gpu_memory_limit: bytes of GPU memory that a load may use in addition to the stored ids.
        verify: compare a "sample" of the rows, all ("full") or none ("off") with the tokenizer, masks included.
        strict: raise an error for a row that would be dropped, and for a token that differs.
        progress: show a progress bar; None: if standard error is a terminal.
        trust_remote_code: passed to transformers if the tokenizer is given by name.
        distributed: share the work among the ranks of `torch.distributed`; every rank gets all rows.

    Returns:
        The rows that were kept, with tokens, loss mask and all other columns.

    Raises:
        OptionError: an unknown option or an invalid value.
        SourceError: a file that cannot be found, downloaded or read.
        DataError: a file with another format, or no rows left.
        TokenizerError: as for `load`; or it is unknown where an answer begins in what the template renders.
        DeviceError: the device is not available, or has too little memory.
        HostMemoryError: the host has too little memory.
        StoreError: the store on disk cannot be written.
        MismatchError: with `strict=True`, a token or its loss differs from the tokenizer's.
    """
    return load_given(locals(), chat_engine)


def load_given(given: Mapping[str, Any], build_engine: EngineBuilder) -> ChatDataset:
    """`load_chats` with another way to build the engine.

    Args:
        given: the arguments of `load_chats` by name, all of them.
        build_engine: builds the engine.
    """
    started, given = time.perf_counter(), dict(given)
    with joined(given["distributed"] is True):  # what fails on one rank fails on all
        _check(given["format"], given["messages_key"], given["loss_on"])
        options = training_options(given, given["messages_key"] or "messages")
        form = (given[name] for name in ("format", "messages_key", "loss_on"))
        opened = open_chats(open_all(given["files"], options), given["tokenizer"], options, *form)
        return load_opened(*opened, started, build_engine)


def open_chats(
    opened: Sequence[Source],
    tokenizer: Any,
    options: Options,
    format: str | None = None,
    messages_key: str | None = None,
    loss_on: LossOn | None = None,
) -> tuple[list[Source], ChatReference, Options, str]:
    """Finds the format of opened files, and opens the tokenizer.

    Args:
        opened: files or a frame.
        tokenizer, format, messages_key, loss_on: as for `load_chats`.
        options: of the load; the column `prompt_key` is made.

    Returns:
        The sources with one column of conversations, prompts with completions, or texts; the tokenizer; the options as
        this format needs them; and the format.
    """
    formats, found = _formats_of(opened, format, messages_key)
    if all(source.num_rows == 0 or is_plain(found, source.schema) for source in opened):
        options = replace(options, chat_template=None)
    wanted = loss_on or _CHOICES[found][0]
    if wanted not in _CHOICES[found]:
        choices = ", ".join(map(repr, _CHOICES[found]))
        raise OptionError(f"loss_on={wanted!r}: data in the format {found} has no such part: use one of {choices}")
    reference = ChatReference(tokenizer, wanted, **options.of_tokenizer())
    sources = [as_prompts(source, each, options.prompt_key, reference) for source, each in formats]
    return sources, reference, options, found


def load_opened(
    sources: list[Source],
    reference: ChatReference,
    options: Options,
    found: str,
    started: float | None = None,
    build_engine: EngineBuilder = chat_engine,
) -> ChatDataset:
    """Loads what `open_chats` returned.

    Args:
        started: when the files were being opened, as for `load_sources`.
    """
    useless = partial(without_answer, options)
    try:
        dataset = load_sources(
            sources, reference, options, started, build_engine=build_engine, make=ChatDataset, unusable=useless
        )
    except NoRowsError as error:
        reasons = list(error.report.rejected) if error.report is not None else []
        if reasons and all(reason.startswith(UnknownAnswersError.__name__) for reason in reasons):
            raise unknown(reasons[0].partition(": ")[2]) from error
        raise
    dataset.report.notes.insert(0, f"format: {found}, loss on {reference.loss_on}")
    assert isinstance(dataset, ChatDataset)
    return dataset


def without_answer(options: Options, ids: Ragged) -> dict[int, str]:
    """The rows of which no token would be learned."""
    reasons = {}
    if not options.filter_overlong_prompts:
        limit = options.max_prompt_length
        kept = without_loss(ids, limit, options.truncation)
        why = f"no token with loss is within max_length={limit}"
        reasons = dict.fromkeys(np.flatnonzero(kept).tolist(), why)
    why = "no token has loss: there is no answer of an assistant"
    return reasons | dict.fromkeys(np.flatnonzero(without_loss(ids)).tolist(), why)


def _check(format: Any, messages_key: Any, loss_on: Any) -> None:
    names = [each.name for each in FORMATS]
    if format is not None and format not in names:
        raise OptionError(f"format={format!r}{nearest(str(format), set(names))}")
    if messages_key is not None and (not isinstance(messages_key, str) or not messages_key):
        raise OptionError(f"messages_key={messages_key!r}: expected the name of a column, or None")
    if loss_on is not None and loss_on not in get_args(LossOn):
        raise OptionError(f"loss_on={loss_on!r}: expected one of {', '.join(map(repr, get_args(LossOn)))}, or None")


def training_options(given: Mapping[str, Any], prompt_key: str) -> Options:
    """The options of a load of training data, which has `max_length` and `overlong`.

    Args:
        given: arguments by name; those that are no options are left out. Without `store`, rows are in memory.
        prompt_key: the column that is made of the data.

    Raises:
        OptionError: an invalid value.
    """
    max_length, overlong = given["max_length"], given["overlong"]
    if overlong not in get_args(Overlong):
        raise OptionError(f"overlong={overlong!r}: expected one of {', '.join(map(repr, get_args(Overlong)))}")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise OptionError(f"max_length={max_length!r}: expected an integer > 0")
    return Options.parse(
        {"store": "memory"}
        | {name: value for name, value in given.items() if name in Options.__dataclass_fields__}
        | {
            "prompt_key": prompt_key,
            "max_prompt_length": max_length,
            "filter_overlong_prompts": overlong == "drop",
            "truncation": _TRUNCATION[overlong],
        }
    )


def _formats_of(
    sources: Sequence[Source], format: str | None, messages_key: str | None
) -> tuple[list[tuple[Source, Format]], str]:
    """The sources with rows, each with its format, and the name of the format that all of them have."""
    filled = [source for source in sources if source.num_rows]
    for source in filled:
        if format is None and {"chosen", "rejected"} <= set(source.schema.names):
            raise DataError(
                f"{source.name}: preference data, with columns chosen and rejected: use load_pairs, or pass format= to "
                "train on the other columns as they are"
            )
    found = {source.name: find_format(source.schema, source.name, format, messages_key) for source in filled}
    name = one_format({source: each.name for source, each in found.items()})
    for source in filled:
        if format is None and name in _LABELED and (label := _label_of(source)):
            raise DataError(
                f"{source.name}: column {label!r} says which answers are good ones, as in data for KTO: use "
                f"load_pairs, or pass format={name!r} to train on all answers, also on bad ones"
            )
    return [(source, found[source.name]) for source in filled], name


def _label_of(source: Source) -> str | None:
    """The column that says whether the answer of a row is a good one; None if there is none.

    A column `label` of integers may mean something else: it counts if the first rows have 0 and 1, and nothing else.
    """
    name = next((each for each in LABELS if each in source.schema.names), None)
    if name is None:
        return None
    kind = source.schema.field(name).type
    if name != "label" or pa.types.is_boolean(kind):
        return name
    if not pa.types.is_integer(kind):
        return None
    first = next(iter(source.batches()), None)
    values = set() if first is None else set(pc.unique(first.column(name).drop_null()).to_pylist())
    return name if values == {0, 1} else None
