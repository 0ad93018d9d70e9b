"""Tiles of text on host kernels: their borders, their order, and which tokenizers need nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from pieces_cases import NO_WORDS, Case, Poisoned, made_up, pre_tokens, read
from simulator.encoder import cut, split
from simulator.host_kernels import COMPILER
from simulator.races import RacingKernels
from test_device_pieces import EVERY, cases, check, shipped

from gpuload.engines.device.pretokenize import PreTokenizer
from gpuload.tokenizer.added_tokens import can_overlap
from gpuload.tokenizer.spec import AddedToken, Split
from gpuload.tokenizer.splitter import leaves_gaps

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

__all__ = ["cases", "shipped"]  # fixtures

BY_TILES = {"shipped", "qwen2.5-instruct", "qwen3", "llama3.1-instruct", "gpt-oss", "mistral-nemo", "gpt2"}


def test_most_tokenizers_need_no_passes_before_tiles(cases: dict[str, Case]) -> None:
    assert {name for name, one in cases.items() if one.pretokenizer.by_tiles} == BY_TILES & cases.keys()


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("most_blocks", [1, 2, 1000])
def test_any_order_of_tiles(shipped: Case, seed: int, most_blocks: int) -> None:
    """Tiles wait for those before: for their counts, and for the ends of matches where there is no restart nearby."""

    class Limited(Poisoned):
        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            super()._launch(name, min(blocks, most_blocks), arguments)

    kernels = Limited()
    kernels.seed, kernels.segment = seed, 1
    texts = ["", "It's a b" * 99, "x" * 700, " " * 400 + "y", "<|im_start|>" * 50, "é" * 333, "", "a\n" * 200]
    encoded = [text.encode() for text in texts]
    pretokenizer = PreTokenizer(kernels, shipped.tokenizer, NO_WORDS)
    falls_back = np.zeros(len(texts), bool)
    data, offsets = np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)])
    found = read((pre_tokens(pretokenizer, data, offsets, 0, falls_back), falls_back))
    assert found == [cut(shipped.tokenizer, text) for text in texts]


def test_threads_do_not_race_in_shared_memory(shipped: Case) -> None:
    texts = ["", "<|im_start|>user\nIt's e\u0301 a<|im_end|>\n" * 9, "x" * 300, "é<|im_end|><|im_end|>", "a\u0301"]
    kernels = RacingKernels()
    kernels.segment = 1
    for some in (texts[:1] + texts[2:4], texts):  # in NFC, and not
        raw = b"".join(text.encode() for text in some)
        data, offsets = np.frombuffer(raw, np.uint8), np.cumsum([0, *(len(text.encode()) for text in some)])
        falls_back = np.zeros(len(some), bool)
        pretokenizer = PreTokenizer(kernels, shipped.tokenizer, NO_WORDS)
        found = read((pre_tokens(pretokenizer, data, offsets, 0, falls_back), falls_back))
        assert found == [cut(shipped.tokenizer, text) for text in some]


def test_borders_of_tiles_anywhere(cases: dict[str, Case]) -> None:
    """In a code point, in an added token, in runs of one class shorter and longer than what a tile sees around it, and
    in tokens and texts that begin or end at a border."""
    for name in BY_TILES & cases.keys():
        one = cases[name]
        token = max((token.content for token in one.tokenizer.spec.added), key=len)
        units = ["🙂你é", token, token[:-1], "a" * 90, " " * 61 + "b", "1" * 140, "\n" * 66, f"x{token}y", "'ll" * 40]
        for shift in range(0, 260, 3):
            check(one, ["z " * (shift // 2) + "-" * (shift % 2) + "".join(units), units[shift % 9]], 1)


def test_whether_a_stage_leaves_gaps(cases: dict[str, Case]) -> None:
    """By brute force, with every sequence of up to three classes that texts can contain."""
    cases = cases | {"gaps": made_up(Split(r"\p{N}+")), "none": made_up(Split(r"\p{N}+|\P{N}"))}
    for name, one in cases.items():
        classes = one.tokenizer.splitter.classes
        used = sorted({*classes.of(np.array([*map(ord, EVERY)])).tolist()})
        for stage in one.tokenizer.splitter.stages:
            strings = [[*s] for length in (1, 2, 3) for s in itertools.product(used, repeat=length)]
            table = stage.table.tolist()
            gaps = any(split(table, "gaps", string, 0, len(string)) for string in strings)
            assert leaves_gaps(stage, classes) == gaps, name


@pytest.mark.parametrize(("contents", "overlap"), [
    (["<a>", "<b>"], False), (["<a>", "<a"], False), (["<a>", "><"], True), (["aba"], True), (["aa"], True),
    (["<a>", "a"], True), (["xabcy", "bc"], True), (["xabcy", "bd"], False), (["ab", "bc"], True), ([], False),
    (["é", "\u0169"], False), (["a"], False),
])  # fmt: skip
def test_tokens_that_can_overlap(contents: list[str], overlap: bool) -> None:
    assert can_overlap([AddedToken(text, 0, False, False, False) for text in contents]) == overlap
