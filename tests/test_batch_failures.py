"""What becomes of batches and loaders when a device fails after the load: the error says what to do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
import torch
from simulator import engine_on, load_chats_with, load_with
from simulator.host_kernels import COMPILER, HostKernels

import gpuload
from gpuload.core.errors import ContextLostError, DeviceError, PromptTooLongError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

OPTIONS: dict[str, Any] = {"max_prompt_length": 512, "max_samples": 40}
FAULT = RuntimeError("CUDA error: an illegal memory access was encountered")
ERRORS = [
    (FAULT, None, DeviceError, r"cpu failed while making a batch \(RuntimeError: CUDA error.*GPULOAD_SYNC=1"),
    (FAULT, "cudaErrorIllegalAddress", ContextLostError, "context lost: cpu failed .*IllegalAddress.*again"),
    (MemoryError("std::bad_alloc"), None, DeviceError, "out of GPU memory while making a batch .*bad_alloc.*smaller"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), None, DeviceError, r"out of GPU .*: CUDA out of memory\. T"),
    (TypeError("of a program"), None, TypeError, "^of a program$"),
]


class Breaking(HostKernels):
    """Kernels of a device that breaks when it is told to.

    Attributes:
        broken: the error of what is named in `where`, kernels or methods.
        gone: what a probe of the context says afterwards.
    """

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.where: tuple[str, ...] = ()
        self.gone: str | None = None

    def breaks(self, error: Exception | None, gone: str | None, *where: str) -> None:
        self.broken, self.gone, self.where = error, gone, where

    def _fail(self, name: str) -> None:
        if self.broken is not None and name in self.where:
            raise self.broken

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        self._fail(name)
        super()._launch(name, blocks, arguments)

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._fail("aside")
        yield

    def rejoin(self) -> None:
        self._fail("rejoin")

    def pinned(self, array: Any) -> int:
        self._fail("pinned")
        return super().pinned(array)

    def lost(self) -> str | None:
        return self.gone if self.broken is not None else None


@pytest.mark.parametrize(("error", "gone", "kind", "message"), ERRORS)
@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_a_batch_that_fails_says_what_to_do(
    gsm8k: str, qwen: Any, tmp_path: Any, where: str, error: Exception, gone: str | None, kind: Any, message: str
) -> None:
    kernels = Breaking()
    more = {"store": "disk", "cache_dir": str(tmp_path)} if where == "disk" else {"tokens_on": where}
    found = load_with(engine_on(kernels), gsm8k, qwen, **OPTIONS, **more)
    expected = found.batch([3, 1])["input_ids"].tolist()
    kernels.breaks(error, gone, "pad")
    with pytest.raises(kind, match=message) as raised:
        found.batch([3, 1])
    assert type(raised.value) is kind
    kernels.breaks(None, None)
    assert found.batch([3, 1])["input_ids"].tolist() == expected


@pytest.mark.parametrize(("error", "gone", "kind", "message"), ERRORS)
def test_so_does_a_pack(qwen: Any, error: Exception, gone: str | None, kind: Any, message: str) -> None:
    kernels = Breaking()
    chats = load_chats_with(kernels, pa.table({"text": ["one two three"] * 9}), qwen)
    loader = chats.loader(batch_size=1, packing="bfd", pack_length=16)
    kernels.breaks(error, gone, "pack")
    with pytest.raises(kind, match=message):
        next(iter(loader))


@pytest.mark.parametrize("place", ["pad", "aside", "rejoin", "pinned"])
@pytest.mark.parametrize("gone", [None, "cudaErrorAssert"])
def test_a_loader_that_fails_goes_on_from_its_state(gsm8k: str, qwen: Any, place: str, gone: str | None) -> None:
    kernels = Breaking()
    found = load_with(engine_on(kernels), gsm8k, qwen, tokens_on="host", **OPTIONS)
    expected = [batch["input_ids"].tolist() for batch in gpuload.load(gsm8k, qwen, device="cpu", **OPTIONS).loader(8)]
    loader, seen = found.loader(8), list[Any]()
    batches = iter(loader)
    if place != "pinned":  # that is done once
        seen.append(next(batches)["input_ids"].tolist())
    kernels.breaks(FAULT, gone, place)
    with pytest.raises(ContextLostError if gone else DeviceError, match="context lost" if gone else "GPULOAD_SYNC=1"):
        next(batches)
    kernels.breaks(None, None)
    loader.load_state_dict(loader.state_dict())
    assert seen + [batch["input_ids"].tolist() for batch in loader] == expected


def test_ids_that_are_read_after_the_load(gsm8k: str, qwen: Any) -> None:
    kernels = Breaking()
    found = load_with(engine_on(kernels), gsm8k, qwen, tokens_on="device", **OPTIONS)
    batch = found.batch([0, 1])
    for error, gone, kind, message in ERRORS:
        kernels.breaks(error, gone, "copy_pieces")
        wanted = message.replace("making a batch", "reading token ids")
        for read in (lambda: batch["raw_prompt_ids"], lambda: found.tokens):
            with pytest.raises(kind, match=wanted):
                read()


def test_what_is_wrong_with_rows_is_said_as_before(gsm8k: str, qwen: Any) -> None:
    found = load_with(
        engine_on(HostKernels()), gsm8k, qwen, max_prompt_length=60, max_samples=40, filter_overlong_prompts=False
    )
    with pytest.raises(PromptTooLongError, match="exceeds max_prompt_length=60"):
        list(found.loader(8))
    with pytest.raises(IndexError):
        found.batch([99])


def test_a_batch_that_fails_gives_its_memory_back(gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a smaller one may be made while the error is handled."""
    kernels, held = Breaking(), list[Any]()
    found = load_with(engine_on(kernels), gsm8k, qwen, **OPTIONS)
    tensor = kernels.tensor

    def noting(*shape: int) -> Any:
        made, array = tensor(*shape)
        held.append(weakref.ref(made))
        return made, array

    monkeypatch.setattr(kernels, "tensor", noting)
    kernels.breaks(MemoryError("std::bad_alloc"), None, "pad")
    gc.disable()
    try:
        found.batch([0, 1])
    except DeviceError:
        assert [one() for one in held] == [None]
    else:
        pytest.fail("the kernel did not fail")
    finally:
        gc.enable()
