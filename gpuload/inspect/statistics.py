"""The numbers of a dataset: lengths, tokens per role, how packs would be filled."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuload.core.arrays import Ragged, count_in_rows
from gpuload.core.marks import CHOSEN, LOSS, REJECTED
from gpuload.dataset.report import Report
from gpuload.dataset.rows import Rows
from gpuload.inspect.data import KindName, one_row
from gpuload.inspect.roles import UNKNOWN, Codes, RoleFinder
from gpuload.inspect.served import messages_until, texts_of
from gpuload.inspect.tokens import SampleRow, TokenReader, pair_of
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.pairs.dataset import PairDataset
from gpuload.packing import pack
from gpuload.pipeline.run import Job
from gpuload.sources.read import with_prompts

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)

_LIMITS_NEAR = (50, 75, 95, 99, 100)  # percentiles
_PACK_SIZES = (2048, 4096, 8192, 16384)
_GROUPS = 20
_EXTREMES, _RANDOM = 3, 14  # rows to show: so many of the longest and of the shortest ones, and at random
_REASONS = 6  # to drop rows, of which a row is shown
_MOST_OVER = 20  # rows over a limit that are listed
_MOST_TOKENS = 600  # of one row to show

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LengthGroup:
    """All rows, or those of one source."""

    name: str  # of the source; "all" for all rows
    lengths: Lengths  # in tokens, ascending; of a pair, those of the longer sequence
    loss: int | None  # how many tokens have loss; None for prompts and pairs

    def percentiles(self, wanted: Sequence[int] = PERCENTILES) -> list[int]:
        return [int(value) for value in np.percentile(self.lengths, wanted, method="nearest")]

    def within(self, limit: int) -> float:
        """The share of rows of at most `limit` tokens, 0 to 1."""
        return self.count(limit) / len(self.lengths)

    def count(self, limit: int) -> int:
        """Rows of at most `limit` tokens."""
        return int(np.searchsorted(self.lengths, limit, side="right"))

    def padding(self, limit: int) -> float:
        """The share of padding if the rows within a limit are padded to it, 0 to 1."""
        rows = self.count(limit)
        return 1 - int(self.lengths[:rows].sum()) / (rows * limit) if rows else 0.0


@dataclass(frozen=True)
class RoleTokens:
    """The tokens of all messages of one role, and how many of them have loss; of pairs, those of one part."""

    role: str
    tokens: int
    loss: int


@dataclass(frozen=True)
class Fill:
    """How rows fill packs."""

    size: int  # tokens of a pack
    packs: int  # number of packs
    share: float  # of their tokens that are used, 0 to 1
    longer: int  # number of rows that are longer than a pack, and are truncated


@dataclass(frozen=True, eq=False)
class Statistics:
    """What `gpuload inspect` shows."""

    kind: KindName  # what the files hold
    report: Report  # of the load
    columns: Sequence[tuple[str, str]]  # name and type of every column that is passed through
    groups: Sequence[LengthGroup]  # all rows, then those of each source, the largest first
    by: str  # what a source is: a value of `data_source`, or a file
    roles: Sequence[RoleTokens]  # or parts of a pair, most tokens first; empty for prompts, and if no role is known
    rows_without_roles: int  # number of rows whose roles are unknown
    fill: Sequence[Fill]  # for several sizes of packs; only for chats
    equal_pairs: int | None  # number of pairs whose chosen equals rejected; None if there are no pairs
    samples: Sequence[SampleRow]  # rows to show
    over: Sequence[tuple[int, str, int]] = ()  # the longest rows over a limit that was asked for: tokens, file, number

    @property
    def limit_name(self) -> str:
        return self.report.limit_name

    def limits(self) -> list[int]:
        """Limits of tokens that are worth a look: near some percentiles, up to the longest row."""
        return sorted({self.limit_near(percentile) for percentile in _LIMITS_NEAR})

    def limit_near(self, percentile: int) -> int:
        """A round number of tokens, a multiple of 8 or more, from that of a percentile of all rows on."""
        length = int(np.percentile(self.groups[0].lengths, percentile, method="higher"))
        step = max(8, 1 << max(0, length.bit_length() - 4))
        return max(1, -(-length // step)) * step


def statistics_of(job: Job[Any], dataset: Rows, with_samples: bool, limit: int | None = None) -> Statistics:
    """Counts, in a second pass over the files for the roles of tokens.

    `dataset` is what `run` made of the job. `with_samples` also chooses rows to show; prompts need no second pass
    without them. `limit` lists the longest rows over it.
    """
    chosen = sample_rows(dataset.lengths) if with_samples else {}
    loss: Lengths | None = None
    roles: list[RoleTokens] = []
    unknown, equal, samples = 0, None, []
    if isinstance(dataset, PairDataset):
        roles, equal = pair_tokens(dataset.parts), int(dataset.sizes.equal.sum())
        reader = TokenReader(job.reference)
        samples = [
            SampleRow(about, *dataset.origin(row), pair_of(reader, dataset.parts[row].tolist(), _MOST_TOKENS))
            for row, about in chosen.items()
        ]
    else:
        mask = dataset.loss_mask if isinstance(dataset, ChatDataset) else None
        counted = _Roles(RoleFinder(job.reference), set(chosen))
        if mask is not None or chosen:
            _second_pass(job, dataset, mask, counted)
            samples = _samples(TokenReader(job.reference), dataset, mask, chosen, counted)
        if mask is not None:
            loss = count_in_rows(mask.values, mask.offsets)
            roles, unknown = counted.tokens(), counted.rows_unknown
    if with_samples:
        samples += _dropped(job, dataset.report)
    by, names = _sources(dataset)
    return Statistics(
        job.kind.name,
        dataset.report,
        [(field.name, str(field.type)) for field in dataset.column_types],
        _groups(dataset.lengths, loss, names, alone=by == "data_source"),
        by,
        roles,
        unknown,
        [_fill(dataset.lengths, size) for size in _PACK_SIZES] if job.kind.name == "chats" else (),
        equal,
        samples,
        [] if limit is None else _over(dataset, limit),
    )


def _over(dataset: Rows, limit: int) -> list[tuple[int, str, int]]:
    lengths = dataset.lengths
    order = np.argsort(-lengths, kind="stable")[: min(_MOST_OVER, int((lengths > limit).sum()))]
    return [(int(lengths[row]), *dataset.origin(row)) for row in order.tolist()]


def pair_tokens(parts: Ragged) -> list[RoleTokens]:
    """The tokens of the prompts of n pairs with bits (`gpuload.core.marks`), each counted once, and those of both
    completions."""
    completion = (parts.values & LOSS) != 0
    counts = Counter(prompt=int((~completion).sum()))
    for name, other in (("chosen", REJECTED), ("rejected", CHOSEN)):
        counts[name] = int((completion & ((parts.values & other) == 0)).sum())
    return [RoleTokens(name, count, 0 if name == "prompt" else count) for name, count in counts.most_common() if count]


def sample_rows(lengths: Lengths) -> dict[int, str]:
    """Rows to show, and why: the longest, the shortest, and others at random, always the same."""
    order = np.argsort(lengths, kind="stable")
    longest, shortest = order[::-1][:_EXTREMES].tolist(), order[:_EXTREMES].tolist()
    rest = order[_EXTREMES:-_EXTREMES]
    random = np.sort(np.random.default_rng(0).choice(rest, min(_RANDOM, len(rest)), replace=False)).tolist()
    chosen = dict.fromkeys(longest, "longest")
    for about, rows in (("shortest", shortest), ("random", random)):
        chosen |= {row: about for row in rows if row not in chosen}
    return chosen


class _Roles:
    """Counts the tokens of each role, and keeps the roles of some rows."""

    def __init__(self, finder: RoleFinder, wanted: set[int]):
        self.finder, self._wanted = finder, wanted
        self._tokens: Counter[str] = Counter()
        self._loss: Counter[str] = Counter()
        self.rows_unknown = 0
        self.kept: dict[int, Codes] = {}

    def add(self, rows: Lengths, ids: Ragged, codes: Codes, loss: npt.NDArray[np.bool_] | None) -> None:
        """Adds some rows, by their numbers in the dataset."""
        known = codes != UNKNOWN
        names = self.finder.names
        for counts, some in ((self._tokens, known), (self._loss, known if loss is None else known & loss)):
            numbers = np.bincount(codes[some], minlength=len(names)).tolist()
            counts.update(dict(zip(names, numbers, strict=True)))
        self.rows_unknown += len(np.unique(np.repeat(rows, ids.lengths)[~known]))
        for at in np.flatnonzero(np.isin(rows, list(self._wanted))):
            self.kept[int(rows[at])] = codes[ids.offsets[at] : ids.offsets[at + 1]]

    def tokens(self) -> list[RoleTokens]:
        return [RoleTokens(name, count, self._loss[name]) for name, count in self._tokens.most_common() if count]


def _second_pass(job: Job[Any], dataset: Rows, loss: Ragged | None, counted: _Roles) -> None:
    """Renders the rows of the dataset again, for the roles of their tokens."""
    ids = dataset.tokens
    origin = dataset.origins
    turns = np.asarray(dataset.take(["turn"])["turn"]) if getattr(job.kind, "as_served", False) else None
    for number, source in enumerate(job.sources):
        rows = np.flatnonzero(origin[:, 0] == number)
        rows = rows[np.argsort(origin[rows, 1], kind="stable")]
        places, first = origin[rows, 1], 0
        if not len(rows):
            continue
        for table, column in with_prompts(source, job.options.prompt_key):
            low, high = np.searchsorted(places, [first, first + table.num_rows])
            some = rows[low:high]
            if len(some):
                taken = ids.take(some)
                at = places[low:high] - first
                if turns is None:
                    codes = counted.finder.codes(column.take(at), taken)
                else:
                    until = messages_until(column, at, turns[some])
                    codes = counted.finder.codes(until, taken, texts_of(job.reference, taken))
                counted.add(some, taken, codes, None if loss is None else loss.take(some).values)
            first += table.num_rows
            if high == len(rows):
                break


def _samples(
    reader: TokenReader, dataset: Rows, loss: Ragged | None, chosen: dict[int, str], counted: _Roles
) -> list[SampleRow]:
    ids, name, names = dataset.tokens, "prompt" if loss is None else "conversation", counted.finder.names
    samples = []
    for row, about in chosen.items():
        marked = (ids[row] if loss is None else ids[row] | loss[row] * LOSS).tolist()
        sequence = reader.sequence(name, marked, counted.kept[row], names, loss is not None, _MOST_TOKENS)
        samples.append(SampleRow(about, *dataset.origin(row), [sequence]))
    return samples


def _dropped(job: Job[Any], report: Report) -> list[SampleRow]:
    """A dropped row for each of the most frequent reasons, as its file has it."""
    sources = {source.name: source for source in job.sources}
    made = []
    for reason, _ in Counter(report.rejected).most_common(_REASONS):
        name, _, number = report.examples[reason][0].rpartition(" row ")
        row = one_row(sources[name].batches(), int(number)).to_pylist()[0]
        text = json.dumps(row, ensure_ascii=False, indent=2, default=repr)
        made.append(SampleRow("dropped", name, int(number), [], reason, text))
    return made


def _sources(dataset: Rows) -> tuple[str, npt.NDArray[Any]]:
    """What a source is, and the source of each row: `data_source`, or its file."""
    if "data_source" in dataset.column_types.names:
        return "data_source", np.array([str(name) for name in dataset.take(["data_source"])["data_source"]])
    return "file", np.array(dataset.report.files)[dataset.origins[:, 0]]


def _groups(lengths: Lengths, loss: Lengths | None, names: npt.NDArray[Any], alone: bool) -> list[LengthGroup]:
    """All rows, then those of each source, the largest first. The only source is listed if it may be `alone`."""
    groups = [LengthGroup("all", np.sort(lengths), None if loss is None else int(loss.sum()))]
    found, counts = np.unique(names, return_counts=True)
    if len(found) == 1 and not alone:
        return groups
    for name in found[np.argsort(-counts, kind="stable")][:_GROUPS]:
        some = names == name
        groups.append(LengthGroup(str(name), np.sort(lengths[some]), None if loss is None else int(loss[some].sum())))
    return groups


def _fill(lengths: Lengths, size: int) -> Fill:
    plan = pack(lengths, size, "bfd")
    return Fill(size, len(plan), plan.fill(size), int((lengths > size).sum()))
