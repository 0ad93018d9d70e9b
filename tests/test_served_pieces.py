"""What rows begin with in common is encoded once: ids and places of tokens are those of the whole rows."""

import itertools
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from template_cases import TEMPLATES
from test_served import STRIPPING, load
from test_served_columns import TEXTS, check, conversations_with, random_units, text_of

from gpuload.core.arrays import Ragged, common_prefix
from gpuload.engines.host.spans import TokenSpans
from gpuload.kinds.served.decisions import bytes_before, shared_place, units_of
from gpuload.kinds.served.pieces import RowPieces
from gpuload.kinds.served.reference import ServedReference
from gpuload.template.program import Path

TOKEN = "<|im_start|>"


def random_rows(rng: random.Random) -> tuple[list[str], list[int]]:
    """Texts, and the bytes that each may share with the one before: up to one of the tokens in what both begin with."""
    parts = ("a b", " c", "é\n", "\n\n", "  ", "x<", "|im_start|>", "中文 ", "")
    texts, shared = ["q" + "".join(rng.choices(parts, k=3))], [0]
    for _ in range(rng.randint(0, 7)):
        pieces = texts[-1].split(TOKEN)
        kept = TOKEN.join(pieces[: rng.randint(1, len(pieces))])
        turns = "".join(TOKEN + "".join(rng.choices(parts, k=rng.randint(0, 4))) for _ in range(rng.randint(1, 3)))
        texts.append(kept + turns)
        common = common_prefix(*texts[-2:])
        at = texts[-1].rfind(TOKEN, 0, common)
        shared.append(len(texts[-1][: max(at, 0)].encode()) if rng.random() < 0.8 else 0)
    return texts, shared


def test_ids_and_places_are_those_of_whole_rows(qwen: Any) -> None:
    reference = ServedReference(qwen, "assistant")
    spans, rng, chained = TokenSpans(reference), random.Random(0), 0
    for _ in range(60):
        texts, shared = random_rows(rng)
        more, others = random_rows(rng)  # of another conversation
        texts, shared = texts + more, shared + others
        text = pa.array(texts, pa.large_string())
        pieces = RowPieces.of(text, np.array(shared, np.int64))
        own = Ragged.from_lists(reference.encode_many(pieces.text.to_pylist()))
        whole = Ragged.from_lists(reference.encode_many(texts))
        joined = pieces.joined(own)
        assert joined.to_lists() == whole.to_lists()
        ends = [np.cumsum([0, *(len(char.encode()) for char in each)]) for each in texts]
        rows, at = np.repeat(np.arange(len(texts)), [len(each) for each in ends]), np.concatenate(ends)
        assert pieces.beginning(spans, own, rows, at).tolist() == spans.beginning(text, whole, rows, at).tolist()
        size = pa.compute.sum(pa.compute.binary_length(pieces.text)).as_py()
        assert size == sum(map(len, map(str.encode, texts))) - int(pieces.shared.sum())
        chained += int(((pieces.shared > 0) & (pieces.first < np.arange(len(texts)) - 1)).sum())
    assert chained > 50


def test_rows_share_what_is_the_same_for_all_texts() -> None:
    rng, found = random.Random(4), 0
    for _ in range(600):
        base = [part for _ in range(4) for part in (*random_units(rng), rng.choice(("", "<t>")))]
        one, other = (units_of(Path((*base[: rng.randint(1, len(base))], *random_units(rng), "z"))) for _ in "ab")
        unit, size = shared_place(one, other, ["<t>"])
        assert bytes_before(one, (unit, 10**6)) >= size
        for texts in itertools.product(TEXTS[:4], repeat=3):
            ends = text_of(one[:unit], texts).encode() + (one[unit].encode()[:size] if size else b"")  # type: ignore
            whole = [text_of(each, texts).encode() for each in (one, other)]
            assert not (unit or size) or all(each.startswith(ends + b"<t>") for each in whole)
            found += bool(ends)
    assert found > 5000


@pytest.mark.parametrize("template", ["stripping", "trl/qwen3"])
def test_loads_share_them(qwen: Any, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = STRIPPING if template == "stripping" else TEMPLATES[template][1]
    seen: list[int] = []
    of = RowPieces.of.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, text: Any, shared: Any) -> Any:
        seen.append(int((shared > 0).sum()))
        return of(cls, text, shared)

    monkeypatch.setattr(RowPieces, "of", classmethod(counted))
    answers: dict[str, Any] = {"content": ("yes", " a b ", "中文", "\n\nso"), "reasoning_content": ("so", "é", " x y")}
    conversations = conversations_with(random.Random(8), 60, answers)
    conversations += [each * 3 for each in conversations[:20]]
    check(qwen, source, conversations)
    assert sum(seen) > 100
    assert not load(qwen, conversations, chat_template=source, verify="full").report.check.mismatches
