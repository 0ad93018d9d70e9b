"""Prompts of slime's dataset, rendered, encoded and filtered by columns.

1. The file is opened as slime reads it (`reading.py`). What slime would treat differently raises `DataError`, and slime
   does the work.
2. `load` renders and encodes prompts, and drops those over `--rollout-max-prompt-len`.
3. Samples of the first rows, or of rows of every shape if slime's code is not known, are compared with those that
   slime's own `Dataset` makes of them.
4. For SFT, conversations are tokenized with their loss masks (`masks.py`), or found in the token cache, and some are
   compared with slime's.
"""

import json
import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from slime.utils.data import Dataset, _parse_generalized_path

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged
from gpuload.core.errors import DataError
from gpuload.core.options import Options
from gpuload.core.words import counted
from gpuload.integrations.comparison import compare, covering_rows, sampled
from gpuload.integrations.core import are_messages, imported, release_of, unless_unsupported
from gpuload.integrations.known_code import change
from gpuload.integrations.messages.cache import RowCache, Rule
from gpuload.integrations.messages.rows import row_of
from gpuload.integrations.slime.contract import KNOWN, SFT_NAMES
from gpuload.integrations.slime.reading import check_labels, check_tools, open_rows
from gpuload.integrations.slime.samples import SampleColumns, SampleDataset, set_conversation
from gpuload.kinds.prompts import PromptKind, reference_of
from gpuload.pipeline.run import Job, run
from gpuload.sources.columns import Columns, to_python
from gpuload.sources.digest import column_digests
from gpuload.sources.read import Source, check_unchanged
from gpuload.sources.types import JSON_TYPE, is_messages, is_text

logger = logging.getLogger(__name__)

SFT_ROLLOUT = "gpuload.integrations.slime.sft_rollout"

_COMPARED = 16  # rows
_TEXT = "full_prompts"


def prepare(args: Any, tokenizer: Any, processor: Any, settings: dict[str, Any]) -> SampleDataset:
    """The dataset of slime's arguments, with a tokenizer and maybe a processor, and options of `gpuload.load`.

    Raises:
        DataError: slime has to prepare the samples itself.
        GpuloadError: as for `gpuload.load`.
    """
    started = time.perf_counter()
    if args.multimodal_keys is not None:
        raise DataError("multimodal_keys is set")
    given = [args.label_key, args.metadata_key, args.tool_key]
    if twice := {args.input_key, _TEXT} & set(given):
        raise DataError(f"column {twice.pop()!r} is used twice, or has a name that gpuload uses")
    path, rows = _parse_generalized_path(args.prompt_data)
    source = open_rows(path, rows, args.input_key, [name for name in given if name is not None])
    if args.label_key is not None:
        check_labels(source, args.label_key)
    found = set(source.schema.names)
    tools = check_tools(source, args.tool_key) if args.tool_key in found else None
    names = {
        "label": args.label_key,
        "metadata": args.metadata_key if args.metadata_key in found else None,
        "tools": args.tool_key if args.tool_key in found else None,
        "has_processor": processor is not None,
    }
    if _is_rendered(args, source, processor):
        if names["tools"] and args.apply_chat_template and tools is None:
            raise DataError(f"{source.name}: tools differ from row to row")
        made, origin = _tokenized(args, source, tokenizer, settings, tools, names, started)
    else:
        made = SampleColumns(Columns(source.batches()), args.input_key, **names)
        origin = np.arange(len(made))
        check_unchanged([source])
    _compare(args, source, tokenizer, processor, made, origin)
    if getattr(args, "rollout_function_path", None) == SFT_ROLLOUT and made.tokens is None:
        made = _with_conversations(args, tokenizer, settings, made)
    return SampleDataset(made, args.rollout_seed)


def _is_rendered(args: Any, source: Source, processor: Any) -> bool:
    """Whether prompts become texts. Otherwise they stay messages, which slime neither filters nor tokenizes. A
    `DataError` if they are of another kind."""
    kind = source.schema.field(args.input_key).type
    if processor is not None and not (are_messages(kind) or (is_text(kind) and args.apply_chat_template)):
        raise DataError(f"{source.name}: there is a processor, and column {args.input_key!r} is not messages with text")
    if args.apply_chat_template or is_text(kind):
        return True
    if kind == JSON_TYPE:  # messages with different keys, or a mix of messages and texts
        first = to_python(next(source.batches())[args.input_key].chunk(0).slice(0, 1))[0]
        if isinstance(first, list):
            return False
    if not is_messages(kind):
        raise DataError(f"{source.name}: column {args.input_key!r} has type {kind!s:.80}, not messages or texts")
    return False


def _tokenized(
    args: Any,
    source: Source,
    tokenizer: Any,
    settings: dict[str, Any],
    tools: Any,
    names: dict[str, Any],
    started: float,
) -> tuple[SampleColumns, np.ndarray[Any, Any]]:
    """Samples with ids, and the (n,) numbers of their rows."""
    limit = args.rollout_max_prompt_len
    constants = dict(args.apply_chat_template_kwargs or {}) | ({} if tools is None else {"tools": tools})
    own = {
        "prompt_key": args.input_key,
        "max_prompt_length": Options.max_prompt_length if limit is None else limit,
        "filter_overlong_prompts": limit is not None,
        "return_full_prompt": True,
        "apply_chat_template_kwargs": constants if args.apply_chat_template else {},
        "chat_template": "default" if args.apply_chat_template else None,
        "pad_token_id": 0,  # nothing is padded, and not all tokenizers have a padding token
    }
    options = Options.parse(settings | own)
    reference = reference_of(tokenizer, options)
    if reference.uses_template and (reference.sanitizes or not reference.encodes_rendered_text):
        raise DataError("the tokenizer class or apply_chat_template_kwargs change how texts are encoded")
    loaded = run(Job(PromptKind(), [source], reference, options, started))
    if rejected := loaded.report.rejected:
        reason, count = max(rejected.items(), key=lambda item: item[1])
        raise DataError(f"{counted(count, 'rows cannot be rendered')}: {reason}")
    logger.info("gpuload: %s", loaded.report)
    store = loaded.token_store
    tokens = store if isinstance(store, DiskTokens) else loaded.tokens
    made = SampleColumns(loaded.passed_through, _TEXT, **names, tokens=tokens)
    return made, loaded.origins[:, 1]


def _with_conversations(args: Any, tokenizer: Any, settings: dict[str, Any], made: SampleColumns) -> SampleColumns:
    """The same samples with ids for SFT, if slime's loss mask can be made by columns."""
    own = "slime's SFT rollout, which tokenizes at each step"
    found = unless_unsupported(lambda: _conversations(args, tokenizer, settings, made), logger, own)
    if found is None:
        return made
    if missing := int((found.lengths == 0).sum()):
        logger.warning("gpuload: %d of %d conversations are tokenized by slime, at each step", missing, len(found))
    return replace(made, conversations=found)


def _conversations(args: Any, tokenizer: Any, settings: dict[str, Any], samples: SampleColumns) -> Ragged | DiskTokens:
    """The ids of conversations, with a bit for loss, of which some were compared with slime's; a `DataError` if slime
    has to tokenize all rows, and others as of `gpuload.load_chats`."""
    stock, missing = imported(SFT_NAMES)
    if missing is not None:
        raise DataError(missing)
    from gpuload.integrations.slime.masks import MaskedConversations

    conversations = MaskedConversations(args, tokenizer, samples)
    names = [name for name in (samples.prompt, samples.metadata, samples.tools) if name is not None]
    table = samples.columns.table().select(names)
    generator, *methods, rollout = stock.values()
    functions = [generator.__init__, *methods, rollout]
    release = release_of("slime", "slime")
    rule = Rule(release, functions, conversations.settings | {"columns": [str(field) for field in table.schema]})
    unequal = partial(_unequal, args, tokenizer, samples, stock, change(release, KNOWN, *functions))
    with RowCache(
        Options.parse(settings | {"verify": "sample"}),
        conversations.templates.default.reference,
        rule,
        name=str(args.prompt_data),
        rows=len(samples),
        nbytes=table[samples.prompt].nbytes,
        content=lambda _: b"".join(digest for _, digest in sorted(column_digests([(0, table)]).items())),
    ) as cache:
        rows = cache.find_or_make(lambda found: unequal(found.ids), lambda: (conversations.rows(), None), logger)
    if isinstance(rows, str):
        raise DataError(rows)
    return rows.ids


def _unequal(
    args: Any,
    tokenizer: Any,
    samples: SampleColumns,
    stock: Mapping[str, Any],
    changed: str | None,
    made: Ragged | DiskTokens,
) -> str | None:
    """Which row of a sample of the ids `made` differs from slime's; None if none does. `stock` is what is used of
    slime."""
    numbers = np.flatnonzero(made.lengths)
    if not len(numbers):
        return None  # slime tokenizes all rows, at each step
    generator, *_, rollout = stock.values()
    rows = sampled(made.lengths[numbers], changed, lambda: samples.columns.table().filter(pa.array(made.lengths > 0)))
    masks: Any = generator(tokenizer, args.loss_mask_type) if changed is None else None

    def ours(row: int) -> str:
        (sample,) = samples.take(np.array([row]))
        set_conversation(sample, row_of(made, row))
        sample.reward = 0
        return repr(sample)

    def theirs(row: int) -> str:
        (sample,) = samples.take(np.array([row]))
        if changed is not None:  # it opens the tokenizer by itself, once for all rows and steps
            rollout(args, 0, SimpleNamespace(get_samples=lambda count: [[sample]]))
            return repr(sample)
        sample.tokens, mask = masks.get_loss_mask(sample.prompt, tools=sample.metadata.get("tools"))
        sample.response_length = masks.get_response_lengths([mask])[0]
        sample.loss_mask, sample.reward = mask[-sample.response_length :], 0
        return repr(sample)

    return compare(numbers[rows].tolist(), ours, theirs, changed, logger=logger, trainer="slime")


def _compare(
    args: Any, source: Source, tokenizer: Any, processor: Any, made: SampleColumns, origin: np.ndarray[Any, Any]
) -> None:
    """Compares samples of some rows, which have the numbers `origin` (n,), with slime's; a `DataError` if they
    differ."""
    changed = change(release_of("slime", "slime"), KNOWN, Dataset.__init__)
    if changed is None:
        table = next(source.batches()).slice(0, _COMPARED)
        numbers = np.arange(len(table))
    else:
        numbers, table = covering_rows(source.batches)

    # As text, in which 1 is not 1.0, the order of keys counts, and NaN is NaN.
    def ours(table: pa.Table) -> str:
        return repr(made.take(np.flatnonzero(np.isin(origin, numbers))))

    def theirs(table: pa.Table) -> str:
        with tempfile.TemporaryDirectory() as folder:
            found = Dataset(
                str(_written(table, Path(folder), source.name)),
                tokenizer=tokenizer,
                processor=processor,
                max_length=args.rollout_max_prompt_len,
                prompt_key=args.input_key,
                multimodal_keys=None,
                label_key=args.label_key,
                metadata_key=args.metadata_key,
                tool_key=args.tool_key,
                apply_chat_template=args.apply_chat_template,
                apply_chat_template_kwargs=args.apply_chat_template_kwargs,
                seed=args.rollout_seed,
            )
        expected = list(found.samples)
        for sample in expected if made.tokens is not None else []:
            sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
        return repr(expected)

    differs = f"samples of {len(numbers)} rows differ from slime's"
    why = compare(
        [table], ours, theirs, changed, logger=logger, trainer="slime", rows=len(numbers), differs=differs
    )  # fmt: skip
    if why is not None:
        raise DataError(f"{source.name}: {why}")


def _written(table: pa.Table, folder: Path, like: str) -> Path:
    """A small file of the kind of a path, with some rows."""
    if not like.endswith(".jsonl"):
        path = folder / "rows.parquet"
        pq.write_table(table, path)
        return path
    path = folder / "rows.jsonl"
    columns = {name: to_python(table[name].combine_chunks()) for name in table.column_names}
    # Nulls are left out: they may stand for missing keys, and mean the same where both are allowed.
    rows = [
        {name: value for name, value in zip(columns, row, strict=True) if value is not None}
        for row in zip(*columns.values(), strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
