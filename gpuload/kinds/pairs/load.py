"""load_pairs(): preference data, by the stages of `load`."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Array, Ragged, RowNumbers, on_host
from gpuload.core.errors import DataError, OptionError
from gpuload.core.options import Objective, Options, TokensOn, Verify, nearest
from gpuload.dataset.fingerprint import Fingerprint
from gpuload.dataset.origins import Origins
from gpuload.dataset.report import Report
from gpuload.engines.choose import EngineBuilder
from gpuload.engines.protocol import Engine, TokenStore
from gpuload.kinds.chats.formats import Format, as_prompts, one_format
from gpuload.kinds.chats.load import Overlong, training_options
from gpuload.kinds.pairs.dataset import PairDataset
from gpuload.kinds.pairs.device import pair_engine
from gpuload.kinds.pairs.formats import FORMATS, MARGIN, find_pair_format, label_column
from gpuload.kinds.pairs.parts import CHOSEN, REJECTED, completion_tokens, sequence
from gpuload.kinds.pairs.reference import PairReference
from gpuload.kinds.pairs.store import equal_pairs, part_sizes
from gpuload.pipeline.ranks import joined
from gpuload.pipeline.run import load_sources
from gpuload.sources.columns import Columns
from gpuload.sources.open import open_all
from gpuload.sources.read import Source
from gpuload.sources.types import is_text

UNPAIRED_ROWS = 1000
"""Pairs that become single completions at a time: their chosen completions, then their rejected ones. As in TRL."""


def load_pairs(
    files: Any,
    tokenizer: Any = None,
    /,
    *,
    objective: Objective | None = None,
    format: str | None = None,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    prompt_key: str | None = None,
    kl_batch_size: int = 8,
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
    gpu_memory_limit: int = 0,
    verify: Verify = "sample",
    strict: bool = False,
    progress: bool | None = None,
    trust_remote_code: bool = False,
    distributed: bool = False,
) -> PairDataset:
    """Loads preference data as exact tokens, as TRL's trainers prepare it for DPO, reward models and KTO.

    The ids of a sequence are those of `tokenizer.apply_chat_template(prompt + completion)`. A completion begins where
    they first differ from those of the prompt with a generation prompt; for DPO, where either sequence first does.

    Args:
        files: as for `load`.
        tokenizer: as for `load`.
        objective: "dpo" or "rm" (reward models) for pairs, "kto" for single completions with labels, which may be
            made from pairs. None: "kto" for files with labels and without pairs, else "dpo".
        format: "preference", "implicit", "sharegpt", "prompt-completion" or "messages"; None: found by the columns.
        chosen_key: the column with the better completions.
        rejected_key: the column with the worse ones.
        prompt_key: the column with the prompts; None for "prompt".
        kl_batch_size: for "kto", rows of a group in which completions are exchanged for `KL_completion_ids`: TRL's
            `per_device_train_batch_size`.
        max_length: the limit in tokens, for each sequence.
        overlong: what becomes of longer rows: "drop" them, or "keep_start" or "keep_end" of each sequence in a batch.
            With "keep_start", rows are dropped whose prompt alone fills `max_length`.
        apply_chat_template_kwargs: constants for the chat template.
        chat_template: as for `load`.
        max_samples: take at most this many rows of the files, before anything is dropped; -1 for all.
        shuffle: take `max_samples` at random; also the loader's default.
        seed: for `shuffle`.
        pad_token_id: the padding token, instead of the tokenizer's.
        cache_dir: directory for copies of remote files and for cached token ids.
        remote_timeout: seconds that a web server may be silent before an attempt to download fails.
        token_cache: cache the token ids of files, and reuse them.
        token_cache_bytes: limit of that cache.
        device: "auto", "cpu", "cuda" or "cuda:N". On a GPU, messages are rendered and encoded by kernels; data in other
            forms is prepared on the CPU, and its batches are made on the GPU.
        tokens_on: where the GPU engine stores ids.
        gpu_memory_limit: bytes of GPU memory that a load may use in addition to the stored ids.
        verify: compare a "sample" of the rows, all ("full") or none ("off") with the tokenizer.
        strict: raise an error for a row that would be dropped, and for a token that differs.
        progress: show a progress bar; None: if standard error is a terminal.
        trust_remote_code: passed to transformers if the tokenizer is given by name.
        distributed: share the work among the ranks of `torch.distributed`; every rank gets all rows.

    Returns:
        The rows that were kept, with tokens and all other columns.

    Raises:
        OptionError: an unknown option or an invalid value.
        SourceError: a file that cannot be found, downloaded or read.
        DataError: a file with another format, or no rows left.
        TokenizerError: as for `load`; or a text needs an EOS token, and there is none.
        DeviceError: the device is not available, or has too little memory.
        HostMemoryError: the host has too little memory.
        MismatchError: with `strict=True`, a token differs from the tokenizer's.
    """
    return load_given_pairs(locals(), pair_engine)


def load_given_pairs(given: Mapping[str, Any], build_engine: EngineBuilder) -> PairDataset:
    """`load_pairs` with another way to build the engine.

    Args:
        given: the arguments of `load_pairs` by name, all of them.
        build_engine: builds the engine.
    """
    started, given = time.perf_counter(), dict(given)
    with joined(given["distributed"] is True):  # what fails on one rank fails on all
        return _load_given(given, started, build_engine)


def _load_given(given: Mapping[str, Any], started: float, build_engine: EngineBuilder) -> PairDataset:
    keys = {part: given[f"{part}_key"] for part in ("prompt", "chosen", "rejected")}
    keys["prompt"] = "prompt" if keys["prompt"] is None else keys["prompt"]
    objective, overlong = given["objective"], given["overlong"]
    _check(objective, given["format"], keys, given["kl_batch_size"])
    options = training_options(given, keys["prompt"])
    opened = [source for source in open_all(given["files"], options) if source.num_rows]
    if objective is None:
        objective = "kto" if label_column(opened[0].schema, keys) else "dpo"
    sources, reference, options, found = open_pairs(
        opened, given["tokenizer"], options, objective, given["format"], keys
    )
    make = PairMaker(objective, given["kl_batch_size"], keys["chosen"] in found.columns)
    return load_opened_pairs(sources, reference, options, found, make, overlong, started, build_engine)


def open_pairs(
    opened: Sequence[Source],
    tokenizer: Any,
    options: Options,
    objective: Objective,
    format: str | None,
    keys: dict[str, str],
) -> tuple[list[Source], PairReference, Options, Format]:
    """Finds the format of opened files, and opens the tokenizer.

    Args:
        opened: files that have rows.
        tokenizer, objective, format: as for `load_pairs`.
        options: of the load; the column `prompt_key` is made.
        keys: "prompt", "chosen" and "rejected" → the column.

    Returns:
        The sources with one column of pairs or completions; the tokenizer; the options as this format needs them; and
        the format.
    """
    formats = _formats_of(opened, objective, format, keys)
    found = formats[0][1]
    if all(_is_plain(source.schema, found) for source in opened):
        options = replace(options, chat_template=None)
    reference = PairReference(tokenizer, objective, **options.of_tokenizer())
    return [as_prompts(source, each, keys["prompt"], reference) for source, each in formats], reference, options, found


def load_opened_pairs(
    sources: list[Source],
    reference: PairReference,
    options: Options,
    found: Format,
    make: "PairMaker",
    overlong: Overlong = "drop",
    started: float | None = None,
    build_engine: EngineBuilder = pair_engine,
) -> PairDataset:
    """Loads what `open_pairs` returned.

    Args:
        make: makes the dataset.
        overlong: as for `load_pairs`.
        started: when the files were being opened, as for `load_sources`.
    """
    useless = partial(useless_rows, make, options.max_prompt_length, overlong)
    dataset = load_sources(sources, reference, options, started, build_engine=build_engine, make=make, unusable=useless)
    assert isinstance(dataset, PairDataset)
    dataset.report.notes.insert(0, f"format: {found.name}, for {make.objective}")
    return dataset


@dataclass(frozen=True)
class PairMaker:
    """Makes a `PairDataset`: the `make` of `load_sources`.

    Attributes:
        objective, kl_batch_size: as for `load_pairs`.
        paired: whether the files have pairs.
    """

    objective: Objective
    kl_batch_size: int
    paired: bool
    limit_name: str = "max_length"

    @property
    def unpairs(self) -> bool:
        """Whether pairs become single completions."""
        return self.paired and self.objective == "kto"

    def limited(self, ids: Any) -> Array:
        """(n,) tokens of the longer sequence of each pair; of the shorter one if each is a row of its own later."""
        sizes = part_sizes(ids)
        return sizes.shorter if self.unpairs else sizes.longer

    def __call__(
        self,
        store: TokenStore,
        columns: Columns,
        origins: Origins,
        engine: Engine,
        options: Options,
        pad_token_id: int,
        report: Report,
        about: Fingerprint,
    ) -> PairDataset:
        labels = None
        if self.paired and (equal := equal_pairs(store)):
            report.counts["pairs with equal chosen and rejected sequences"] = equal
        if self.unpairs:
            store, rows, labels = self._unpaired(store.to_host(), origins, engine, options)
            columns, origins = columns.select(rows), origins.select(rows)
            report.counts["rows with one completion, made from pairs"] = len(store)
        about = about | {
            "options": about["options"] | {"objective": self.objective, "kl_batch_size": self.kl_batch_size}
        }
        return PairDataset(
            *(store, columns, origins, engine, options, pad_token_id, report, about),
            objective=self.objective,
            kl_batch_size=self.kl_batch_size,
            labels=labels,
        )

    def _unpaired(
        self, pairs: Ragged, origins: Origins, engine: Engine, options: Options
    ) -> tuple[TokenStore, RowNumbers, Array]:
        """The two sequences of each pair as rows of their own: ids, number of the pair, label."""
        number = origins.numbers  # over all files, before any was dropped
        if np.any(np.diff(number) < 0):  # drawn at random
            number = np.arange(len(number))
        limit = options.max_prompt_length
        stored, kept = [], []
        for bit in (REJECTED, CHOSEN):
            ids = sequence(pairs, bit)
            learned, keep = part_sizes(ids).completion, np.ones(len(ids), bool)
            if options.filter_overlong_prompts:
                keep &= ids.lengths <= limit
            keep[list(useless_sequences(ids.lengths, learned, "kto", limit, options.truncation == "right"))] = False
            kept.append(np.flatnonzero(keep))
            stored.append(engine.keep(ids, kept[-1]))
        rows, label = np.concatenate(kept), np.repeat([True, False], list(map(len, kept)))
        order = np.lexsort((~label, number[rows] // UNPAIRED_ROWS))
        return engine.store(stored, order), rows[order], label[order]


def useless_rows(make: PairMaker, limit: int, overlong: Overlong, ids: Ragged) -> dict[int, str]:
    """The rows from which nothing would be learned: row → why.

    Args:
        limit: tokens of a sequence.
        ids: n rows with bits.
    """
    sizes, is_pair = part_sizes(ids), make.paired
    parts = ((sizes.rejected, REJECTED), (sizes.chosen, CHOSEN)) if is_pair else ((0, np.int32(0)),)
    found = []
    for more, bit in parts:  # what is not of the sequence
        length, learned = on_host(sizes.all - more), on_host(completion_tokens(ids, bit))
        found.append(useless_sequences(length, learned, make.objective, limit, overlong == "keep_start"))
    if make.unpairs:
        return {row: why for row, why in found[0].items() if row in found[1]}
    return {row: why for each in reversed(found) for row, why in each.items()}


def useless_sequences(
    length: RowNumbers, learned: RowNumbers, objective: Objective, limit: int, start_only: bool
) -> dict[int, str]:
    """The sequences of which no token would be learned: row → why.

    Args:
        length: (n,) tokens of each.
        learned: (n,) those of its completion.
        limit: tokens of a sequence.
        start_only: whether longer ones keep their start.
    """
    learned = length if objective == "rm" else learned
    reasons = {}
    if start_only and objective != "rm":
        why = f"the prompt alone fills max_length={limit}"
        reasons = dict.fromkeys(np.flatnonzero(length - learned >= limit).tolist(), why)
    return reasons | dict.fromkeys(np.flatnonzero(learned == 0).tolist(), "a completion has no tokens")


def _check(objective: Any, format: Any, keys: Mapping[str, Any], kl_batch_size: Any) -> None:
    if objective is not None and objective not in get_args(Objective):
        names = ", ".join(map(repr, get_args(Objective)))
        raise OptionError(f"objective={objective!r}: expected one of {names}, or None")
    if format is not None and format not in FORMATS:
        raise OptionError(f"format={format!r}{nearest(str(format), set(FORMATS))}")
    for name, key in keys.items():
        if not isinstance(key, str) or not key:
            raise OptionError(f"{name}_key={key!r}: expected the name of a column")
    if isinstance(kl_batch_size, bool) or not isinstance(kl_batch_size, int) or kl_batch_size < 1:
        raise OptionError(f"kl_batch_size={kl_batch_size!r}: expected an integer > 0")


def _formats_of(
    sources: Sequence[Source], objective: Objective, format: str | None, keys: dict[str, str]
) -> list[tuple[Source, Format]]:
    """The sources, each with its format; all have the same."""
    found = [(each, find_pair_format(each.schema, each.name, objective, format, keys)) for each in sources]
    one_format({source.name: each.name for source, each in found})
    margins = [source.name for source in sources if objective == "rm" and MARGIN in source.schema.names]
    if 0 < len(margins) < len(sources):
        raise DataError(f"column {MARGIN!r} is in some files only, such as {margins[0]}: add it to the others")
    return found


def _is_plain(schema: pa.Schema, found: Format) -> bool:
    """Whether no template renders the data of a file: all of it is text."""
    return all(is_text(schema.field(name).type) for name in found.columns)
