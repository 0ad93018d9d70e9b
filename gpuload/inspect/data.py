"""Files to inspect: what they hold, and how it is loaded without dropping long rows."""

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import pyarrow as pa

from gpuload.core.errors import DataError, OptionError
from gpuload.core.options import NO_LIMIT, LossOn, Normalize, Options, TurnsMode
from gpuload.engines.protocol import ArrowPrompts
from gpuload.kinds.chats.formats import find_format
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.formats import label_in, one_format
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.prompts import PromptKind
from gpuload.kinds.served.options import OF_SERVED, check_limits
from gpuload.pipeline.run import Job, open_job
from gpuload.sources.columns import invalid_rows, to_python
from gpuload.sources.footer import single_group
from gpuload.sources.open import open_all
from gpuload.sources.read import Source, with_prompts

KindName = Literal["prompts", "chats", "pairs"]


def open_data(
    files: Any,
    tokenizer: Any,
    *,
    kind: KindName | None = None,
    prompt_key: str = "prompt",
    messages_key: str | None = None,
    format: str | None = None,
    loss_on: LossOn | None = None,
    drop_nulls: bool = False,
    normalize_messages: Normalize | None = None,
    turns: TurnsMode = "conversation",
    trains: bool = False,
    **options: Any,
) -> Job[Any]:
    """Opens files and a tokenizer for a load without a limit, with the options of `load`, `load_chats` and
    `load_pairs`.

    `kind` is what the files hold; None: found by their columns. `trains` raises an error for data on which nobody
    trains without a decision, as `load_chats` does.

    Raises:
        GpuloadError: as `load` and `load_chats`; or the files hold different things.
    """
    started = time.perf_counter()
    served = {"turns": turns} | {name: options.pop(name) for name in OF_SERVED if name in options}
    given = {**options, "max_prompt_length": NO_LIMIT, "filter_overlong_prompts": False}
    parsed = Options.parse({**given, "prompt_key": prompt_key})
    opened = [source for source in open_all(files, parsed) if source.num_rows]
    kind = kind or _kind_of_all(opened, prompt_key, messages_key)
    asked = next((name for name, value in served.items() if value != "conversation"), None)
    if kind != "chats" and asked is not None:
        raise OptionError(
            f"{asked}={served[asked]!r} is for conversations, and these files hold {kind}: --as chats reads them so"
        )
    if kind == "prompts":
        return open_job(PromptKind(), opened, tokenizer, parsed, started)
    if parsed.chat_template is None:
        raise OptionError("--no-template is for prompts: conversations are rendered by a chat template. Remove it")
    if parsed.return_raw_chat:
        raise OptionError("--return-raw-chat is for prompts: rows to train on have no messages. Remove it")
    given = {"device": "auto" if trains else "cpu"} | given | {"filter_overlong_prompts": True}
    if kind == "pairs":
        _check_no_completions(opened)
        pairs = PairKind("dpo", format, drop_nulls=drop_nulls, normalize_messages=normalize_messages)
        parsed = Options.parse({**given, "prompt_key": pairs.prompt_key, "store": "memory"})
        return open_job(pairs, opened, tokenizer, parsed, started)
    if format is None and not trains:  # a load asks for it if the answers of some rows are bad ones
        found = {each.name: find_format(each.schema, each.name, key=messages_key).name for each in opened}
        format = one_format(found)
    parsed = Options.parse({**given, "prompt_key": messages_key or "messages"})
    if turns == "served":
        check_limits(parsed)
    chats = ChatKind(
        format, messages_key, loss_on, drop_nulls=drop_nulls, normalize_messages=normalize_messages, **served
    )
    return open_job(chats, opened, tokenizer, parsed, started)


def _check_no_completions(sources: Sequence[Source]) -> None:
    """Raises an error for single completions with labels: pairs for DPO are read here."""
    for source in sources:
        names, label = set(source.schema.names), label_in(source.schema)
        if label is not None and not names & {PairKind.chosen_key, PairKind.rejected_key}:
            raise DataError(
                f"{source.name}: single answers with labels in the column {label!r}, which are data for KTO. Commands "
                'do not read it; in Python, gpuload.load_pairs(..., objective="kto") does'
            )


def kind_of(source: Source, prompt_key: str, messages_key: str | None = None) -> KindName:
    """What a file holds, by its columns: pairs if it has chosen and rejected completions; else prompts if it has their
    column and no completions; else chats if it has a format of theirs, or their column; else prompts, whose column is
    missing."""
    if {PairKind.chosen_key, PairKind.rejected_key} <= set(source.schema.names):
        return "pairs"
    if messages_key is not None:
        return "chats"
    if prompt_key in source.schema.names and "completion" not in source.schema.names:
        return "prompts"
    try:
        find_format(source.schema, source.name)
    except DataError:
        return "chats" if {"messages", "conversations"} & set(source.schema.names) else "prompts"
    return "chats"


def _kind_of_all(sources: Sequence[Source], prompt_key: str, messages_key: str | None) -> KindName:
    found = {kind_of(source, prompt_key, messages_key): source.name for source in sources}
    if len(found) > 1:
        (kind, name), (other_kind, other) = list(found.items())[:2]
        raise DataError(
            f"files hold different things ({kind} in {name}, {other_kind} in {other}): inspect them separately, or "
            "pass --as"
        )
    return next(iter(found))


def single_groups(sources: Sequence[Source]) -> list[str]:
    """What there is to say about large parquet files of one row group, see `single_group`."""
    paths = [(getattr(source.file, "path", ""), source.name) for source in sources]
    remarks = [single_group(path, name) for path, name in paths if path.lower().endswith(".parquet")]
    return [remark for remark in remarks if remark]


# -- single rows -----------------------------------------------------------------------------------------------------


def find_row(sources: Sequence[Source], row: int) -> tuple[Source, int]:
    """The source with a row, and its number there. `row` counts over all sources; a negative one from the end.

    Raises:
        OptionError: there is no such row.
    """
    *starts, total = accumulate((source.num_rows for source in sources), initial=0)
    if not -total <= row < total:
        raise OptionError(f"--row {row}: there are {total:,} rows, so pass a number from {-total} to {total - 1}")
    number = bisect_right(starts, row % total) - 1
    return sources[number], row % total - starts[number]


def one_row(tables: Iterator[pa.Table], row: int) -> pa.Table:
    """One row of a source as a table."""
    for table in tables:
        if row < table.num_rows:
            return table.slice(row, 1)
        row -= table.num_rows
    raise AssertionError("unreachable: a source has as many rows as it says")


def encode_row(job: Job[Any], source: Source, row: int) -> tuple[pa.Array, list[int], str | None]:
    """Renders and encodes one row, of one of `job.sources`, and compares it with the tokenizer, whose ids count where
    they differ.

    Returns:
        The row as a column of length 1; its ids with their bits (`gpuload.core.marks`), none if nothing can be made of
        it; and why a load drops it, None if it does not.
    """
    one = replace(source, batches=lambda: iter([one_row(source.batches(), row)]))
    ((table, column),) = with_prompts(one, job.options.prompt_key)
    reference = job.reference
    engine = job.kind.engine(replace(job.options, device="cpu"), reference, False)
    with reference.call.clock_stopped():
        tokens = engine.encode(engine.render(ArrowPrompts(column)))
        if 0 in tokens.rejected:
            return column, [], tokens.rejected[0]
        ids = tokens.ids.to_lists()[0]
        expected, found = reference.compared(to_python(column)[0], ids)
    invalid = invalid_rows(table.drop_columns([job.options.prompt_key]))
    useless = job.kind.useless(job.kind.sizes(tokens.ids), tokens.ids, job.options)
    return column, ids if expected == found else expected, {**useless, **invalid}.get(0)
