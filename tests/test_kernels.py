"""Kernels on the host against their definition: odd sizes, poisoned outputs, places beyond 2^31."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulator.host_kernels import COMPILER, HostKernels
from tiers import exhaustive

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.marks import CHOSEN, IDS, LOSS, REJECTED, split, with_loss
from gpuload.dataset.pieces import tokens_of
from gpuload.engines.batches import BatchLayout
from gpuload.engines.device import texts as device_texts
from gpuload.engines.device.batches import prepare_pad
from gpuload.engines.device.kernel_source import signatures, source
from gpuload.engines.device.store import Index
from gpuload.engines.device.texts import DeviceTexts, gather, texts_to_device
from gpuload.engines.host.batches import pad
from gpuload.engines.host.packs import IGNORED, packed
from gpuload.engines.protocol import TextColumn
from gpuload.kinds.chats.dataset import LAYOUT as CHATS
from gpuload.kinds.prompts import LAYOUT as PROMPTS
from gpuload.packing import Plan
from gpuload.packing.plan import whole_rows
from gpuload.template.probe import WHITE_SPACE
from gpuload.template.program import Operation, Predicate, Ref, apply_operations, holds

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = HostKernels()
OPS = DeviceTexts(KERNELS)
SIZES = (0, 1, 31, 32, 33, 257, 1000)
PIECES = ["", "a", "ab", "aba", "é", "中", "🙂", " ", "\n", "\u3000", "</think>", "x" * 15, "y" * 40, *WHITE_SPACE]


def texts_of(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(PIECES, k=chance.choice([0, 1, 2, 5, 30]))) for _ in range(count)]


def column(texts: list[str]) -> TextColumn:
    return texts_to_device(KERNELS, [text.encode() for text in texts])


def read(texts: TextColumn) -> list[str]:
    return [raw.decode() for raw in OPS.bytes_at(texts, range(len(texts)))]


def poisoned(size: int, dtype: Any) -> Any:
    return np.full(size, -85 if np.dtype(dtype).kind == "i" else 0xAB, dtype)


@pytest.mark.parametrize("count", SIZES)
def test_pieces_of_any_size_are_copied_in_any_order(count: int) -> None:
    chance = np.random.default_rng(count)
    data = chance.integers(0, 256, 5000, np.uint8)
    start = chance.integers(0, 4000, count)
    length = chance.choice([0, 0, 1, 7, 8, 15, 16, 17, 24, 63, 900], count)
    offsets, out = gather(KERNELS, KERNELS.address(data) + start, length)
    assert out.tobytes() == b"".join(data[s : s + n].tobytes() for s, n in zip(start, length, strict=True))
    assert offsets.tolist() == np.concatenate([[0], np.cumsum(length)]).tolist()


def test_a_row_of_five_megabytes_among_small_ones() -> None:
    texts = ["", "é" * 2_500_000, "x", "", " \n" * 50_000 + "y"]
    assert read(column(texts)) == texts
    assert read(OPS.operate(column(texts), Operation("strip"))) == ["", "é" * 2_500_000, "x", "", "y"]
    end = Predicate(Ref(0), "contains", "éé\0")
    assert not OPS.answer(column(texts), end).any()


def test_pieces_behind_the_first_2_to_the_31_bytes() -> None:
    # Texts of 3 GB, of which only a window is written: one short source serves for all of its pieces.
    source = np.frombuffer(bytes(range(256)) * 4096, np.uint8)
    length = np.full(3000, len(source), np.int64)
    address = np.full(3000, KERNELS.address(source), np.int64)
    offsets = offsets_of(length)
    for low in (2**31 - 5, 2**31 + 3, 2**32 - 77, int(offsets[-1]) - 1000):
        out = poisoned(1100, np.uint8)
        high = min(low + 1001, int(offsets[-1]))
        KERNELS.run("copy_pieces", 80, 3000, address, offsets, low, high, out)
        size = high - low
        assert out[:size].tolist() == [(low + i) % 256 for i in range(size)]
        assert (out[size:] == 0xAB).all()


def test_texts_behind_the_first_2_to_the_31_bytes() -> None:
    data = np.zeros(2**31 + 100, np.uint8)  # untouched pages cost nothing
    text = b"  a</think>b  "
    data[2**31 + 10 : 2**31 + 10 + len(text)] = np.frombuffer(text, np.uint8)
    far = TextColumn(data, np.array([2**31 + 10]), np.array([len(text)]))
    assert read(OPS.operate(far, Operation("strip"))) == ["a</think>b"]
    assert read(OPS.operate(far, Operation("after_last", ("</think>",)))) == ["b  "]
    assert read(OPS.operate(far, Operation("before", ("</think>",)))) == ["  a"]
    assert OPS.answer(far, Predicate(Ref(0), "endswith", "b  ")).tolist() == [True]
    assert not OPS.not_utf8(far).any()


MARKS = ["</think>", "a", "aba", "\n", "é", "中", "🙂x", "ab", "a" * 50]
OPERATIONS = [
    *(
        Operation(name, args)
        for name in ("strip", "lstrip", "rstrip")
        for args in ((), ("\n",), ("ab\n é中🙂",), ("",))
    ),
    *(Operation(name, (mark,)) for name in ("removeprefix", "removesuffix", "before", "after") for mark in MARKS),
    *(Operation(name, (mark,)) for name in ("before_last", "after_last") for mark in MARKS),
]


@pytest.mark.parametrize("count", SIZES)
def test_operations_do_what_their_definition_says(count: int) -> None:
    texts = texts_of(count)
    chance = random.Random(count)
    for operation in OPERATIONS:
        chain = [operation, *chance.choices(OPERATIONS, k=chance.choice([0, 1, 2]))]
        strings = column(texts)
        for one in chain:
            strings = OPS.operate(strings, one)
        assert read(strings) == [apply_operations(text, chain) for text in texts], chain


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("test", ["contains", "startswith", "endswith", "equals", "empty"])
def test_questions_have_the_answers_of_their_definition(count: int, test: str) -> None:
    texts = texts_of(count, seed=1)
    for mark in [*MARKS, "", *texts[:5]]:
        predicate = Predicate(Ref(0), test, mark)
        assert OPS.answer(column(texts), predicate).tolist() == [holds(predicate, text) for text in texts]


def test_every_white_space_of_unicode_and_nothing_else_is_stripped() -> None:
    every = [f"{chr(c)}x{chr(c)}" for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    assert read(OPS.operate(column(every), Operation("strip"))) == [text.strip() for text in every]


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_utf8_is_what_python_says_it_is() -> None:
    chance = random.Random(0)
    pieces = [b"a", "é".encode(), "中".encode(), "🙂".encode(), b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"]
    pieces += [bytes([b]) for b in (0x80, 0xBF, 0xC1, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF)]
    texts = [bytes([a, b]) for a in range(256) for b in range(256)]
    texts += [bytes([a, b, 0x80]) for a in range(0xE0, 0xF5) for b in range(0x80, 0xC0)]
    texts += [bytes([a, b, 0x80, 0xBF]) for a in range(0xF0, 0xF5) for b in range(0x80, 0xC0)]
    texts += [b"".join(chance.choices(pieces, k=chance.randint(0, 6))) for _ in range(20_000)]
    texts += ["é中🙂x".encode() * 100, "é中🙂x".encode() * 100 + b"\xff", b"\x80" + b"x" * 100]
    found = OPS.not_utf8(texts_to_device(KERNELS, texts))
    assert found.tolist() == [not _is_utf8(text) for text in texts]


@pytest.mark.parametrize("part", [1, 7, 64])
def test_texts_of_many_parts(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several warps per text: matches across the borders of parts, in the first and in the last one; bad bytes at
    every position."""
    monkeypatch.setattr(device_texts, "_PART", part)
    texts = [*texts_of(300), "", "x" * 200 + "ab", "ab" + "x" * 200, "é" * 100 + "aba" + "é" * 100 + "aba", "a" * 300]
    for operation in OPERATIONS:
        expected = [apply_operations(text, [operation]) for text in texts]
        assert read(OPS.operate(column(texts), operation)) == expected, operation
    for mark in MARKS:
        predicate = Predicate(Ref(0), "contains", mark)
        assert OPS.answer(column(texts), predicate).tolist() == [holds(predicate, text) for text in texts]
    raw = "é中🙂x".encode() * 20
    changed = [
        raw,
        *(raw[:at] + bytes([byte]) + raw[at + 1 :] for at in range(len(raw)) for byte in (0x80, 0xE0, 0xFF)),
    ]
    found = OPS.not_utf8(texts_to_device(KERNELS, changed))
    assert found.tolist() == [not _is_utf8(text) for text in changed]


@pytest.mark.parametrize("count", SIZES)
def test_equal_texts_are_one_group(count: int) -> None:
    texts = [random.Random(i).choice(["user", "system", "", "assistant", "use", "userr"]) for i in range(count)]
    example, group, strays = OPS.distinct(column(texts))
    assert [texts[example[g]] for g in group] == texts
    assert len(example) == len(set(texts))
    assert not strays.any()


def padded_by_kernel(kernels: Any, store: Ragged, plan: Plan, width: int, layout: BatchLayout) -> list[Any]:
    """The planes that the kernel writes, as lists."""
    count, planes = len(plan), len(layout.planes)
    out = poisoned(planes * count * width + 3, np.int64)
    address = kernels.address(store.values) + 4 * store.offsets[:-1]
    launch = prepare_pad(kernels, Index(address, store.lengths), layout, 7)
    piece = np.concatenate([offsets_of(plan.lengths), plan.rows, plan.first, plan.offsets])
    launch(kernels.blocks(count), count, len(plan.rows), piece, width, out)
    assert (out[planes * count * width :] == -85).all(), "poison"
    made: list[Any] = out[: planes * count * width].reshape(planes, count, width).tolist()
    return made


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("keep", ["left", "right", "middle"])
@pytest.mark.parametrize(("width", "limit"), [(40, 40), (300, 300), (1, 1), (33, 7)])
def test_batches_are_padded_and_truncated_as_on_the_cpu(count: int, keep: Any, width: int, limit: int) -> None:
    chance = np.random.default_rng(count)
    lists = [chance.integers(0, 1000, chance.integers(0, 90)).tolist() for _ in range(50)]
    store, rows = Ragged.from_lists(lists), chance.integers(0, 50, count)
    plan = whole_rows(rows, store.lengths[rows]).truncated(limit, keep)
    planes = padded_by_kernel(KERNELS, store, plan, width, PROMPTS)
    kept = store.take(rows).truncate(limit, keep)
    for plane, padding, fill in zip(
        planes, (7, 0, 0), (lambda r: r, lambda r: [1] * len(r), lambda r: [*range(len(r))]), strict=True
    ):
        assert plane == [[padding] * (width - len(row)) + fill(row) for row in kept.to_lists()]
    assert planes == [each.tolist() for each in pad(kept, width, PROMPTS, 7).values()]


@pytest.mark.parametrize("keep", ["left", "right"])
@pytest.mark.parametrize("limit", [3, 16])
@pytest.mark.parametrize("width", [0, 16, 300])
@pytest.mark.parametrize("count", SIZES)
def test_labelled_batches_are_padded_as_on_the_cpu(count: int, width: int, limit: int, keep: Any) -> None:
    limit, chance = min(limit, width), np.random.default_rng(width)
    offsets = offsets_of(chance.integers(0, 40, 50))
    ids = Ragged(chance.integers(0, 1 + IDS, offsets[-1], np.int32), offsets)
    store = with_loss(ids, chance.integers(0, 2, offsets[-1]).astype(bool))
    rows = chance.integers(0, 50, count)
    plan = whole_rows(rows, store.lengths[rows]).truncated(limit, keep)
    planes = padded_by_kernel(KERNELS, store, plan, width, CHATS)
    kept = store.take(rows).truncate(limit, keep)
    expected = pad(kept, width, CHATS, 7)
    assert list(expected) == ["input_ids", "attention_mask", "position_ids", "labels"]
    assert planes == [each.tolist() for each in expected.values()]
    bare, loss = (each.to_lists() for each in split(kept))
    assert planes[0] == [row + [7] * (width - len(row)) for row in bare]
    labels = [
        [token if bit else IGNORED for token, bit in zip(*each, strict=True)] for each in zip(bare, loss, strict=True)
    ]
    assert planes[3] == [row + [IGNORED] * (width - len(row)) for row in labels]


def test_constants_of_labels_are_those_of_the_kernels() -> None:
    found = dict(re.findall(r"#define (LOSS|NO_LABEL|CHOSEN|REJECTED) +\(([^()]+)\)", source()))
    assert {name: eval(value) for name, value in found.items()} == {
        "LOSS": LOSS, "NO_LABEL": IGNORED, "CHOSEN": CHOSEN, "REJECTED": REJECTED,
    }  # fmt: skip


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("longest", [1, 3, 300])
def test_packs_are_gathered_as_on_the_cpu(count: int, longest: int) -> None:
    chance = np.random.default_rng(count)
    lengths = chance.integers(1, 400, 50)
    offsets = offsets_of(lengths)
    store = Ragged(chance.integers(0, 1 + IDS, offsets[-1], np.int32), offsets)
    mask = chance.integers(0, 2, offsets[-1], np.uint8)
    rows = chance.integers(0, 50, count)
    first = chance.integers(0, lengths[rows])
    plan = Plan(
        rows, first, np.minimum(chance.integers(1, longest + 1, count), lengths[rows] - first), np.arange(count + 1)
    )
    bounds = offsets_of(plan.lengths)
    tokens, piece = int(bounds[-1]), np.concatenate([bounds, rows, first])
    out = poisoned(3 * tokens + (tokens + count + 2) // 2 + 3, np.int64)
    marked = with_loss(store, mask)
    address = KERNELS.address(marked.values) + 4 * offsets[:-1]
    KERNELS.run("pack", tokens + 1, address, False, np.zeros(0, np.float32), count, piece, tokens, out)
    expected = packed(tokens_of(marked, plan), plan)
    planes, numbers = out[: 3 * tokens].reshape(3, tokens), out[3 * tokens :].view(np.int32)
    for plane, name in zip(planes, ("input_ids", "labels", "position_ids"), strict=True):
        assert plane.tolist() == expected[name][0].tolist()
    assert numbers[:tokens].tolist() == expected["seq_idx"][0].tolist()
    assert numbers[tokens : tokens + count + 1].tolist() == expected["cu_seq_lens_q"].tolist()
    assert (numbers[tokens + count + 1 :] < 0).all(), "poison"


def test_arguments_of_the_wrong_kind_are_rejected() -> None:
    assert {"pad", "strip", "find", "copy_pieces"} <= set(signatures())
    good = [1, np.zeros(4, np.uint8), np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int64)]
    KERNELS.run("hash_texts", 1, *good)
    with pytest.raises(TypeError, match="start must be a numpy array of int64, not numpy.ndarray int32"):
        KERNELS.run("hash_texts", 1, *good[:2], np.zeros(1, np.int32), *good[3:])
    with pytest.raises(TypeError, match="not contiguous"):
        KERNELS.run("hash_texts", 1, 1, np.zeros(8, np.uint8)[::2], *good[2:])
    with pytest.raises(TypeError, match="takes 5 arguments, not 4"):
        KERNELS.run("hash_texts", 1, *good[:4])


_PAIRS = ("rows_are_written", "sequences_are_padded")


@exhaustive
@pytest.mark.skipif(shutil.which("g++") is None or "GPULOAD_SANITIZE" in os.environ, reason="no g++, or inside already")
def test_kernels_touch_no_byte_that_is_not_theirs() -> None:
    """All tests above, those of fibers and of rendering, and those of pieces and ids that need no real tokenizer once
    more, with the address sanitizer in the kernels and in NumPy's allocations."""
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.exists(runtime):
        pytest.skip("g++ has no address sanitizer here")
    settings = {"GPULOAD_SANITIZE": "1", "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    again = [f"test_{what}.py" for what in ("fibers", "device_render", "device_pieces")]
    again += ["test_device_encode.py::test_chunks_of_any_size", "test_device_tiles.py::test_any_order_of_tiles"]
    again += [f"test_device_bpe.py::test_random_{what}" for what in ("merges", "merges_of_characters")]
    again += ["test_device_bpe.py::test_words_of_any_length_at_any_address"]
    again += [f"test_device_nfc.py::test_{what}" for what in ("marks_in_any_order", "many_marks_in_a_row")]
    again += [f"test_device_spans.py::test_{what}" for what in ("rules", "texts_are_marked_part_by_part")]
    again += [f"test_device_pairs.py::test_{what}_as_on_the_host" for what in _PAIRS]
    again += ["test_device_pairs.py::test_what_texts_begin_with_is_found"]
    files = [__file__, *(str(Path(__file__).with_name(name)) for name in again)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files]
    made_up = "not device_pieces or random or stripped or prepended"
    command += ["-k", f"not every_template and not shared_data and ({made_up})"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
