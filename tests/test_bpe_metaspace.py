"""BPE with byte fallback and Metaspace, as transformers loads Llama 2 and Yi, compared with `tokenizers`."""

import json
from itertools import product

import pytest
import transformers
from bpe_cases import made_up_merges
from hypothesis import given
from hypothesis import strategies as st
from simulator.host_kernels import COMPILER
from test_bpe_fallback import Pair, check, compiled, small
from test_device_encode import check as check_kernels
from tiers import examples
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import Metaspace, Sequence, WhitespaceSplit
from transformers import LlamaTokenizer

from gpuload.tokenizer.spec import BpeSpec, Fallback, bpe_spec

MERGES = [("▁", "a"), ("b", "▁"), ("▁", "▁"), ("▁a", "b"), ("a", "b"), ("▁", "ab"), ("b▁", "a"), ("é", "▁")]
WAYS = list(product(["always", "first", "never"], [True, False]))
FLAGS = ["", "lstrip", "rstrip", "normalized", "special"]
PIECES = ["a", "b", "é", "你", "𒀀", " ", "  ", "▁", "\n", "\u3000", "<n>", "<lstrip>", "<rstrip>", "<normalized>"]
TEXTS = [
    "", " ", "▁", "a", " a", "▁a", "  a", "a b  ab", "ab▁ab", "▁▁a▁", " ▁ a", "<n>a<n> <n>b", " <lstrip>a",
    "<lstrip>▁a", "<rstrip> a", "<rstrip>  ", "a <lstrip> <rstrip> a", "<normalized>a <normalized> a",
    "<special>a", "𒀀 a", "\na",
]  # fmt: skip


def metaspace(
    scheme: str, split: bool, merges: list[tuple[str, str]] | None = None, replacement: str = "▁"
) -> Tokenizer:
    letters = "abcdé你" + replacement
    backend = small(MERGES if merges is None else merges, letters=letters)
    backend.normalizer = None
    backend.pre_tokenizer = Metaspace(replacement, scheme, split)
    backend.add_tokens([AddedToken("<n>", normalized=False)])
    for flag in FLAGS[1:]:
        backend.add_tokens([AddedToken(f"<{flag}>", **{"normalized": False, flag: True})])
    return backend


def check_both(pair: Pair, texts: list[str]) -> None:
    check(pair, texts)
    if COMPILER is not None:
        assert check_kernels(pair, texts) == []


@pytest.mark.parametrize(("scheme", "split"), WAYS)
def test_prefixes_and_added_tokens(scheme: str, split: bool) -> None:
    pair = compiled(metaspace(scheme, split))
    assert pair[0].spec.fallback == Fallback("" if scheme == "never" else "▁", "▁", True, scheme == "first", split)
    check_both(pair, [*TEXTS, *("".join(some) for some in product(PIECES, repeat=2))])


@examples(60)
@given(
    st.sampled_from(WAYS),
    made_up_merges("abcdé你▁"),
    st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), min_size=1, max_size=30),
)
def test_any_text(way: tuple[str, bool], merges: list[tuple[str, str]], texts: list[str]) -> None:
    check_both(compiled(metaspace(*way, merges)), texts)


@pytest.mark.parametrize("replacement", ["_", "é"])
def test_another_replacement(replacement: str) -> None:
    merges = [(a.replace("▁", replacement), b.replace("▁", replacement)) for a, b in MERGES[:6]]
    for way in WAYS:
        check_both(compiled(metaspace(*way, merges, replacement)), [text.replace("▁", replacement) for text in TEXTS])


@pytest.mark.parametrize("step", [1, 2, 7])
def test_chunks_of_any_size(step: int) -> None:
    """A prefix is where it belongs, wherever chunks and texts begin."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    for scheme, split in WAYS:
        pair = compiled(metaspace(scheme, split))
        assert check_kernels(pair, TEXTS, chunk_bytes=step) == []


@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 makes no tokenizer of vocabulary and merges")
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("add_prefix_space", [True, False])
def test_what_transformers_makes(legacy: bool, add_prefix_space: bool) -> None:

    parts = json.loads(small(MERGES).to_str())["model"]
    merges = [tuple(pair) for pair in parts["merges"]]
    tokenizer = LlamaTokenizer(parts["vocab"], merges, legacy=legacy, add_prefix_space=add_prefix_space)
    tokenizer.add_tokens(["<n>"])  # normalized
    backend = tokenizer.backend_tokenizer
    spec = bpe_spec(backend.to_str())
    assert isinstance(spec, BpeSpec), spec
    assert spec.fallback
    assert spec.fallback.first_only == (add_prefix_space and not legacy)
    check_both(compiled(backend), [*TEXTS, "<s>a</s> b", "</s> a<n> a"])


def test_rejections() -> None:
    for pre in (Sequence([WhitespaceSplit(), Metaspace()]), Sequence([Metaspace(), Metaspace()])):
        backend = metaspace("always", True)
        backend.pre_tokenizer = pre
        assert "with byte fallback is not supported" in str(bpe_spec(backend.to_str()))
    normalizes = small(MERGES)
    normalizes.pre_tokenizer = Metaspace()
    assert "the pre-tokenizer Metaspace with byte fallback is not supported" in str(bpe_spec(normalizes.to_str()))
