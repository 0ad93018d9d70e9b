"""The rows as served of loaded conversations, as the rows of a dataset."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gpuload.core.arrays import Ragged, RowNumbers, marked_before, offsets_of
from gpuload.core.errors import NoRowsError
from gpuload.core.marks import IDS, LOSS, WEIGHT
from gpuload.core.options import Options
from gpuload.dataset.pieces import Sequences
from gpuload.dataset.rows import Loaded
from gpuload.engines.protocol import TokenStore
from gpuload.kinds.served.stored import COUNTS, Headers, headers_only
from gpuload.kinds.served.turns import REASONS
from gpuload.packing.plan import whole_rows

_NO_ANSWER = "there is no answer of an assistant, or none that loss_on selects"
_CHUNK = 1 << 12  # conversations that are read at a time


def served_rows(loaded: Loaded) -> Loaded:
    """What was loaded, with one row for each row as served, and what became of turns in its report.

    Longer rows are dropped, or end behind their last answer that is within the limit.
    """
    headers = Headers.of(Ragged.concatenate([headers_only(part) for part in _parts(loaded.tokens)]))
    lengths, turn = headers.rows[:, :2].T
    limit, report = loaded.options.max_prompt_length, loaded.report
    overlong = lengths > limit
    if not loaded.options.filter_overlong_prompts:
        end, message = within(headers, limit)
        lengths, turn = np.where(overlong, end, lengths), np.where(overlong, message, turn)
    fits = (lengths > 0) & (lengths <= limit)
    kept, row = np.flatnonzero(fits), headers.row_of_answer
    learned = int((fits[row] & (headers.answers[:, 2] <= lengths[row])).sum())
    last = np.zeros(len(headers.rows), bool)  # whether a row ends with the last answer of its conversation
    last[headers.row_offsets[1:][np.diff(headers.row_offsets) > 0] - 1] = True
    rows, begin, lengths = headers.conversation[kept], headers.begin[kept], lengths[kept]
    tokens = Sequences(loaded.tokens, whole_rows(rows, lengths, begin), IDS | LOSS | WEIGHT)
    if not len(kept):
        raise NoRowsError("all rows as served were dropped", report)
    loss = _loss(loaded.tokens, rows, begin, lengths)
    columns = loaded.columns.select(rows).with_columns(
        {"conversation": loaded.origins.numbers[rows], "turn": turn[kept]}
    )
    counts = {
        "conversations": len(headers.size),
        "rows as served": len(kept),
        "tokens of rows that only forks need": int(lengths[~last[kept]].sum()),
        "tokens learned behind prompts that one row per conversation lacks": int(loss[~last[kept]].sum()),
        "answers learned": learned,
        "answers not learned, in rows over the limit": len(headers.answers) - learned,
        "rows as served over the limit": int(overlong.sum()),
    }
    if hidden := sorted({"conversation", "turn"} & set(loaded.columns.names)):
        those = f"the column {hidden[0]} is that" if len(hidden) == 1 else "the columns conversation and turn are those"
        report.notes.append(f"{those} of rows as served, not of the files")
    report.counts |= {name: count for name, count in counts.items() if count}
    report.count(not_learned(headers))
    report.counts |= {name: int(count) for name, count in zip(COUNTS, headers.counts.sum(0), strict=True) if count}
    report.tokens, report.shortest, report.longest = int(lengths.sum()), int(lengths.min()), int(lengths.max())
    return replace(
        loaded,
        tokens=tokens,
        sizes=np.stack([lengths, loss]),
        columns=columns,
        origins=loaded.origins.select(rows),
    )


def not_learned(headers: Headers) -> dict[str, int]:
    """The turns of conversations that are not learned, by reason, in words."""
    of_reason = np.zeros(len(REASONS), np.int64)
    np.add.at(of_reason, headers.reasons[:, 0], headers.reasons[:, 1])
    return {f"turns not learned: {why}": int(count) for why, count in zip(REASONS, of_reason, strict=True) if count}


def within(headers: Headers, limit: int) -> RowNumbers:
    """(2, r): where the last answer ends that is learned in each row and within a limit, and which message it is; 0 if
    there is none."""
    row, fits, found = headers.row_of_answer, headers.answers[:, 2] <= limit, np.zeros((2, len(headers.rows)), np.int64)
    for one, of_answers in zip(found, headers.answers.T[2:4], strict=True):  # both ascend within a row
        np.maximum.at(one, row[fits], of_answers[fits])
    return found


def useless_conversations(stored: Ragged, options: Options) -> dict[int, str]:
    """The conversations of which nothing would be learned, or with `strict` less than they say: row → why."""
    headers, found = Headers.of(stored), {}
    limit, counts = options.max_prompt_length, np.diff(headers.row_offsets)
    if not options.filter_overlong_prompts:
        fits = offsets_of(within(headers, limit)[0] > 0)[headers.row_offsets]
        why = f"no answer ends within max_length={limit}"
        found = dict.fromkeys(np.flatnonzero((counts > 0) & (np.diff(fits) == 0)).tolist(), why)
    if options.strict:
        found |= dict.fromkeys(np.flatnonzero(headers.counts[:, 0]).tolist(), f"it has {COUNTS[0]}")
    for row in np.flatnonzero((counts == 0) & (stored.lengths > 0)).tolist():
        reasons = headers.reasons[headers.reason_offsets[row] : headers.reason_offsets[row + 1]]
        most = int(reasons[reasons[:, 1].argmax(), 0]) if len(reasons) else -1
        found[row] = f"no turn is learned: {REASONS[most] if len(reasons) else _NO_ANSWER}"
    return found


def _parts(store: TokenStore) -> Iterator[Ragged]:
    if isinstance(store, Ragged):
        yield store.to_host()
        return
    for low in range(0, len(store), _CHUNK):
        yield store.take(np.arange(low, min(low + _CHUNK, len(store))))


def _loss(store: TokenStore, conversation: RowNumbers, begin: RowNumbers, lengths: RowNumbers) -> RowNumbers:
    """(r,) tokens with loss of each row, by its conversation, ascending, and its place in what is stored of that."""
    found, low = [], 0
    for part in _parts(store):
        low, first = low + len(part), low
        some = slice(*np.searchsorted(conversation, [first, low]))
        start = part.offsets[conversation[some] - first] + begin[some]
        before, behind = marked_before((part.values & LOSS) != 0, start, start + lengths[some])
        found.append(behind - before)
    return np.concatenate(found)
