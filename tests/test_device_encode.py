"""The device encoder on host kernels: ids compared with those of `tokenizers`."""

from __future__ import annotations

import functools
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.encoder import cut
from simulator.host_kernels import COMPILER, HostKernels
from simulator.strict_arrays import StrictKernels
from test_bpe_splitter import TEXT
from test_device_tiles import BY_TILES
from tiers import SHARED, examples, exhaustive, name_of, shared, shared_files, with_shared
from tokenizers import Tokenizer

from gpuload.engines.device import encode as encoding
from gpuload.engines.device.bpe import LONGEST
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_spec
from gpuload.tokenizer.spec import BpeSpec, bpe_spec

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = HostKernels()
NAMES = [
    "qwen2.5-instruct",
    "qwen3",
    "llama3.1-instruct",
    "deepseek-v3",
    "gpt-oss",
    "mistral-nemo",
    "gpt2",
    "smollm",
    "olmo2-dolma2",
    "gemma3",
]
SAMPLED = 40  # texts of each file
Pair = tuple[CompiledTokenizer, Any]


def compiled(file: Path) -> Pair:
    backend = Tokenizer.from_file(str(file))
    spec = bpe_spec(backend.to_str())
    assert isinstance(spec, BpeSpec), spec
    return compile_spec(spec), backend


@pytest.fixture(scope="module")
def shipped(qwen_folder: str) -> Pair:
    return compiled(Path(qwen_folder) / "tokenizer.json")


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path]) -> dict[str, Pair]:
    return {name: compiled(folders[name] / "tokenizer.json") for name in ("shipped", *NAMES) if name in folders}


def encoded(pair: Pair, texts: list[str], **options: Any) -> tuple[list[list[int]], list[bool]]:
    """Return ids, and which texts fall back. The texts lie between other bytes, as in a shared buffer."""
    raw = [text.encode() for text in texts]
    data = np.frombuffer(b"".join([b"\xe4", *raw, b"zz"]), np.uint8)
    ids, falls_back = DeviceEncoder(KERNELS, pair[0], **options).encode(data, 1 + np.cumsum([0, *map(len, raw)]))
    assert ids.values.dtype == np.int32
    assert ids.offsets.dtype == np.int64
    assert falls_back.dtype == bool
    assert len(ids) == len(falls_back) == len(texts)
    return ids.to_lists(), falls_back.tolist()


def check(pair: Pair, texts: list[str], **options: Any) -> list[str]:
    """Assert that every text has the ids of `tokenizers`, unless it falls back; return those that do."""
    ids, falls_back = encoded(pair, texts, **options)
    expected = [one.ids for one in pair[1].encode_batch(texts, add_special_tokens=False)]
    for text, ours, theirs, is_fallback in zip(texts, ids, expected, falls_back, strict=True):
        assert ours == ([] if is_fallback else theirs), repr(text[:200])
    return [text for text, is_fallback in zip(texts, falls_back, strict=True) if is_fallback]


def conversation(messages: list[dict[str, Any]]) -> str:
    said = (f"<|im_start|>{message['role']}\n{message['content'] or ''}<|im_end|>\n" for message in messages)
    return "<bos><｜begin▁of▁sentence｜>" + "".join(said) + "<|eot_id|>[INST]"


def texts_of(file: Path, sampled: int | None = None) -> list[str]:
    """A text per row, all or some, with tokens that some of the tokenizers have."""
    names = pq.read_schema(file).names
    column = next((name for name in ("prompt", "messages", "question", "problem") if name in names), names[0])
    rows = pq.read_table(file, columns=[column])[column].to_pylist()
    if sampled is not None:
        rows = random.Random(file.name).sample(rows, min(sampled, len(rows)))
    return [row if isinstance(row, str) else conversation(row) for row in rows if row is not None]


@pytest.fixture(scope="module")
def real_texts() -> list[str]:
    """A sample of every shared file."""
    return [text for file in shared_files("**/*.parquet") for text in texts_of(file, SAMPLED)]


@pytest.mark.parametrize("name", with_shared(lambda: NAMES))
def test_real_data(real_texts: list[str], name: str) -> None:
    """Nothing differs. Few texts fall back, only if the tokenizer normalizes."""
    assert len(real_texts) > 1500
    pair = compiled_by_name(name)
    falls_back = check(pair, real_texts)
    print(f"{name}: {len(real_texts)} texts, {len(falls_back)} fall back")
    assert len(falls_back) < len(real_texts) / 100
    assert pair[0].spec.nfc or not falls_back


@functools.lru_cache(maxsize=1)
def compiled_by_name(name: str) -> Pair:
    return compiled(SHARED / "tokenizers" / name / "tokenizer.json")


# One process per tokenizer: its tables are built once.
EVERY = [pytest.param(name, marks=[pytest.mark.exact, shared, pytest.mark.xdist_group(name)]) for name in NAMES]


@pytest.mark.parametrize("file", with_shared(lambda: shared_files("**/*.parquet")), ids=name_of)
@pytest.mark.parametrize("name", EVERY)
def test_every_row(name: str, file: Path, record_property: Any) -> None:
    """`make exact`: every row of all real data, for every tokenizer."""
    pair, texts = compiled_by_name(name), texts_of(file)
    falls_back = [one for low in range(0, len(texts), 4096) for one in check(pair, texts[low : low + 4096])]
    record_property(name, (len(texts), len(falls_back)))
    assert pair[0].spec.nfc or not falls_back
    without_need = [text for text in falls_back if cut(pair[0], text) is not None]
    assert len(without_need) <= len(texts) / 100  # too long to merge


def test_shipped_data(shipped: Pair, gsm8k: str) -> None:
    texts = [conversation(messages) for messages in pq.read_table(gsm8k)["prompt"].to_pylist()]
    assert check(shipped, texts, chunk_bytes=100_000) == []


@examples(40)
@given(texts=st.lists(TEXT, max_size=8), size=st.integers(1, 300))
def test_any_texts(pairs: dict[str, Pair], texts: list[str], size: int) -> None:
    for pair in pairs.values():
        falls_back = check(pair, texts, chunk_bytes=size)
        assert pair[0].spec.nfc or not falls_back
        assert {text for text in texts if cut(pair[0], text) is None} == set(falls_back)


COMMON = [
    "",
    conversation([{"role": "user", "content": "It's 12 o'clock… 你好, привет, नमस्ते, สวัสดี, 🙂 x = y[0];\n"}]) * 40,
]
RARE: dict[str, tuple[str, dict[str, tuple[int, int]]]] = {
    # What a text adds to the waits and launches of its chunk, for any tokenizer or for some.
    "nothing": ("plain", {}),
    "too long to merge": ("zq" * LONGEST, {"": (0, 1)}),
    "many pre-tokens": ("\n1" * 20_000, {"": (1, 2)}),
    "not in NFC": ("e\u0301 " * 9, {"shipped": (7, 45), "qwen2.5-instruct": (7, 45), "qwen3": (7, 45)}),
    "not NFC by kernels": ("l\u0304\u0323", {"shipped": (7, 43), "qwen2.5-instruct": (7, 43), "qwen3": (7, 43)}),
}
OTHERS = {"deepseek-v3": (2, 16), "smollm": (1, 9), "olmo2-dolma2": (1, 7), "gemma3": (2, 13)}
"""What tokenizers add that need passes before tiles."""


def counted(tokenizer: CompiledTokenizer, texts: list[str], **options: Any) -> tuple[int, int]:
    """Return how often the host waits to encode texts, and how many operations it launches."""
    kernels, raw = StrictKernels(), [text.encode() for text in texts]
    encoder = DeviceEncoder(kernels, tokenizer, **options)
    data, offsets = map(kernels.xp.asarray, (np.frombuffer(b"".join(raw), np.uint8), np.cumsum([0, *map(len, raw)])))
    kernels.xp.waits = kernels.xp.launches = 0
    encoder.encode(data, offsets)
    return kernels.xp.waits, kernels.xp.launches


def test_texts_that_may_not_be_in_nfc_are_encoded_by_themselves(shipped: Pair) -> None:
    """A text in NFC goes through the passes of others only if it may not be: what they read does not grow with it."""

    class Counting(StrictKernels):
        read = 0

        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            if name == "write_nfc":
                Counting.read += int(arguments[1])
            super()._launch(name, blocks, arguments)

    few = ["e\u0301 x", "\u212b"]
    raw = [text.encode() for text in [*COMMON, few[0], *COMMON, few[1], *COMMON]]
    kernels = Counting()
    data, offsets = map(kernels.xp.asarray, (np.frombuffer(b"".join(raw), np.uint8), np.cumsum([0, *map(len, raw)])))
    ids, fallback = DeviceEncoder(kernels, shipped[0]).encode(data, offsets)
    assert not fallback.any()
    assert Counting.read == sum(len(text.encode()) for text in few)
    assert ids.to_host().to_lists() == [shipped[1].encode(one.decode(), add_special_tokens=False).ids for one in raw]


@pytest.mark.parametrize("what", RARE)
def test_waits_and_launches_of_a_chunk(pairs: dict[str, Pair], what: str) -> None:
    """Two and twelve; a few more for tokenizers that need other passes, and for rare texts."""
    text, rare = RARE[what]
    for name, (tokenizer, _) in pairs.items():
        more = OTHERS.get(name, (0, 0))
        others = rare.get(name, rare.get("", (0, 0)))
        waits, launches = counted(tokenizer, [*COMMON, text])
        print(f"{name}, {what}: {waits} waits, {launches} launches")
        assert waits <= 2 + more[0] + others[0], name
        assert launches <= 12 + more[1] + others[1], name
        assert not (name in BY_TILES and what == "nothing") or waits == 2


def test_waits_and_launches_of_many_chunks(shipped: Pair) -> None:
    """One wait more, which finds where chunks begin."""
    waits, launches = counted(shipped[0], COMMON * 20, chunk_bytes=len(COMMON[1].encode()))
    print(f"20 chunks: {waits} waits, {launches} launches")
    assert waits <= 2 * 20 + 1
    assert launches <= 12 * 20 + 20


TEXTS = [
    "",
    "The cat",
    "",
    "",
    "é<|im_end|>l\u0304\u0323 x",
    "中文" * 100,
    " ",
    "\n\n",
    "x" * (LONGEST + 1),
    "it's 42",
    "",
    "zq" * 40,
    "e\u0301<|im_end|>\u0301\u0958",
]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 999, 1 << 40])
def test_chunks_of_any_size(shipped: Pair, size: int) -> None:
    assert check(shipped, TEXTS, chunk_bytes=size) == [TEXTS[4], TEXTS[8]]
    assert check(shipped, [""] * 5, chunk_bytes=size) == []
    assert check(shipped, [], chunk_bytes=size) == []


def test_texts_that_are_too_long(shipped: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fall back, in any position; their neighbours do not."""
    monkeypatch.setattr(encoding, "LONGEST_TEXT", 11)
    for texts in (["twelve bytes"], ["twelve bytes", "eleven byte"] * 3, ["a", *["twelve bytes"] * 3, "", "b"]):
        for size in (1, 5, 12, 30, 1 << 20):
            assert check(shipped, texts, chunk_bytes=size) == ["twelve bytes"] * texts.count("twelve bytes")


@exhaustive
def test_a_megabyte_of_one_thing(pairs: dict[str, Pair]) -> None:
    """The ids are right, or the text falls back."""
    for name in pairs.keys() & {"shipped", "gpt-oss", "gemma3"}:
        for unit in ("a", " ", "\n", "1", "ab "):
            text = unit * (1_000_000 // len(unit))
            assert check(pairs[name], ["first", text, "last"]) in ([], [text])
            assert check(pairs[name], ["first", text[:1000], "last"]) == []


def test_memory_is_bounded_by_the_chunk(shipped: Pair, gsm8k: str) -> None:
    """In addition to the ids, it needs a multiple of the chunk, however much text there is."""
    raw = [conversation(messages).encode() for messages in pq.read_table(gsm8k)["prompt"].to_pylist()] * 4
    data, offsets = np.frombuffer(b"".join(raw), np.uint8), np.cumsum([0, *map(len, raw)])
    chunk = 1 << 17
    assert len(data) > 12 * chunk
    encoder = DeviceEncoder(KERNELS, shipped[0], chunk)
    tracemalloc.start()
    ids, _ = encoder.encode(data, offsets)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The ids of chunks are joined, and have room for more than there are: here a third.
    assert peak - 2.4 * ids.nbytes < 12 * chunk
