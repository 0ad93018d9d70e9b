"""Every setting of a tokenizer: the ids of the host's encoder and of the kernels are those of `tokenizers`."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from encoder_variants import VARIANTS, texts
from simulator.encoder import cut
from simulator.host_kernels import COMPILER, HostKernels
from tiers import core
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from gpuload.engines.device.encode import DeviceEncoder
from gpuload.engines.host.encode import host_encoder
from gpuload.reference.reference import Reference
from gpuload.tokenizer import fallback, merges
from gpuload.tokenizer.compiled import CompiledTokenizer
from gpuload.tokenizer.regex import UnsupportedRegexError
from gpuload.tokenizer.spec import bpe_spec
from gpuload.tokenizer.splitter import compile_splitter

BY_GIGATOKEN = {
    "shipped", "lstrip", "rstrip", "both sides", "normalized", "not normalized", "normalized without normalizer",
    "white space", "overlaps", "all flags", "no normalizer", "NFC twice", "only matches", "ByteLevel",
    "ByteLevel, prefix",
    *(f"regex {number}" for number in range(8)), "DeepSeek", "ignore_merges", "subword prefix", "Llama 2", "Gemma",
    *(f"Metaspace {scheme} {split}" for scheme in ("always", "first", "never") for split in (True, False)),
}  # fmt: skip

BY_WORDS = {
    "shipped", "not normalized", "white space", "overlaps", "overlaps of both passes", "no normalizer", "NFC twice",
    "only matches", "ByteLevel", *(f"regex {number}" for number in range(8)), "no entry for a byte", "unknown",
    "unknown, fused", "subword prefix",
}  # fmt: skip


def check(name: str, count: int) -> None:
    backend = VARIANTS[name]()
    # transformers 4 changes the pre-tokenizer to what this argument says.
    prefix = (json.loads(backend.to_str())["pre_tokenizer"] or {}).get("add_prefix_space", False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, add_prefix_space=prefix)
    contents = [token.content for token in backend.get_added_tokens_decoder().values()]
    some = texts(len(name), count, contents)
    expected = [one.ids for one in backend.encode_batch_fast(some, add_special_tokens=False)]
    encoder = host_encoder(Reference(tokenizer, chat_template=None))
    same(some, encoder.encode(pa.array(some, pa.large_string())).to_lists(), expected)
    assert encoder.name.startswith("gigatoken") == (name in BY_GIGATOKEN), encoder
    few = host_encoder(Reference(tokenizer, chat_template=None), 0)
    same(some, few.encode(pa.array(some, pa.large_string())).to_lists(), expected)
    assert few.name.endswith("each different word once") == (name in BY_WORDS), few
    check_kernels(backend, some, expected)


def same(some: list[str], found: list[list[int]], expected: list[list[int]]) -> None:
    wrong = [(t, a, b) for t, a, b in zip(some, found, expected, strict=True) if a != b]
    assert not wrong, (len(wrong), min(wrong, key=lambda one: len(one[0])))


def check_kernels(backend: Tokenizer, some: list[str], expected: list[list[int]]) -> None:
    spec = bpe_spec(backend.to_str())
    if isinstance(spec, str) or COMPILER is None:
        return
    try:
        splitter = compile_splitter(spec.stages)
    except UnsupportedRegexError:
        return
    # Not cached: these tokenizers are made up.
    tables: Any = (fallback if spec.fallback else merges).build_tables(spec)
    tokenizer = CompiledTokenizer(spec, splitter, tables)
    raw = [text.encode() for text in some]
    data = np.frombuffer(b"".join(raw), np.uint8)
    ids, falls_back = DeviceEncoder(HostKernels(), tokenizer).encode(data, np.cumsum([0, *map(len, raw)]))
    same(
        some,
        [row if not skip else ids for row, skip, ids in zip(ids.to_lists(), falls_back, expected, strict=True)],
        expected,
    )
    # Only texts fall back that the reference encoder does not normalize either.
    assert falls_back.tolist() == [cut(tokenizer, text) is None for text in some]


@pytest.mark.parametrize("name", core(VARIANTS, *list(VARIANTS)[::6]))
def test_variant(name: str) -> None:
    check(name, 200)


@pytest.mark.exact
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_fully(name: str, record_property: Any) -> None:
    check(name, 2000)
    record_property("variants of tokenizers", (2000, 0))
