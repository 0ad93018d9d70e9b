"""The self-test of an engine says which stage works, and notices one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import torch
from simulator.host_kernels import COMPILER, HostKernels

from gpuload.cli.selftest import STAGES, check_engine
from gpuload.core.arrays import Ragged
from gpuload.engines.batches import BatchLayout
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import Tokenized
from gpuload.reference.reference import Reference


def on_cpu(reference: Reference) -> HostEngine:
    return HostEngine(reference)


def on_device(reference: Reference) -> DeviceEngine:
    return DeviceEngine(HostKernels(), torch.device("cpu"), reference)


@pytest.mark.parametrize("build", [
    on_cpu, pytest.param(on_device, marks=pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")),
])  # fmt: skip
def test_an_engine_that_works(build: Callable[..., Any]) -> None:
    outcome = check_engine(build)
    assert outcome.failure is None
    assert tuple(outcome.seconds) == STAGES
    assert all(seconds > 0 for seconds in outcome.seconds.values())
    assert "chat template compiled" in outcome.description


def shifted(column: pa.Array) -> pa.Array:
    """The texts, each a row too late."""
    return pa.concat_arrays([column[-1:], column[:-1]])


def wrong_render(engine: HostEngine, prompts: Any) -> HostText:
    rendered = HostEngine.render(engine, prompts)
    rendered.text = shifted(rendered.text)
    return rendered


def wrong_encode(engine: HostEngine, rendered: HostText) -> Tokenized:
    tokens = HostEngine.encode(engine, rendered)
    tokens.ids = Ragged(tokens.ids.values ^ 1, tokens.ids.offsets)
    return tokens


def wrong_batches(engine: HostEngine, store: Ragged, layout: BatchLayout, pad_id: int) -> Any:
    right = HostEngine.batches(store, layout, pad_id)

    def batch(*given: Any) -> dict[str, torch.Tensor]:
        made = right(*given)
        made["position_ids"][-1, -1] += 1
        return made

    return batch


@pytest.mark.parametrize(("stage", "method", "what"), [
    ("render", wrong_render, "texts"), ("encode", wrong_encode, "ids"), ("batch", wrong_batches, "batches"),
])  # fmt: skip
def test_wrong_answers_are_noticed(stage: str, method: Callable[..., Any], what: str) -> None:
    name = {"batch": "batches"}.get(stage, stage)
    broken = type("Broken", (HostEngine,), {name: method})
    outcome = check_engine(broken)
    assert outcome.failure is not None
    assert outcome.failure[0] == stage
    assert outcome.failure[1].startswith(f"MismatchError: wrong {what} ")
    assert tuple(outcome.seconds) == STAGES[: STAGES.index(stage)]


def test_what_an_engine_raises_is_the_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def build(reference: Reference) -> HostEngine:
        raise RuntimeError("CUDA error 999\nand a long story")

    assert check_engine(build).failure == ("prepare", "RuntimeError: CUDA error 999")
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "file"))  # nothing can be unpacked there
    failure = check_engine(on_cpu).failure
    assert failure is not None
    assert failure[0] == "prepare"
    assert "Not a directory" in failure[1]
