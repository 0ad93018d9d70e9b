"""Shared by the tests of pre-tokens: kernels with poisoned memory, real and made-up tokenizers, results as text."""

from __future__ import annotations

import itertools
import types
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from simulator.encoder import Section
from simulator.host_kernels import HostKernels
from tokenizers import Tokenizer

from gpuload.engines.device.pretokenize import STEP, PreTokenizer, PreTokens, Words
from gpuload.tokenizer import fallback
from gpuload.tokenizer.compiled import CompiledTokenizer
from gpuload.tokenizer.hash_tables import EMPTY
from gpuload.tokenizer.spec import AddedToken, BpeSpec, Digits, Split, bpe_spec
from gpuload.tokenizer.splitter import Splitter, compile_splitter


@dataclass
class Case:
    """A compiled tokenizer, its device pre-tokenizer, and the real tokenizer."""

    tokenizer: CompiledTokenizer
    pretokenizer: PreTokenizer
    backend: Any = None


class Poisoned(HostKernels):
    """Host kernels whose uninitialized memory is filled with garbage, so that no test passes because of zeros."""

    xp = types.ModuleType("numpy")


def _poisoned(make: Any) -> Any:
    def filled(*arguments: Any) -> Any:
        array = make(*arguments)
        array.view(np.uint8).fill(0xAB)
        return array

    return filled


Poisoned.xp.__dict__.update(np.__dict__)
Poisoned.xp.__dict__.update(empty=_poisoned(np.empty), empty_like=_poisoned(np.empty_like))
KERNELS = Poisoned()
NO_WORDS: Words = (
    np.zeros((1, 4), np.uint64), 0, np.full(1, EMPTY), 0, np.zeros(0, np.uint8), np.zeros(1, np.int32),
    np.zeros(0, np.int32), 0,
)  # fmt: skip
"""An empty vocabulary: all pre-tokens are to be merged, and so listed with their positions."""

Listed = tuple[PreTokens, Any]  # and (n,) bool, which texts fall back


@cache
def _splitter(stages: tuple[Split | Digits, ...]) -> Splitter:
    return compile_splitter(stages)


def case(spec: BpeSpec | str, backend: Any = None) -> Case:
    """Compile a tokenizer without the tables that only merging needs."""
    assert isinstance(spec, BpeSpec), spec
    tables: Any = None
    if spec.fallback:
        # Tables of made-up tokenizers are not cached.
        tables = (fallback.fallback_tables if len(spec.vocab) > 1000 else fallback.build_tables)(spec)
    tokenizer = CompiledTokenizer(spec, _splitter(spec.stages), tables)
    return Case(tokenizer, PreTokenizer(KERNELS, tokenizer, NO_WORDS), backend)


def compiled(backend: Tokenizer) -> Case:
    return case(bpe_spec(backend.to_str()), backend)


def made_up(*stages: Split | Digits, added: tuple[AddedToken, ...] = (), prefix_space: bool = False) -> Case:
    return case(BpeSpec(False, stages, prefix_space, {}, [], False, added, ""))


def run(pretokenizer: PreTokenizer, texts: list[str]) -> Listed:
    """Split texts. Small steps come with small tiles."""
    KERNELS.segment = 1 if pretokenizer.step < STEP else Poisoned.segment
    encoded = [text.encode() for text in texts]
    offsets, falls_back = np.cumsum([0, *map(len, encoded)], dtype=np.int64), np.zeros(len(texts), bool)
    return pre_tokens(pretokenizer, np.frombuffer(b"".join(encoded), np.uint8), offsets, 0, falls_back), falls_back


def pre_tokens(pretokenizer: PreTokenizer, data: Any, offsets: Any, base: int, falls_back: Any) -> PreTokens:
    """Split all texts exactly: in passes if any may not be in NFC. Tiles must not leave out one that is not."""
    found = pretokenizer.pre_tokens(data, offsets, base, falls_back)
    if found.normal:
        return found
    suspect, falls_back[:] = falls_back.copy(), False
    exact = pretokenizer.by_passes(data, offsets, base, falls_back)
    of_tiles, of_passes = (read((one, np.zeros(len(suspect), bool))) for one in (found, exact))
    for one, other, left_out, refused in zip(of_tiles, of_passes, suspect, falls_back, strict=True):
        assert left_out or (one == other and not refused)
    return exact


def read(listed: Listed) -> list[list[Section] | None]:
    """Return the pre-tokens of every text, as `encoder.cut` does."""
    found, fallback = listed
    data, bounds = found.data.tobytes(), found.first.tolist()
    spans = [
        data[start : start + size] for start, size in zip(found.start.tolist(), found.length.tolist(), strict=True)
    ]
    pieces: list[Section] = [one if one >= 0 else spans[~one].decode() for one in found.known.tolist()]
    assert sorted(~one for one in found.known.tolist() if one < 0) == [*range(len(spans))]
    assert bounds[0] == 0
    assert bounds[-1] == len(pieces)
    texts = [pieces[low:high] for low, high in itertools.pairwise(bounds)]
    assert not any(text for text, falls_back in zip(texts, fallback, strict=True) if falls_back)
    return [None if falls_back else text for text, falls_back in zip(texts, fallback, strict=True)]
