"""load_pairs by the device engine, with kernels of the host: rows and batches are those of the CPU engine."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from simulator import load_pairs_with
from simulator.host_kernels import COMPILER, HostKernels
from simulator.stream_checks import StreamKernels
from tiers import core

import gpuload
from gpuload.core.arrays import Ragged, appended, common_prefixes, offsets_of
from gpuload.core.errors import DeviceError
from gpuload.core.marks import paired, split, with_loss_from
from gpuload.dataset.pieces import stored, tokens_of
from gpuload.engines.device import cuda
from gpuload.engines.device.batches import DeviceBatches
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.engines.device.store import Index
from gpuload.engines.host.batches import pad
from gpuload.kinds.pairs.dataset import layout_of
from gpuload.kinds.training_device import common_ids
from gpuload.packing import Plan
from gpuload.packing.plan import whole_rows

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = StreamKernels()
OBJECTIVES = ("dpo", "rm", "kto")
SIZES = (0, 1, 33, 300)
LAYOUT = layout_of("dpo")


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Loads and batches use arrays on several streams in order, and free none that a stream still uses."""
    KERNELS.races.clear()
    yield
    gc.collect()
    assert KERNELS.races == []


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def pair(question: str, good: str, bad: str) -> dict[str, Any]:
    return {
        "prompt": [turn("system", "Be brief."), turn("user", question)],
        "chosen": [turn("assistant", good)],
        "rejected": [turn("assistant", bad), turn("user", "?"), turn("assistant", good)],
    }


WORDS = ["Hi", "é 你 👋🏽", "<|im_end|>", " a\n", "cafe\u0301", "<|im_start|>assistant\n", "same", "x" * 40]
PAIRS = [pair(word, WORDS[k - 1], WORDS[k - 2]) for k, word in enumerate(WORDS)]
PAIRS += [each | {"rejected": each["chosen"]} for each in PAIRS[:2]]
TOOLS = '[{"type": "function", "function": {"name": "f"}}]'
FORMS: dict[str, list[Any]] = {
    "messages": PAIRS,
    "implicit": [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in PAIRS],
    "texts": [{"prompt": "The sky", "chosen": f" is {word}", "rejected": " blue"} for word in WORDS],
    "tools": [row | {"tools": TOOLS * (number % 2)} for number, row in enumerate(PAIRS)],
}


def assert_same(found: gpuload.PairDataset, expected: gpuload.PairDataset) -> None:
    assert found.report.check.mismatches == []
    for name in ("values", "offsets"):
        assert np.array_equal(getattr(found.parts, name), getattr(expected.parts, name))
    assert found.fingerprint == expected.fingerprint
    assert found.report.rejected == expected.report.rejected
    assert found.report.overlong == expected.report.overlong
    assert found.report.longest == expected.report.longest
    assert np.array_equal(found.lengths, expected.lengths)
    assert found.columns.equals(expected.columns)
    assert repr(found) == repr(expected)
    assert [found[row] for row in range(3)] == [expected[row] for row in range(3)]
    counts = [dict(each.report.counts) for each in (found, expected)]
    counts[0].pop("rows rendered and encoded on the host: kernels take columns of messages only", None)
    assert counts[0] == counts[1]
    for plan in ({"batch_size": 3, "shuffle": True}, {"batch_size": 2, "padding": "max_length"}):
        batches = zip(found.loader(**plan), expected.loader(**plan), strict=True)  # type: ignore[arg-type]
        assert all(same_batch(one, other) for one, other in batches), plan


def same_batch(one: Any, other: Any) -> bool:
    assert list(one) == list(other)
    return all(
        torch.equal(value, other[key]) and value.dtype == other[key].dtype
        if isinstance(value, torch.Tensor)
        else str(value) == str(other[key])
        for key, value in one.items()
    )


@pytest.fixture
def both(qwen: Any) -> Any:
    """Loads by both engines and compares everything; returns the device's."""

    def load(files: Any, **options: Any) -> gpuload.PairDataset:
        found = load_pairs_with(KERNELS, files, qwen, **options)
        assert_same(found, gpuload.load_pairs(files, qwen, device="cpu", **options))
        return found

    return load


# -- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", core(OBJECTIVES, "kto"))
@pytest.mark.parametrize("form", FORMS)
def test_rows_and_batches_of_every_objective(both: Any, form: str, objective: Any) -> None:
    """Messages are rendered and encoded by kernels, other forms on the host."""
    rows = [row | {"margin": number / 4, "n": number} for number, row in enumerate(FORMS[form] * 3)]
    found = both(pa.Table.from_pylist(rows), objective=objective, verify="full")
    by_kernels = form in ("messages", "implicit")
    assert ("rendered and encoded by kernels" in found.report.engine) == by_kernels
    assert any("on the host" in what for what in found.report.counts) != by_kernels


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_answers_with_fields_of_their_own(both: Any, qwen: Any, objective: Any) -> None:
    """By kernels where they are text, in any order; with a list, by transformers. `joined` is that of the host."""
    template = (
        "{% for m in messages %}<|im_start|>{% for k in m %}[{{ k }}{{ m[k] if m[k] is string else m[k] | tojson }}]"
        "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    rows = []
    for number, row in enumerate(PAIRS * 2):
        good = {"reasoning_content": f"why {number}", **row["chosen"][0], "tags": [None, "x"] if number == 7 else None}
        rows.append(row | {"chosen": [good], "margin": 1.0})
    found = both(pa.Table.from_pylist(rows), objective=objective, verify="full", strict=True, chat_template=template)
    assert "rendered and encoded by kernels" in found.report.engine
    name = "completion_ids" if objective == "kto" else "chosen_ids"
    text = "".join(qwen.decode(found[row][name]) for row in range(len(found)))
    assert [f"[reasoning_contentwhy {number}]" in text for number in range(len(rows))] == [True] * len(rows)


def test_single_completions(both: Any) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": k % 2 == 0} for k, row in enumerate(PAIRS)]
    found = both(pa.Table.from_pylist(rows), kl_batch_size=3)
    assert "rendered and encoded by kernels" in found.report.engine


OPTIONS: list[dict[str, Any]] = [
    {"tokens_on": "host"}, {"max_length": 31}, {"max_length": 31, "overlong": "keep_start"},
    {"max_length": 31, "overlong": "keep_end"}, {"max_samples": 9, "shuffle": True, "seed": 3},
]  # fmt: skip


@pytest.mark.parametrize("objective", core(OBJECTIVES, "dpo"))
@pytest.mark.parametrize(
    "options",
    core(OPTIONS, *OPTIONS[::2]),
    ids=str,
)  # fmt: skip
def test_options(both: Any, objective: Any, options: dict[str, Any]) -> None:
    found = both(pa.Table.from_pylist(PAIRS * 2), objective=objective, **options)
    assert isinstance(stored(found._store), Ragged) == (options.get("tokens_on") == "host")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rows_that_are_dropped_are_counted(both: Any, objective: Any) -> None:
    bad = [
        PAIRS[0] | {"chosen": None}, PAIRS[1] | {"rejected": []}, PAIRS[2] | {"prompt": [turn("user", None)]},  # type: ignore[arg-type]
        PAIRS[3] | {"rejected": [{"role": "assistant", "content": None}]},
    ]  # fmt: skip
    found = both(pa.Table.from_pylist([*bad, *PAIRS]), objective=objective)
    assert sum(found.report.rejected.values()) == len(bad)


def test_ids_from_the_token_cache_keep_their_parts(both: Any, tmp_path: Path, warm_cache: Path) -> None:
    file = str(tmp_path / "pairs.parquet")
    pq.write_table(pa.Table.from_pylist(PAIRS), file)
    both(file)
    assert both(file).report.from_cache == [file]


def test_rows_of_the_host_are_counted_in_a_note(both: Any) -> None:
    found = both(pa.Table.from_pylist(FORMS["tools"]))
    what = "rows rendered and encoded on the host: kernels take columns of messages only"
    assert found.report.counts[what] == len(PAIRS)
    assert found.report.engine.endswith("; batches on cpu")


def test_without_a_gpu(qwen: Any) -> None:
    why = cuda.unavailable_reason("cuda")
    if why is None:
        pytest.skip("there is a GPU")
    table = pa.Table.from_pylist(PAIRS)
    assert f"no GPU is used: {why}" in gpuload.load_pairs(table, qwen).report.notes
    with pytest.raises(DeviceError, match="device='cuda': .*; or use device='cpu' or 'auto'"):
        gpuload.load_pairs(table, qwen, device="cuda")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_texts_share_is_encoded_once(
    both: Any, qwen: Any, monkeypatch: pytest.MonkeyPatch, objective: Any
) -> None:
    sizes, encode = list[int](), DeviceEncoder.encode
    monkeypatch.setattr(
        DeviceEncoder, "encode", lambda self, data, offsets: (sizes.append(len(data)), encode(self, data, offsets))[1]
    )
    question = "word " * 1000
    both(pa.Table.from_pylist([pair(question, "yes", "no")] * 20), objective=objective)
    assert 20 * len(question) < sum(sizes) < 20 * (len(question) + 500)


def test_memory_that_runs_out_is_named(qwen: Any) -> None:
    class Small(HostKernels):
        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            if name == "lay_pairs":
                raise MemoryError
            super()._launch(name, blocks, arguments)

    with pytest.raises(DeviceError, match="out of GPU memory while joining sequences: raise gpu_memory_limit"):
        load_pairs_with(Small(), pa.Table.from_pylist(PAIRS), qwen, device="cuda")


# -- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loaders_resume(qwen: Any, objective: Any) -> None:
    found = load_pairs_with(KERNELS, pa.Table.from_pylist(PAIRS), qwen, objective=objective)
    loader = found.loader(2, shuffle=True, seed=1)
    batches = iter(loader)
    next(batches)
    state, expected = loader.state_dict(), next(batches)
    for other in (found, pickle.loads(pickle.dumps(found))):
        resumed = other.loader(2, shuffle=True, seed=1)
        resumed.load_state_dict(state)
        assert same_batch(next(iter(resumed)), expected)


def test_batches_are_made_where_the_process_is(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    launch = HostKernels._launch
    found = load_pairs_with(HostKernels(), pa.Table.from_pylist(PAIRS), qwen)
    monkeypatch.setattr(HostKernels, "_launch", lambda self, name, *rest: (ran.append(name), launch(self, name, *rest)))
    expected = found.batch([0, 1])
    assert ran == ["pad"]
    travelled = pickle.loads(pickle.dumps(found))
    found.tokens  # noqa: B018
    found._batches._process = -1  # type: ignore[attr-defined]
    del ran[:]
    assert same_batch(travelled.batch([0, 1]), expected)
    assert same_batch(found.batch([0, 1]), expected)
    assert ran == []


# -- kernels ---------------------------------------------------------------------------------------------------------


def random_pairs(rows: int) -> Ragged:
    """Pairs with parts of any size, also none; some with equal sequences."""
    chance = np.random.default_rng(rows)

    def ids(lengths: Any) -> Ragged:
        return Ragged(chance.integers(0, 3, int(lengths.sum()), np.int32), offsets_of(lengths))

    shared, chosen, rejected = (ids(chance.integers(0, 70, rows)) for _ in range(3))
    other = chosen.take(np.arange(rows)) if rows % 2 else rejected
    sequences = (with_loss_from(appended(shared, each), shared.lengths) for each in (chosen, other))
    return paired(*sequences, shared.lengths)


@pytest.mark.parametrize("rows", SIZES)
def test_rows_are_written_as_on_the_host(rows: int) -> None:
    kernels, chance = HostKernels(), np.random.default_rng(rows)

    def index(ids: Ragged) -> Index:
        return Index(kernels.address(ids.values) + 4 * ids.offsets[:-1], ids.lengths)

    one, two = (random_pairs(rows).take(chance.permutation(rows)) for _ in range(2))
    one, two = (Ragged(ids.values & 1, ids.offsets) for ids in (one, two))
    shared = common_prefixes(one, two)
    assert common_ids(kernels, index(one), index(two)).tolist() == shared.tolist()
    begins = [chance.integers(0, each.lengths + 1) for each in (one, two)]
    marked = [with_loss_from(each, begin) for each, begin in zip((one, two), begins, strict=True)]
    heads = random_pairs(rows).take(chance.permutation(rows))
    for other, begin, common, rest in (
        (two, begins[1], shared, paired(*marked, shared)),
        (one, begins[0], one.lengths, marked[0]),  # one completion
    ):
        expected = appended(heads, rest)
        out = np.full(int(expected.offsets[-1]) + 3, -85, np.int32)
        kernels.run(
            "lay_pairs", kernels.warps(rows), rows, expected.offsets, index(heads).address, heads.lengths, common,
            index(one).address, one.lengths, begins[0], index(other).address, begin, out,
        )  # fmt: skip
        assert out[:-3].tolist() == expected.values.tolist()
        assert (out[-3:] == -85).all(), "poison"


@pytest.mark.parametrize("rows", SIZES)
def test_what_texts_begin_with_is_found(rows: int) -> None:
    kernels, chance = HostKernels(), np.random.default_rng(rows)
    starts = ["", "a", "abc" * 50, "é 你" * 20]
    texts = [[starts[chance.integers(4)] + "xyz"[: chance.integers(4)] for _ in range(rows)] for _ in range(3)]
    columns = [Ragged.from_lists([list(text.encode()) for text in column]) for column in texts]
    first, *others = [(each.values.astype(np.uint8), each.offsets[:-1].copy(), each.lengths) for each in columns]
    common = first[2].copy()
    for data, start, length in others:
        common = np.minimum(common, length)
        kernels.run("common_bytes", kernels.warps(rows), rows, first[0], first[1], data, start, common)
    for size, *row in zip(common.tolist(), *texts, strict=True):
        some = [text.encode() for text in row]
        assert len({text[:size] for text in some}) == 1
        assert len({text[size : size + 1] for text in some}) > 1 or size == min(map(len, some))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize(("width", "limit"), [(0, 5), (7, 7), (40, 30), (300, 300)])
@pytest.mark.parametrize("count", core(SIZES, 33))
def test_sequences_are_padded_as_on_the_host(count: int, width: int, limit: int, side: Any) -> None:
    limit, chance, store = min(limit, width), np.random.default_rng(count), random_pairs(50)
    pieces = []
    for _ in range(3):
        rows = chance.integers(0, 50, count)
        first = chance.integers(0, store.lengths[rows] + 1)
        pieces.append(whole_rows(rows, chance.integers(0, store.lengths[rows] - first + 1), first))
    whole = Plan.joined(*pieces)
    lists: list[list[int]] = [[] for _ in range(count)]
    for piece in pieces:
        for tokens, row, first, size in zip(lists, piece.rows, piece.first, piece.lengths, strict=True):
            tokens += store[row][first : first + size].tolist()
    assert tokens_of(store, whole).to_lists() == lists
    sequences = Ragged.from_lists(lists).truncate(limit, side)
    plan = whole.truncated(limit, side)
    assert tokens_of(store, plan).to_lists() == sequences.to_lists()
    made = DeviceBatches(HostKernels(), store, LAYOUT, 7)(plan, lambda: sequences, width)
    expected = pad(sequences, width, LAYOUT, 7)
    for name in LAYOUT.planes:
        assert made[name].tolist() == expected[name].tolist()
    ids, loss = (each.to_lists() for each in split(sequences))
    assert expected["input_ids"].tolist() == [row + [7] * (width - len(row)) for row in ids]
    assert expected["completion_mask"].tolist() == [[*map(int, row)] + [0] * (width - len(row)) for row in loss]
