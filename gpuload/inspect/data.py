"""Files to inspect: what they hold, and how it is loaded without dropping long rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa

from gpuload.core.errors import DataError, OptionError
from gpuload.core.options import NO_LIMIT, LossOn, Options
from gpuload.dataset.rows import PromptDataset
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.protocol import ArrowPrompts
from gpuload.kinds.chats.engine import ChatEngine
from gpuload.kinds.chats.formats import Format, find_format, one_format
from gpuload.kinds.chats.load import load_opened, open_chats, without_answer
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.pairs.engine import PairEngine
from gpuload.kinds.pairs.load import PairMaker, load_opened_pairs, open_pairs, useless_rows
from gpuload.kinds.pairs.reference import PairReference
from gpuload.pipeline.run import load_sources, reference_of
from gpuload.reference.reference import Reference
from gpuload.sources.columns import invalid_rows, to_python
from gpuload.sources.open import open_all
from gpuload.sources.read import Source, check_prompts, with_prompts

Kind = Literal["prompts", "chats", "pairs"]

_PAIR = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}


@dataclass(frozen=True, eq=False)
class Opened:
    """Files and a tokenizer, opened.

    Attributes:
        kind: what the files hold.
        sources: the files that have rows, each with a column of prompts, or of what `chats.formats` makes of chats and
            `pairs.formats` of pairs.
        reference: the tokenizer.
        options: of the load; `prompt_key` names the column.
        format: of chats and pairs; None for prompts.
    """

    kind: Kind
    sources: list[Source]
    reference: Reference
    options: Options
    format: Format | str | None = None


def open_data(
    files: Any,
    tokenizer: Any,
    *,
    kind: Kind | None = None,
    prompt_key: str = "prompt",
    messages_key: str | None = None,
    format: str | None = None,
    loss_on: LossOn | None = None,
    trains: bool = False,
    **options: Any,
) -> Opened:
    """Opens files and a tokenizer.

    Args:
        files, tokenizer: as for `load`.
        kind: what the files hold; None: found by their columns.
        prompt_key: the column with prompts.
        messages_key, format, loss_on: of chats, as for `load_chats`.
        trains: raise an error for data on which nobody trains without a decision, as `load_chats` does.
        **options: of a load.

    Raises:
        GpuloadError: as `load` and `load_chats`; or the files hold different things.
    """
    given = {**options, "max_prompt_length": NO_LIMIT, "filter_overlong_prompts": False}
    parsed = Options.parse({**given, "prompt_key": prompt_key})
    opened = [source for source in open_all(files, parsed) if source.num_rows]
    kind = kind or _kind_of_all(opened, prompt_key, messages_key)
    if kind == "prompts":
        for source in opened:
            check_prompts(source, prompt_key)
        return Opened(kind, opened, reference_of(tokenizer, parsed), parsed)
    if parsed.chat_template is None:
        raise OptionError("--no-template is for prompts: conversations are rendered by a chat template. Remove it")
    if parsed.return_raw_chat:
        raise OptionError("--return-raw-chat is for prompts: rows to train on have no messages. Remove it")
    given = {"device": "auto" if trains else "cpu"} | given | {"filter_overlong_prompts": True}
    if kind == "pairs":
        parsed = Options.parse({**given, "prompt_key": _PAIR["prompt"], "store": "memory"})
        return Opened(kind, *open_pairs(opened, tokenizer, parsed, "dpo", format, _PAIR))
    parsed = Options.parse({**given, "prompt_key": messages_key or "messages"})
    if format is None and not trains:  # a load asks for it if the answers of some rows are bad ones
        found = {each.name: find_format(each.schema, each.name, key=messages_key).name for each in opened}
        format = one_format(found)
    return Opened(kind, *open_chats(opened, tokenizer, parsed, format, messages_key, loss_on))


def load_data(opened: Opened) -> PromptDataset:
    """Loads all rows, however long they are."""
    if isinstance(opened.reference, ChatReference):
        return load_opened(opened.sources, opened.reference, opened.options, str(opened.format))
    if isinstance(opened.reference, PairReference):
        assert isinstance(opened.format, Format)
        return load_opened_pairs(
            opened.sources, opened.reference, opened.options, opened.format, PairMaker("dpo", 1, True)
        )
    return load_sources(opened.sources, opened.reference, opened.options)


def kind_of(source: Source, prompt_key: str, messages_key: str | None = None) -> Kind:
    """What a file holds, by its columns: pairs if it has chosen and rejected completions; else prompts if it has their
    column and no completions; else chats if it has a format of theirs; else prompts, whose column is missing."""
    if {_PAIR["chosen"], _PAIR["rejected"]} <= set(source.schema.names):
        return "pairs"
    if messages_key is not None:
        return "chats"
    if prompt_key in source.schema.names and "completion" not in source.schema.names:
        return "prompts"
    try:
        find_format(source.schema, source.name)
    except DataError:
        return "prompts"
    return "chats"


def _kind_of_all(sources: Sequence[Source], prompt_key: str, messages_key: str | None) -> Kind:
    found = {kind_of(source, prompt_key, messages_key): source.name for source in sources}
    if len(found) > 1:
        (kind, name), (other_kind, other) = list(found.items())[:2]
        raise DataError(
            f"files hold different things ({kind} in {name}, {other_kind} in {other}): inspect them separately, or "
            "pass --as"
        )
    return next(iter(found))


# -- single rows -----------------------------------------------------------------------------------------------------


def find_row(sources: Sequence[Source], row: int) -> tuple[Source, int]:
    """The source with a row, and its number there.

    Args:
        row: its number over all sources; a negative number counts from the end.

    Raises:
        OptionError: there is no such row.
    """
    total = sum(source.num_rows for source in sources)
    if not -total <= row < total:
        raise OptionError(f"--row {row}: there are {total:,} rows, so pass a number from {-total} to {total - 1}")
    at = row % total
    for source in sources:
        if at < source.num_rows:
            return source, at
        at -= source.num_rows
    raise AssertionError("unreachable: the row is in one of the sources")


def one_row(tables: Iterator[pa.Table], row: int) -> pa.Table:
    """One row of a source as a table."""
    for table in tables:
        if row < table.num_rows:
            return table.slice(row, 1)
        row -= table.num_rows
    raise AssertionError("unreachable: a source has as many rows as it says")


def encode_row(opened: Opened, source: Source, row: int) -> tuple[pa.Array, list[int], str | None]:
    """Renders and encodes one row, and compares it with the tokenizer, whose ids count where they differ.

    Args:
        source: one of `opened.sources`.
        row: the row's number in it.

    Returns:
        The row as a column of length 1; its ids with the bits of chats (`gpuload.core.marks`) or pairs (`pairs.parts`),
        none if nothing can be made of it; and why a load drops it, None if it does not.
    """
    one = replace(source, batches=lambda: iter([one_row(source.batches(), row)]))
    ((table, column),) = with_prompts(one, opened.options.prompt_key)
    reference = opened.reference
    engine = _engine(reference)
    with reference.call.clock_stopped():
        tokens = engine.encode(engine.render(ArrowPrompts(column)))
        if 0 in tokens.rejected:
            return column, [], tokens.rejected[0]
        ids = tokens.ids.to_lists()[0]
        expected, found = reference.compared(to_python(column)[0], ids)
    invalid = invalid_rows(table.drop_columns([opened.options.prompt_key]))
    useless = {}
    if isinstance(reference, ChatReference):
        useless = without_answer(opened.options, tokens.ids)
    elif isinstance(reference, PairReference):
        useless = useless_rows(PairMaker("dpo", 1, True), NO_LIMIT, "drop", tokens.ids)
    return column, ids if expected == found else expected, {**useless, **invalid}.get(0)


def _engine(reference: Reference) -> HostEngine:
    if isinstance(reference, PairReference):
        return PairEngine(reference)
    return ChatEngine(reference) if isinstance(reference, ChatReference) else HostEngine(reference)
