"""`gpuload doctor --gpu`: known answers of all kernels, and steps that stop at the first failure."""

from __future__ import annotations

import ast
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from simulator.host_kernels import COMPILER, HostKernels
from tiers import core

import gpuload
from gpuload.cli import known_answers, ladder
from gpuload.cli.main import main
from gpuload.core.errors import MismatchError
from gpuload.engines.conversations import from_arrow
from gpuload.engines.device import cuda, cudf, verdict
from gpuload.engines.device.kernel_source import signatures
from gpuload.engines.device.texts import DeviceTexts
from gpuload.engines.device.verdict import Step, distrust
from gpuload.sources.read import one_array, one_column

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


class Watched(HostKernels):
    """Kernels of the host that note which are launched, and skip one."""

    def __init__(self, skipped: str = "") -> None:
        self.launched: set[str] = set()
        self.skipped = skipped

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        self.launched.add(name)
        if name != self.skipped:
            super()._launch(name, blocks, arguments)


@needs_compiler
def test_every_kernel_has_a_known_answer() -> None:
    kernels = Watched()
    assert [(name, wrong) for name, wrong in known_answers.wrong_answers(kernels) if wrong] == []
    assert kernels.launched == set(signatures())


@needs_compiler
@pytest.mark.parametrize("kernel", core(sorted(signatures()), "common_ids", "find", "merge_long", "pack", "split"))
def test_a_kernel_that_does_nothing_is_noticed(kernel: str) -> None:
    """In a process of its own: the numbers that are missing are addresses and sizes of other kernels."""
    known_answers._chat_tokenizer()
    process = os.fork()
    if not process:
        faulthandler.disable()  # it may end by a signal
        signal.alarm(60)
        wrong = any(wrong for _, wrong in known_answers.wrong_answers(Watched(kernel)))
        os._exit(7 if wrong else 0)
    _, status = os.waitpid(process, 0)
    assert status != 0
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 7


def test_functions_of_the_array_module_are_compared() -> None:
    ladder.check_arrays(np)
    ladder.check_copies(np)

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return (lambda array: np.diff(array) + 1) if name == "diff" else getattr(np, name)

    with pytest.raises(ladder.MismatchError, match="diff: wrong results"):
        ladder.check_arrays(Wrong())


def test_every_function_of_the_array_module_that_is_used_is_compared() -> None:
    root, used = Path(gpuload.__file__).parent, set[str]()
    for file in root.rglob("*.py"):
        if "cli" in file.relative_to(root).parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "xp":
                used.add(node.attr)
    called = set[str]()

    class Noting:
        def __getattr__(self, name: str) -> Any:
            called.add(name)
            return getattr(np, name)

    ladder.check_arrays(Noting())
    assert {"cumsum", "repeat", "bincount"} <= used
    others = {"cuda", "ndarray", "__name__", "from_dlpack", "get_default_pinned_memory_pool"}  # in other steps
    assert used - others <= called


@needs_compiler
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", ""),
        ("whole", "different prompts, whole"),
        ("parts", "different prompts, in parts"),
        ("few", "cuDF reads 1 ro"),
    ],
)
def test_rows_that_cudf_read_are_compared_by_their_values(
    monkeypatch: pytest.MonkeyPatch, wrong: str, message: str
) -> None:
    """cuDF says of columns without nulls that they can have none, which makes them another type to Arrow."""
    kernels = HostKernels()

    def not_null(kind: pa.DataType) -> pa.DataType:
        fields = [field.with_type(pa.string()).with_nullable(False) for field in kind.value_type]
        return pa.list_(pa.field("element", pa.struct(fields), nullable=False))

    def part(array: pa.Array) -> Any:
        fetch = lambda rows: array.take(pa.array(rows)).cast(not_null(array.type))  # noqa: E731
        return replace(from_arrow(DeviceTexts(kernels), array), fetch=fetch)

    def whole(source: Any, prompt_key: str) -> Any:
        for column in one_column(source, prompt_key):
            yield part(one_array(column)[wrong == "whole" :])

    def small(kernels: Any, path: str, column: str, *sizes: Any) -> Any:
        array = pq.read_table(path)[column].combine_chunks()
        for low in range(0, 1 if wrong == "few" else len(array), 100):
            yield part(array[low + (wrong == "parts") : low + (1 if wrong == "few" else 100)])

    monkeypatch.setattr(cuda, "reader", lambda *_: whole)
    monkeypatch.setattr(cudf, "chunks", small)
    monkeypatch.setattr(cuda, "without_cudf", lambda: None)
    monkeypatch.setattr(ladder, "_kernels", lambda number: kernels)
    with pytest.raises(MismatchError, match=message) if wrong else nullcontext():
        ladder._cudf(0)


class OfAnotherGpu(HostKernels):
    """Kernels of a GPU that is not the process's current one. Outside of `current`, its memory is another one's."""

    def __init__(self) -> None:
        self.inside, self.outside = 0, list[str]()
        runtime = SimpleNamespace(deviceGetAttribute=lambda *_: 1, memGetInfo=lambda: self.noted("memGetInfo", (1, 2)))
        self.xp = SimpleNamespace(  # type: ignore[assignment]
            cuda=SimpleNamespace(runtime=runtime),
            asarray=lambda *given: self.noted("asarray", np.asarray(*given)),
            empty=np.empty,
            ndarray=np.ndarray,
        )

    def noted(self, name: str, result: Any) -> Any:
        self.outside += [] if self.inside else [name]
        return result

    @contextmanager
    def current(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1

    loading = current

    def pinned(self, array: Any) -> int:
        return int(self.noted("pinned", super().pinned(array)))


@needs_compiler
def test_steps_use_the_memory_of_the_gpu_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = OfAnotherGpu()
    monkeypatch.setattr(ladder, "_kernels", lambda number: kernels)
    monkeypatch.setattr(verdict, "described", lambda number: {"compute_mode": 0})
    ladder._context(1)
    ladder.check_pinned(kernels)
    assert kernels.outside == []


def test_the_ladder_stops_at_the_first_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def run(name: str, number: int, limit: float, wait: bool = False) -> Step:
        asked.append((name, number))
        return Step("a line\nanother", "ended by signal 11, behind: another" if name == "arrays" else "")

    monkeypatch.setattr(verdict, "run_step", run)
    assert main(["doctor", "--gpu", "3"]) == 1
    assert asked == [("machine", 3), ("context", 3), ("arrays", 3)]
    found = capsys.readouterr().out
    assert "context   works" in found
    assert "arrays    FAILED" in found
    assert "    another\n    ended by signal 11, behind: another\n\nPlease report" in found
    monkeypatch.setattr(verdict, "run_step", lambda *_: Step("", ""))
    assert main(["doctor", "--gpu"]) == 0


def test_a_failure_in_a_kernel_is_repeated_with_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, number: int, limit: float, wait: bool = False) -> Step:
        failure = "DeviceError: kernel split failed" if wait else "CUDARuntimeError: cudaErrorIllegalAddress"
        return Step("", failure if name == "kernels" else "")

    monkeypatch.setattr(verdict, "run_step", run)
    assert main(["doctor", "--gpu"]) == 1
    found = capsys.readouterr().out
    assert "    CUDARuntimeError: cudaErrorIllegalAddress\n    with GPULOAD_SYNC=1: DeviceError: kernel split" in found


def test_directories_that_do_not_exist_yet_can_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for place, can in ((tmp_path / "new" / "cache", "can"), (tmp_path / "file" / "cache", "cannot")):
        monkeypatch.setenv("GPULOAD_CACHE", str(place))
        ladder.run_here(lambda: ladder._environment(0))
        assert f"{place}: {can} be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("print('first', flush=True); import time; time.sleep(60)", "stopped after 3 s, behind: first"),
        ("print('first', flush=True); import os; os.abort()", "ended by signal 6, behind: first"),
        ("import sys; print('last words', file=sys.stderr); sys.exit(1)", "last words"),
        ("print('fine')", ""),
    ],
)
def test_a_step_that_hangs_crashes_or_fails(monkeypatch: pytest.MonkeyPatch, code: str, failure: str) -> None:
    asked: list[str] = []
    monkeypatch.setenv("GPULOAD_SYNC", "1")
    monkeypatch.setattr(verdict.subprocess, "Popen", replacing_code(code, asked))
    assert verdict.run_step("kernels", 0, 3 if failure.startswith("stopped") else 60).failure == failure
    assert "main(['doctor', '--gpu', '0', '--gpu-step', 'kernels'])" in asked[0]
    assert asked[1] == "", "a verdict is about the machine code that loads run"


def replacing_code(code: str, asked: list[str]) -> Any:
    """As `subprocess.Popen`, but runs other code. Notes the code it was given, and what is in the environment."""
    popen = subprocess.Popen

    def replaced(command: list[str], **settings: Any) -> Any:
        asked.extend([command[-1], settings["env"]["GPULOAD_SYNC"]])
        return popen([sys.executable, "-c", code], **settings)

    return replaced


def test_a_step_that_cannot_even_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for its driver in the kernel."""
    kill = subprocess.Popen.kill
    spared: list[Any] = []
    monkeypatch.setattr(verdict, "_KILLED", 0.1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: spared.append(self))
    monkeypatch.setattr(verdict.subprocess, "Popen", replacing_code("import time; time.sleep(100)", []))
    try:
        started = time.perf_counter()
        assert verdict.run_step("kernels", 0, 0.5).failure == "stopped after 0 s, behind: nothing was printed"
        assert time.perf_counter() - started < 20
    finally:
        kill(spared[0])
        spared[0].wait()


def test_a_step_imports_what_its_caller_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('the one of sys.path')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "the one of sys.path" in verdict.run_step("machine", 0, 60).failure


@pytest.mark.parametrize(("error", "wrong"), [(MismatchError("1 instead of 2"), True), (MemoryError("full"), False)])
def test_only_wrong_results_are_told_apart(monkeypatch: pytest.MonkeyPatch, error: Exception, wrong: bool) -> None:
    def fail() -> None:
        raise error

    status = ladder.run_here(fail)
    assert (status == verdict.WRONG) == wrong
    monkeypatch.setattr(verdict.subprocess, "Popen", replacing_code(f"import sys; sys.exit({status})", []))
    assert verdict.run_step("kernels", 0, 60).wrong == wrong


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A GPU as `described` describes it, whose verdicts are in a new directory."""
    about = {"gpu": "H", "compute_mode": 0, "driver": 13000, "source": "s"}
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path))
    monkeypatch.setattr(verdict, "described", lambda number: about)
    monkeypatch.setattr(verdict.tempfile, "tempdir", str(tmp_path))
    return about


def counted(monkeypatch: pytest.MonkeyPatch, failure: str, wrong: bool = True) -> list[str]:
    runs: list[str] = []

    def run(name: str, number: int, limit: float) -> Step:
        runs.append(name)
        return Step("", failure, wrong and bool(failure))

    monkeypatch.setattr(verdict, "run_step", run)
    return runs


@pytest.mark.parametrize("failure", ["", "wrong ids"])
def test_a_verdict_serves_later_loads_until_something_changes(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], failure: str
) -> None:
    runs = counted(monkeypatch, failure)
    threads = [threading.Thread(target=distrust, args=(0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = distrust(0)
    assert runs == ["kernels"], "of several loads at once, one asks"
    assert (found is None) == (not failure)
    assert failure in (found or "")
    machine["driver"] = 13010
    distrust(0)
    assert runs == ["kernels"] * 2


def test_of_several_processes_one_asks(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], tmp_path: Path
) -> None:
    """Also where each has a cache of its own: then one after the other."""
    log = tmp_path / "log"

    def run(name: str, number: int, limit: float) -> Step:
        for what in ("begins", "ends"):
            with log.open("a") as file:
                file.write(f"{os.getpid()} {what}\n")
            time.sleep(0.3)
        return Step("", "")

    monkeypatch.setattr(verdict, "run_step", run)
    for own in (False, True):
        log.write_text("")
        children = []
        for rank in range(2):
            if not (child := os.fork()):
                faulthandler.disable()
                signal.alarm(60)
                monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / (f"{rank}" if own else "shared")))
                os._exit(0 if distrust(0) is None else 1)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        lines = [line.split() for line in log.read_text().splitlines()]
        assert [what for _, what in lines] == ["begins", "ends"] * (2 if own else 1)
        assert all(begins[0] == ends[0] for begins, ends in zip(lines[::2], lines[1::2], strict=True))


def test_a_check_without_answers_is_repeated_by_later_processes(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any]
) -> None:
    runs = counted(monkeypatch, "ModuleNotFoundError: No module named 'gpuload'", wrong=False)
    for _ in range(2):
        assert "could not be checked (ModuleNotFoundError" in (distrust(0) or "")
    assert len(runs) == 1, "nor do other ranks that were started with this one wait again"
    with monkeypatch.context() as patch:
        patch.setattr(verdict.platform, "node", lambda: "another machine with the same home directory")
        distrust(0)
    assert len(runs) == 2
    monkeypatch.setattr(verdict, "_STARTED", time.time() + 1)
    counted(monkeypatch, "")
    assert distrust(0) is None


@pytest.mark.parametrize("failure", ["", "3 instead of 4"])
def test_what_was_found_counts_also_where_it_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path) -> Any:
        raise OSError(28, "No space left on device")

    counted(monkeypatch, failure)
    monkeypatch.setattr(verdict, "replacing", full)
    assert ("3 instead of 4" in (distrust(0) or "")) == bool(failure)
    assert "No space left on device" in caplog.text
    monkeypatch.setattr(verdict, "locked", full)
    assert ("3 instead of 4" in (distrust(0) or "")) == bool(failure)


def test_a_step_of_the_command_that_does_not_end_ends_an_earlier_verdict(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any]
) -> None:
    runs = counted(monkeypatch, "")
    assert distrust(0) is None

    def hang(kernels: Any) -> Any:
        assert distrust(0) is None, "processes that begin while a check is running run their own"
        yield "texts", None
        raise SystemExit(9)

    monkeypatch.setattr(known_answers, "wrong_answers", hang)
    monkeypatch.setattr(ladder, "_kernels", lambda number: None)
    with pytest.raises(SystemExit):
        main(["doctor", "--gpu", "0", "--gpu-step", "kernels"])
    assert len(runs) == 2
    verdict.keep(verdict.place_of(machine), "a check did not come to its end", at=0)
    assert distrust(0) is None
    assert len(runs) == 3
    machine["compute_mode"] = 3
    verdict.keep(verdict.place_of(machine), "a check did not come to its end", at=0)
    assert "did not come to its end" in str(distrust(0)), "no second process may ask this GPU"


@pytest.mark.parametrize("wrong", [None, MismatchError("3 instead of 4"), MemoryError("the GPU is full")])
def test_the_step_of_the_command_is_a_verdict_too(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], wrong: Exception | None
) -> None:
    monkeypatch.setattr(known_answers, "wrong_answers", lambda kernels: iter([("texts", wrong)]))
    monkeypatch.setattr(ladder, "_kernels", lambda number: None)
    runs = counted(monkeypatch, "not asked")
    machine["compute_mode"] = 3  # no second process may use this GPU
    monkeypatch.setenv("GPULOAD_SYNC", "1")  # other machine code than that of loads
    main(["doctor", "--gpu", "0", "--gpu-step", "kernels"])
    assert not verdict.place_of(machine).exists()
    monkeypatch.delenv("GPULOAD_SYNC")
    status = {type(None): 0, MismatchError: verdict.WRONG, MemoryError: 1}[type(wrong)]
    assert main(["doctor", "--gpu", "0", "--gpu-step", "kernels"]) == status
    assert (f"texts: {type(wrong).__name__}: {wrong}" in (distrust(0) or "")) == bool(wrong)
    assert not runs
    kept = json.loads(verdict.place_of(machine).read_text())
    assert ("at" in kept) == isinstance(wrong, MemoryError)


def test_where_there_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = counted(monkeypatch, "")
    machine["compute_mode"] = 3
    monkeypatch.setattr(verdict, "UNCHECKED", {})
    assert distrust(0) is None
    assert not runs
    assert "exclusive-process mode" in caplog.text
    assert "exclusive-process mode, and its kernels have not been checked" in verdict.UNCHECKED[0], "for reports"
    machine["compute_mode"] = 0
    monkeypatch.setenv("GPULOAD_GPU_CHECK", "off")
    assert distrust(0) is None
    assert not runs
    monkeypatch.delenv("GPULOAD_GPU_CHECK")
    distrust(0)
    (path,) = (tmp_path / "gpu").glob("*.json")
    path.write_text("{")  # damaged
    distrust(0)
    assert len(runs) == 2
    assert json.loads(path.read_text()) == {"wrong": ""}
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("GPULOAD_CACHE", str(blocked))
    assert distrust(0) is None, "a cache that cannot be written does not stop a load"


def test_a_gpu_that_is_not_trusted_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cuda, "distrust", lambda number: "its kernels do not return known answers (x)")
    assert cuda.unavailable_reason("cuda:0") == "GPU 0 is not trusted: its kernels do not return known answers (x)"


def test_a_process_tests_a_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked: list[int] = []

    def wrong(number: int) -> str:
        asked.append(number)
        return "x"

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cuda, "distrust", wrong)
    monkeypatch.setattr(cuda, "_WORKING", {0})
    assert cuda.unavailable_reason("cuda:0") is None
    assert "x" in str(cuda.unavailable_reason("cuda:1"))
    assert asked == [1]


@pytest.mark.parametrize("when", ["before", "in the self-test", "never"])
def test_a_context_that_is_lost_in_the_self_test_is_not_a_gpu_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, gsm8k: str, qwen: Any, when: str
) -> None:
    import torch

    from gpuload.core.errors import ContextLostError

    class Breaking(HostKernels):
        broken = "cudaErrorNoDevice" if when == "before" else None

        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            self.broken = None if when == "never" else "cudaErrorIllegalAddress"
            raise RuntimeError("an error of CUDA")

        def lost(self) -> str | None:
            return self.broken

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cuda, "distrust", lambda number: None)
    monkeypatch.setattr(cuda, "CudaKernels", lambda number, limit: Breaking())
    options: dict[str, Any] = {"max_prompt_length": 512, "max_samples": 20}
    if when == "in the self-test":
        with pytest.raises(ContextLostError, match="context lost: cuda:0 failed .RuntimeError: an error of CUDA"):
            gpuload.load(gsm8k, qwen, **options)
        return
    found = gpuload.load(gsm8k, qwen, **options)
    why = "cudaErrorNoDevice" if when == "before" else "RuntimeError: an error of CUDA"
    assert f"no GPU is used: GPU 0 does not work: {why}" in found.report.notes
