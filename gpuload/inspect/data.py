"""Files to inspect: what they hold, and how it is loaded without dropping long rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa

from gpuload.chats.engine import ChatEngine
from gpuload.chats.formats import Format, find_format
from gpuload.chats.load import load_opened, open_chats, without_answer
from gpuload.chats.reference import ChatReference
from gpuload.dataset import PromptDataset
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.protocol import ArrowPrompts
from gpuload.errors import DataError, OptionError
from gpuload.load import load_sources, reference_of
from gpuload.options import NO_LIMIT, Options
from gpuload.pairs.engine import PairEngine
from gpuload.pairs.load import PairMaker, load_opened_pairs, open_pairs, useless_rows
from gpuload.pairs.reference import PairReference
from gpuload.reference.reference import Reference
from gpuload.sources.columns import to_python
from gpuload.sources.open import open_all
from gpuload.sources.read import Source, check_prompts, invalid_rows, with_prompts

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
    max_samples: int = -1,
    no_template: bool = False,
) -> Opened:
    """Opens files and a tokenizer.

    Args:
        files, tokenizer: as for `load`.
        kind: what the files hold; None: found by their columns.
        prompt_key: the column with prompts.
        max_samples: take at most this many rows; -1 for all.
        no_template: prompts are plain strings.

    Raises:
        GpuloadError: as `load` and `load_chats`; or the files hold different things.
    """
    options = Options(
        prompt_key=prompt_key,
        max_samples=max_samples,
        max_prompt_length=NO_LIMIT,
        filter_overlong_prompts=False,
        chat_template=None if no_template else "default",
    )
    opened = [source for source in open_all(files, options) if source.num_rows]
    kind = kind or _kind_of_all(opened, prompt_key)
    if kind == "prompts":
        for source in opened:
            check_prompts(source, prompt_key)
        return Opened(kind, opened, reference_of(tokenizer, options), options)
    if no_template:
        raise OptionError("--no-template is for prompts: conversations are rendered by a chat template. Remove it")
    options = Options(
        prompt_key="messages" if kind == "chats" else _PAIR["prompt"],
        max_samples=max_samples,
        max_prompt_length=NO_LIMIT,
        device="cpu",
    )
    if kind == "chats":
        return Opened(kind, *open_chats(opened, tokenizer, options))
    return Opened(kind, *open_pairs(opened, tokenizer, options, "dpo", None, _PAIR))


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


def kind_of(source: Source, prompt_key: str) -> Kind:
    """What a file holds, by its columns: pairs if it has chosen and rejected completions; else prompts if it has their
    column and no completions; else chats if it has a format of theirs; else prompts, whose column is missing."""
    if {_PAIR["chosen"], _PAIR["rejected"]} <= set(source.schema.names):
        return "pairs"
    if prompt_key in source.schema.names and "completion" not in source.schema.names:
        return "prompts"
    try:
        find_format(source.schema, source.name)
    except DataError:
        return "prompts"
    return "chats"


def _kind_of_all(sources: Sequence[Source], prompt_key: str) -> Kind:
    found = {kind_of(source, prompt_key): source.name for source in sources}
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
        The row as a column of length 1; its ids with the bits of chats (`gpuload.loss`) or pairs (`pairs.parts`), none
        if nothing can be made of it; and why a load drops it, None if it does not.
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
