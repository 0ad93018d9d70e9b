"""What tests of pieces share: kernels whose fresh memory is poisoned, tokenizers real and made up, pieces as text."""

from __future__ import annotations

import itertools
import types
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from gpuload.engines.device.pretokenize import PieceMaker, Pieces
from gpuload.testing.host_kernels import HostKernels
from gpuload.tokenizer import fallback
from gpuload.tokenizer.compiled import CompiledTokenizer, Section
from gpuload.tokenizer.spec import AddedToken, BpeSpec, Digits, Split, bpe_spec
from gpuload.tokenizer.splitter import Splitter, compile_splitter


@dataclass
class Case:
    """A tokenizer's tables, what cuts by them, and the real one."""

    twin: CompiledTokenizer
    maker: PieceMaker
    backend: Any = None


class Poisoned(HostKernels):
    """Memory that nobody has written holds no zeros by luck."""

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


@cache
def _splitter(stages: tuple[Split | Digits, ...]) -> Splitter:
    return compile_splitter(stages)


def case(spec: BpeSpec | str, backend: Any = None) -> Case:
    """Without the tables that only merging needs."""
    assert isinstance(spec, BpeSpec), spec
    tables: Any = None
    if spec.fallback:
        # Those of made-up tokenizers are not kept.
        tables = (fallback.fallback_tables if len(spec.vocab) > 1000 else fallback.build_tables)(spec)
    twin = CompiledTokenizer(spec, _splitter(spec.stages), tables)
    return Case(twin, PieceMaker(KERNELS, twin), backend)


def compiled(backend: Tokenizer) -> Case:
    return case(bpe_spec(backend.to_str()), backend)


def made_up(*stages: Split | Digits, added: tuple[AddedToken, ...] = (), prefix_space: bool = False) -> Case:
    return case(BpeSpec(False, stages, prefix_space, {}, [], False, added, ""))


def run(maker: PieceMaker, texts: list[str]) -> Pieces:
    encoded = [text.encode() for text in texts]
    return maker.pieces(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)], dtype=np.int64))


def read(found: Pieces) -> list[list[Section] | None]:
    """The pieces of every text, as `twin.cut` gives them."""
    data, bounds = found.data.tobytes(), found.first.tolist()
    spans = zip(found.start.tolist(), found.length.tolist(), strict=True)
    pieces = [~length if length < 0 else data[start : start + length].decode() for start, length in spans]
    assert bounds[0] == 0
    assert bounds[-1] == len(pieces)
    texts = [pieces[low:high] for low, high in itertools.pairwise(bounds)]
    assert not any(text for text, left in zip(texts, found.left, strict=True) if left)
    return [None if left else text for text, left in zip(texts, found.left, strict=True)]
