"""`gpuload.check`: one pass over the data, and what was found in it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from gpuload.core.errors import OptionError
from gpuload.core.marks import CHOSEN, REJECTED, loss_tokens, sequence
from gpuload.core.options import POSITIVE, LossOn, Normalize, Options, Overlong, Truncation, TurnsMode, check_choice
from gpuload.engines.protocol import ArrowPrompts
from gpuload.inspect.checks.findings import RULES, Finding, finding, in_order
from gpuload.inspect.checks.messages import flat_messages
from gpuload.inspect.checks.prompts import PromptTable, duplicates, elsewhere, empty_prompts
from gpuload.inspect.checks.rows import CheckedRows, Collected, Hit, over_the_limit
from gpuload.inspect.checks.served import served_part
from gpuload.inspect.checks.texts import TextChecks, has_media
from gpuload.inspect.checks.tokens import TokenChecks
from gpuload.inspect.data import KindName, open_data, single_groups
from gpuload.kinds.chats.load import LABELED, ChatKind, label_of
from gpuload.kinds.formats import replaced_columns
from gpuload.kinds.pairs.sizes import PairSizes
from gpuload.kinds.served.options import OF_SERVED, ServedOptions, check_limits
from gpuload.kinds.training_reference import TOOLS
from gpuload.pipeline.filter import without
from gpuload.pipeline.parts import SomeRows, SourceRows
from gpuload.pipeline.run import Job
from gpuload.pipeline.verify import Verifier
from gpuload.sources.columns import invalid_rows
from gpuload.sources.read import Source, check_unchanged, with_prompts

CheckedTrainer = Literal["verl", "trl", "slime", "nemo-rl"]

SIDES: dict[str, Truncation] = {"keep_start": "right", "keep_end": "left"}


@dataclass(frozen=True, eq=False)
class Checked:
    """What a check has found."""

    findings: list[Finding]  # errors first
    files: list[str]  # their names
    rows: int  # how many there are
    kind: KindName
    loss_on: str | None  # what is learned, in chats
    lengths: np.ndarray[Any, np.dtype[np.int64]]  # (m,) tokens of rows that a load without a limit keeps, ascending
    tokenizer: str  # its name
    prompt_key: str  # the column with prompts, or with messages
    format: str | None = None  # of chats and pairs
    options: Mapping[str, Any] = field(default_factory=dict)  # as loads take them: given ones that are not defaults
    overlong: Overlong = "drop"  # what becomes of rows that are too long
    tools: bool = False  # the rows have a column of tools
    other_messages: bool = False  # a column `messages` is there, too, and is not the one that was checked
    weighted: bool = False  # answers have weights other than 0 and 1

    @property
    def images(self) -> bool:
        """Whether there are images, whose tokens are not in `lengths`."""
        return any(each.check == "images not counted" for each in self.findings)

    @property
    def passed(self) -> list[str]:
        """The names of the checks that found nothing."""
        found = {each.check for each in self.findings}
        return [name for name in RULES if name not in found]


def check(
    files: Any,
    tokenizer: Any,
    *,
    against: Any = None,
    trainer: CheckedTrainer | None = None,
    limit: int | None = None,
    overlong: Overlong = "drop",
    kind: KindName | None = None,
    prompt_key: str = "prompt",
    messages_key: str | None = None,
    format: str | None = None,
    loss_on: LossOn | None = None,
    drop_nulls: bool = False,
    normalize_messages: Normalize | None = None,
    turns: TurnsMode = "conversation",
    **options: Any,
) -> list[Finding]:
    """Look for what would spoil a training run: in the data, and in what tokenizer and template make of it.

    Examples:
        >>> import gpuload, pyarrow as pa
        >>> from gpuload.demo_data import demo_files
        >>> _, tokenizer = demo_files()
        >>> one, other = ({"role": "user", "content": text} for text in ("Who?", "Why?"))
        >>> chats = pa.table({"messages": [[one], [other, {"role": "assistant", "content": "So."}]]})
        >>> for found in gpuload.check(chats, tokenizer):
        ...     print(found.level, found.check, found.rows)
        error no loss [0]

    Args:
        files: As for `load`.
        tokenizer: As for `load`.
        against: Files, as for `load`, that must not have the same prompts: the training data of a test set.
        trainer: For which trainer: `"verl"`, `"trl"`, `"slime"` or `"nemo-rl"`; TRL inserts placeholders of images.
        limit: The most tokens of a row; None for no limit.
        overlong: What becomes of longer rows: `"drop"`, `"keep_start"` or `"keep_end"`.
        kind: What the files hold: `"prompts"`, `"chats"` or `"pairs"`; None finds it by their columns.
        prompt_key: The column with prompts.
        messages_key: As for `load_chats`.
        format: As for `load_chats` and `load_pairs`.
        loss_on: As for `load_chats`.
        drop_nulls: As for `load_chats`.
        normalize_messages: As for `load_chats`.
        turns: As for `load_chats`: with `"served"`, rows are checked as served.
        **options: Further options of a load, such as `chat_template` and `apply_chat_template_kwargs`; with
            `turns="served"` also those for rows as served.

    Returns:
        What was found, errors first. Nothing is found in good data.

    Raises:
        GpuloadError: As for `load` and `load_chats`, if the files cannot be read at all, or an option is invalid.
    """
    options |= {"kind": kind, "prompt_key": prompt_key, "messages_key": messages_key, "format": format}
    options |= {"loss_on": loss_on, "drop_nulls": drop_nulls, "normalize_messages": normalize_messages, "turns": turns}
    options |= {"against": against, "trainer": trainer, "limit": limit, "overlong": overlong}
    return checked(files, tokenizer, **options).findings


def checked(
    files: Any,
    tokenizer: Any,
    *,
    against: Any = None,
    trainer: CheckedTrainer | None = None,
    limit: int | None = None,
    overlong: Overlong = "drop",
    **options: Any,
) -> Checked:
    """As `check`, with what else a page shows."""
    check_choice("trainer", trainer, (None, *get_args(CheckedTrainer)))
    check_choice("overlong", overlong, (None, *get_args(Overlong)))
    check_choice("kind", options.get("kind"), (None, *get_args(KindName)))
    if limit is not None and not POSITIVE.holds(limit):
        raise OptionError(f"limit={limit!r}: expected an integer > 0, or None")
    if limit is None and overlong != "drop":
        raise OptionError(f"overlong={overlong!r}: pass limit=..., too: without one, no row is too long")
    job = open_data(files, tokenizer, **options)
    if getattr(job.kind, "as_served", False):
        check_limits(replace(job.options, truncation=SIDES.get(overlong, "error")))
    others = None if against is None else _against(against, job, options)
    run = _Pass(job, trainer, limit, SIDES.get(overlong), grams=others is not None or len(job.sources) > 1)
    run.over_all_rows()
    if len(job.sources) > 1:
        run.add(elsewhere(run.table, None, run.place))
    if others is not None:
        run.add(elsewhere(run.table, *others))
    found = getattr(job.kind, "format", None)
    key = options.get("messages_key") or _COLUMNS.get(found or "", job.options.prompt_key)
    given = {name: options[name] for name in options if name in _own_options(job) and _is_given(name, options[name])}
    if labeled_format(job):  # a load asks for it
        given["format"] = found
    return Checked(
        in_order([*run.collected.findings(), *_of_groups(job.sources), *_of_images(job.sources)]),
        [source.name for source in job.sources],
        run.total,
        job.kind.name,
        getattr(job.kind, "loss_on", None),
        np.sort(np.concatenate([np.zeros(0, np.int64), *run.lengths])),
        job.reference.name,
        key,
        found,
        given,
        overlong,
        tools=any(TOOLS in replaced_columns(source) for source in job.sources),
        other_messages=key != "messages" and any("messages" in source.schema.names for source in job.sources),
        weighted=bool(getattr(job.kind, "weights", ())),
    )


_IMAGES = ("images", "image")  # columns of trainers' data

_COLUMNS = {"sharegpt": "conversations", "text": "text"}
"""Format of chats → the column with the messages or the text, if it has another name than `messages`."""


def _own_options(job: Job[Any]) -> set[str]:
    """The options of a load that concern what is loaded of this kind."""
    of_training = {"format", "drop_nulls", "normalize_messages"}
    of_chats = of_training | {"messages_key", "loss_on", *OF_SERVED}
    more = {"prompts": {"prompt_key"}, "pairs": of_training, "chats": of_chats}
    known = {each.name for each in fields(Options)} - {"prompt_key", "max_prompt_length", "filter_overlong_prompts"}
    return known | more[job.kind.name]


def _is_given(name: str, value: Any) -> bool:
    default = {each.name: each.default for kind in (Options, ServedOptions) for each in fields(kind)}.get(name, False)
    if name in OF_SERVED:
        return bool(value != default)
    return value != default if isinstance(value, bool | int | float) or name == "chat_template" else bool(value)


def labeled_format(job: Job[Any]) -> tuple[Source, str] | None:
    """The column that says which answers of chats are good ones, and its source; None if there is none."""
    kind = job.kind
    return label_of(job.sources) if isinstance(kind, ChatKind) and kind.format in LABELED else None


class _Pass:
    """One pass over the rows of a job."""

    def __init__(self, job: Job[Any], trainer: str | None, limit: int | None, side: Truncation | None, grams: bool):
        self.job, self._limit, self._side = job, limit, side
        self.total = sum(source.num_rows for source in job.sources)
        self.place = places_of(job.sources, short=True)
        kind, labeled = job.kind, labeled_format(job)
        everything = getattr(kind, "loss_on", None) == "all"
        self._texts = TextChecks(job.reference, labeled[1] if labeled else None, trainer == "trl")
        self._tokens = TokenChecks(job.reference, kind.name, everything_learned=everything)
        self.table = PromptTable(kind.name == "prompts", grams)
        finders = kind.finders(job.options.verify, job.reference, self.total)
        self._verifier = Verifier(job.options.verify, job.reference, self.total, finders)
        self.collected = Collected(self.place, self.total)
        self.lengths: list[Any] = []

    def add(self, hits: Iterator[Hit], first: int = 0) -> None:
        for hit in hits:
            self.collected.add(hit, first)

    def over_all_rows(self) -> None:
        job = self.job
        engine = job.kind.engine(replace(job.options, device="cpu"), job.reference, False)
        first = 0
        with engine.loading(), job.reference.clock_stopped():
            for number, source in enumerate(job.sources):
                for rows in self._read(source, first, engine):
                    self.add(self._hits(rows), rows.first)
                    self.table.add(rows.messages, number, has_media(rows.messages, rows.table))
                first += source.num_rows
        check_unchanged(job.sources)
        if wrong := self._verifier.check.mismatches:
            self.collected.note("tokens differ", len(wrong), wrong[0])
        for finder in self._verifier.finders:
            for note in finder.notes:
                self.collected.note(finder.check, finder.found, note)
        self.add(duplicates(self.table, self.place))

    def _read(self, source: Source, first: int, engine: Any) -> Iterator[CheckedRows]:
        job, key, begin = self.job, self.job.options.prompt_key, first
        for table, column in with_prompts(source, key):
            prompts = ArrowPrompts(column)
            text = engine.render(prompts)
            made = engine.encode(text)
            numbers = np.arange(first - begin, first - begin + len(column))
            place = partial(SomeRows((SourceRows(0, numbers, table),)).place, [source])
            self._verifier.compare(place, prompts, text, made.ids.take)
            for finder in self._verifier.finders:
                finder.look(source, numbers, prompts, text.sizes)
            sizes = job.kind.sizes(made.ids)
            rows = CheckedRows(
                first,
                table,
                column,
                texts=[text.text, *text.more],
                tokens=[made.ids],
                rejected={**made.rejected, **invalid_rows(without(table, key))},
                useless=job.kind.useless(sizes, made.ids, job.options),
                messages=flat_messages(column),
            )
            if getattr(job.kind, "as_served", False):
                served = served_part(job.reference, first, table, column, text.text, made.ids)
                rows = replace(rows, texts=[served.text], served=served)
            elif job.kind.name == "pairs":
                both = [sequence(made.ids, REJECTED), sequence(made.ids, CHOSEN)]
                rows = replace(rows, tokens=both, equal=PairSizes(*sizes).equal > 0)
            yield rows
            first += len(column)

    def _hits(self, rows: CheckedRows) -> Iterator[Hit]:
        if rows.served is not None:
            self.lengths.append(rows.served.rows.tokens[0].lengths)
            yield from self._texts.of(rows)
            yield from rows.served.hits(self._tokens, self._limit, self._side)
            yield empty_prompts(rows, False)
            return
        lengths = np.max([tokens.lengths for tokens in rows.tokens], axis=0)
        kept = lengths > 0
        kept[list(rows.useless)] = False
        self.lengths.append(lengths[kept])
        if self._limit is not None:
            yield over_the_limit(lengths, self._limit)
            if self._side is not None:
                cut = replace(rows, tokens=[each.truncate(self._limit, self._side) for each in rows.tokens])
                if self.job.kind.name != "prompts":
                    cut = replace(cut, cut=np.any([each.lengths > self._limit for each in rows.tokens], axis=0))
                    yield _without_loss(rows, cut, self._limit)
                rows = cut
        yield from self._texts.of(rows)
        yield from self._tokens.of(rows)
        yield empty_prompts(rows, self.job.kind.name == "prompts")
        if rows.equal is not None:
            yield Hit("equal pairs", rows.equal & (lengths > 0), lambda row: "")


def _without_loss(whole: CheckedRows, cut: CheckedRows, limit: int) -> Hit:
    """Rows of which no token with loss remains within the limit."""
    both = zip(cut.tokens, whole.tokens, strict=True)
    lost = np.any([(loss_tokens(one) == 0) & (loss_tokens(all_of) > 0) for one, all_of in both], axis=0)
    return Hit("no loss", lost, lambda row: f"no token with loss is within the limit of {limit:,}")


def _against(files: Any, job: Job[Any], options: dict[str, Any]) -> tuple[PromptTable, Callable[[int], str]]:
    """The prompts of other data, of whatever kind, and the places of its rows."""
    tokenizer = job.reference.tokenizer
    kept = ("prompt_key", "messages_key", "chat_template", "apply_chat_template_kwargs", "cache_dir", "remote_timeout")
    other = open_data(files, tokenizer, **{name: options[name] for name in kept if name in options})
    table = PromptTable(other.kind.name == "prompts", grams=True)
    for number, source in enumerate(other.sources):
        for rest, column in with_prompts(source, other.options.prompt_key):
            messages = flat_messages(column)
            table.add(messages, number, has_media(messages, rest))
    return table, places_of(other.sources)


def places_of(sources: Sequence[Source], short: bool = False) -> Callable[[int], str]:
    """The number of a row, over all sources → its file and its number there, as text. A `short` one has no name of a
    single file."""
    starts = np.cumsum([0, *(source.num_rows for source in sources)])

    def place(row: int) -> str:
        file = int(np.searchsorted(starts, row, side="right")) - 1
        name = "" if short and len(sources) == 1 else f"{sources[file].name} "
        return f"{name}row {row - int(starts[file])}"

    return place


def _images_in(source: Source) -> str | None:
    """The column of a source that has images."""
    names = (name for name in _IMAGES if name in source.schema.names)
    return next((name for name in names if not pa.types.is_null(source.schema.field(name).type)), None)


def _of_images(sources: Sequence[Source]) -> Iterator[Finding]:
    found = [f"{source.name}: column {name!r}" for source in sources if (name := _images_in(source))]
    if found:
        yield finding("images not counted", [], len(found), len(sources), found[0])


def _of_groups(sources: Sequence[Source]) -> Iterator[Finding]:
    if found := single_groups(sources):
        example, _, remedy = found[0].partition(": rewrite")
        made = finding("one row group", [], len(found), len(sources), example)
        yield replace(made, remedy=f"rewrite{remedy}" if remedy else made.remedy)
