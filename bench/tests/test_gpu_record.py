"""Tests of the GPU record: a rehearsal of every section with kernels on the host, and that its checks can fail."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from simulator.host_kernels import COMPILER, HostKernels
from tiers import exhaustive

from bench import ROOT, environment
from bench.gpu import __main__ as gpu_record
from bench.gpu import checks, loads, stages, tokens
from bench.gpu.data import KINDS, flat, generated_file, texts
from bench.gpu.rig import Rig
from bench.gpu.section import Facts, MissingError, Section, Task, WrongError
from bench.process import without_directories
from bench.report import gpu_page
from bench.tests.gpu_cases import LIMIT, compared, encoded
from bench.tests.test_gpu import copies_of, too_much
from gpuload.cli import ladder
from gpuload.engines.device import verdict
from gpuload.engines.device.verdict import Step

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

RATES = ("seconds", "per_s", "times_the_copy")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


@exhaustive
def test_a_rehearsal_goes_through_every_section_and_measures_nothing(tmp_path: Path) -> None:
    before = sorted((ROOT / "bench" / "records").iterdir())
    done = run("-m", "bench.gpu_record", "--rehearse", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert record["rehearsal"] is True
    sections = record["sections"]
    assert list(sections) == list(gpu_record.SECTIONS)
    for name, section in sections.items():
        assert section["status"] == "done", section
        assert section["facts"], name
        for row, cells in section["facts"].items():
            assert not [key for key in cells if any(rate in key for rate in RATES)], (name, row)
    assert sections["batches"]["facts"]["a batch of prompts"]["bytes"] == 3 * 8 * 64 * 8
    assert sections["batches"]["facts"]["a packed batch"]["bytes"] > 8 * 64 * 32 * 0.9
    kernels = sections["kernels"]["facts"]
    assert {name.rpartition(": ")[2] for name in kernels} > {"lay_answers", "match_tokens", "mark_answers", "lay_pairs"}
    assert sections["encode"]["facts"]["qwen2.5, short, device"]["differing"] == 0
    assert sections["sanitizer"]["facts"]["known answers"]["output"].endswith(" cases are right")
    assert sections["tests"]["facts"]["tests marked gpu"]["collected"] >= 10
    assert set(sections["ladder"]["facts"]) > set(ladder.STEPS)
    page = file.with_suffix(".md").read_text()
    assert "A rehearsal on the host" in page
    assert str(tmp_path) not in page
    assert str(ROOT) not in json.dumps(record)
    assert sorted((ROOT / "bench" / "records").iterdir()) == before


def is_alive(process: int) -> bool:
    """Return whether a process runs. One that has ended stays listed as a zombie until it is reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_failing_section_does_not_affect_others(tmp_path: Path) -> None:
    script = """
        import os, subprocess, sys, time
        from bench.gpu.__main__ import main
        from bench.gpu.section import MissingError, Section, WrongError
        from bench.process import run_command

        def raises(why):
            def work(task, facts):
                facts("before", number=1)
                raise why
            return work

        def dies(task, facts):
            facts("before", number=2)
            print("last words", file=sys.stderr)
            os.abort()

        def hangs(task, facts):
            child = subprocess.Popen(["sleep", "100"])
            facts("before", child=child.pid)
            print("so far", file=sys.stderr, flush=True)
            time.sleep(100)

        def runs(task, facts):
            run_command([sys.executable, "-c", "print('half', flush=True); import time; time.sleep(100)"], 1)

        def fine(task, facts):
            facts("after", process=os.getpid())

        works = {"raises": raises(ZeroDivisionError("no")), "wrong": raises(WrongError("differs")), "dies": dies,
                 "hangs": hangs, "missing": raises(MissingError("no such thing")), "runs": runs, "fine": fine}
        sections = {name: Section(work, 1.5 if name == "hangs" else 30) for name, work in works.items()}
        sys.exit(main(["--rehearse", "--output", sys.argv[1]], sections))
    """
    started = time.monotonic()
    done = run("-c", textwrap.dedent(script), str(tmp_path))
    assert time.monotonic() - started < 60
    assert done.returncode == 1, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.json")
    sections = json.loads(file.read_text())["sections"]
    assert {name: section["status"] for name, section in sections.items()} == {
        "raises": "failed", "wrong": "wrong", "dies": "died", "hangs": "stopped", "missing": "missing",
        "runs": "stopped", "fine": "done",
    }  # fmt: skip
    assert "ZeroDivisionError: no" in sections["raises"]["why"]
    assert "last words" in sections["dies"]["why"]
    assert "exit code -6" in sections["dies"]["why"]
    assert [sections[name]["facts"]["before"] for name in ("raises", "dies")] == [{"number": 1}, {"number": 2}]
    assert "so far" in sections["hangs"]["why"]
    assert "not finished after 1 seconds" in sections["runs"]["why"]
    assert "half" in sections["runs"]["why"]
    assert not is_alive(sections["hangs"]["facts"]["before"]["child"])
    page = file.with_suffix(".md").read_text()
    assert "**stopped**: not finished after" in page
    assert "**failed**: ZeroDivisionError: no" in page


def test_a_call_goes_on_with_the_record_of_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gigatoken", raising=False)  # another test of this process may have imported it

    def section(name: str, status: str) -> Section:
        def work(task: Task, facts: Facts) -> None:
            facts("process", name=name)
            if status == "wrong":
                raise WrongError("differs")

        return Section(work, 20)

    sections = {
        "first": section("first", "wrong"),
        "second": section("second", "done"),
        "last": section("last", "done"),
    }
    call = ["--rehearse", "--output", str(tmp_path)]
    assert gpu_record.main([*call, "--only", "first"], sections) == 1
    (file,) = tmp_path.glob("*.json")
    assert gpu_record.main([*call, "--seconds", "1"], sections) == 1
    statuses = {name: each["status"] for name, each in json.loads(file.read_text())["sections"].items()}
    assert statuses == {"first": "wrong", "second": "not begun", "last": "not begun"}
    assert gpu_record.main(call, sections) == 0, "what was found before is not asked again"
    statuses = {name: each["status"] for name, each in json.loads(file.read_text())["sections"].items()}
    assert statuses == {"first": "wrong", "second": "done", "last": "done"}


def test_no_record_is_made_without_a_gpu_and_no_rehearsal_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "nvidia_smi", lambda query: None)
    with pytest.raises(SystemExit, match="--rehearse"):
        gpu_record.main([])
    with pytest.raises(SystemExit, match="2"):
        gpu_record.main(["--rehearse", "--output", str(ROOT / "bench" / "records")])
    with pytest.raises(SystemExit, match="2"):
        gpu_record.main(["--rehearse", "--only", "loadz"])


class Clock:
    """CuPy's events on the host's clock."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass


@pytest.fixture
def clocked(gsm8k: str, qwen_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task that is measured as on a GPU, with kernels on the host."""
    cuda = SimpleNamespace(
        Event=Clock,
        get_elapsed_time=lambda a, b: 1e3 * (b.at - a.at),
    )
    monkeypatch.setattr(np, "cuda", cuda, raising=False)
    rig = Rig(HostKernels(), torch.device("cpu"), rehearsal=False)
    for module in (loads, stages, tokens):
        monkeypatch.setattr(module, "open_rig", lambda task: rig)
    monkeypatch.setattr(Rig, "load", Rig.load_here)
    monkeypatch.setattr(stages, "copy_bandwidth", lambda rig: {"gb_per_s": 1.0})
    return Task(False, (gsm8k,), (qwen_directory,), str(tmp_path), (200,), 5000, (8, 64))


def test_measured_rates_are_bytes_and_rows_over_seconds(clocked: Task) -> None:
    facts = Facts()
    stages.batches(clocked, facts)
    loads.kernels(clocked, facts)
    tokens.encode(clocked, facts)
    measured = {row: cells for row, cells in facts.rows.items() if "seconds" in cells and "bytes" in cells}
    assert {"pairs, 200 rows: copy_pieces", "a batch of prompts: pad", "a packed batch", "a batch with labels"} <= set(
        measured
    )
    assert any(row.endswith("gigatoken") for row in measured)
    assert measured["qwen2.5, short, device"]["times_gigatoken"] > 0
    for row, cells in measured.items():
        if "gb_per_s" in cells:
            assert cells["gb_per_s"] == pytest.approx(cells["bytes"] / cells["seconds"] / 1e9), row
    batch = measured["a batch of prompts"]
    assert batch["times_the_copy"] == pytest.approx(batch["seconds"] / (batch["bytes"] / 1e9))
    assert all(cells.get("differing", 0) == 0 for cells in measured.values())


def spoil(monkeypatch: pytest.MonkeyPatch, kernel: str, item: int) -> None:
    """Make a kernel add one to an item of the last array that it writes."""
    launch = HostKernels._launch

    def off_by_one(self: Any, name: str, blocks: int, arguments: list[Any]) -> None:
        launch(self, name, blocks, arguments)
        if name == kernel:
            arguments[-1][item] += 1

    monkeypatch.setattr(HostKernels, "_launch", off_by_one)


def test_a_wrong_batch_is_found(clocked: Task, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(HostKernels(), torch.device("cpu"), rehearsal=True)
    assert compared(rig, "prompts", clocked.files[0], qwen, **LIMIT)["same"]
    spoil(monkeypatch, "pad", -1)
    cells = compared(rig, "prompts", clocked.files[0], qwen, **LIMIT)
    assert (cells["same"], cells["batches"], cells["differing"]) == (False, False, 0)


def test_a_wrong_id_makes_the_record_wrong(clocked: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few, rig = tmp_path / "few.parquet", Rig(HostKernels(), torch.device("cpu"), rehearsal=True)
    pq.write_table(pq.read_table(clocked.files[0]).slice(0, 9), few)
    (directory,), encoder = clocked.tokenizers, tokens.device_encoder(rig, clocked.tokenizers[0])
    assert encoded(rig, encoder, directory, str(few))["differing"] == 0
    spoil(monkeypatch, "write_ids", 0)
    assert encoded(rig, encoder, directory, str(few))["differing"] == 1
    with pytest.raises(WrongError, match="other ids than tokenizers: .*short, device"):
        tokens.encode(clocked, Facts())


def test_copies_are_read_from_the_profilers_trace() -> None:
    def event(kind: str, name: str, size: int = 0) -> dict[str, Any]:
        return {"cat": kind, "name": name, "args": {"bytes": size}}

    pads, numbers = [event("kernel", "pad")] * 2, [event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 512)] * 2
    copies = copies_of([*pads, *numbers, event("cpu_op", "aten::x")], 2)
    assert copies == {"HtoD": 1024}
    assert too_much(copies, 2, 64) is None
    assert "HtoD" in str(too_much(copies, 2, 4))
    back = copies_of([*pads, event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4096)], 2)
    assert "DtoH: 4,096 bytes" in str(too_much(back, 2, 64))
    with pytest.raises(MissingError, match="saw 0 kernels"):
        copies_of(numbers, 2)


def test_compute_sanitizer_is_trusted_only_if_the_run_came_to_its_end() -> None:
    ran = "========= COMPUTE-SANITIZER\n10 cases are right\n"
    assert checks.judged(0, ran) == {"clean": True}
    assert checks.judged(9, f"{ran}========= ERROR SUMMARY: 1 error")["clean"] is False
    assert checks.judged(0, "========= ERROR SUMMARY: 0 errors")["clean"] is False
    with pytest.raises(MissingError, match="does not work here"):
        checks.judged(1, "Error: Device not supported")


def test_the_ladder_is_recorded_up_to_the_step_that_fails(clocked: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_rig(task: Task) -> Any:
        opened.append(task)
        return SimpleNamespace(device=None)

    monkeypatch.setattr(checks, "open_rig", open_rig)
    monkeypatch.setattr(environment, "gpu", lambda device: {"name": "H"})
    monkeypatch.setattr(verdict, "run_step", lambda name, *_: Step("7 kernels", "no" if name == "arrays" else ""))
    facts = Facts()
    with pytest.raises(WrongError, match="arrays: no"):
        checks.climb(clocked, facts)
    assert [row for row in facts.rows if row.startswith("doctor")][-1] == "doctor: arrays"
    assert facts.rows["doctor: context"]["output"] == "7 kernels"
    monkeypatch.setattr(verdict, "run_step", lambda *_: Step(f"GPU used here: {bool(opened)}", ""))
    checks.climb(clocked, facts)
    assert facts.rows["doctor: loads"]["output"] == "GPU used here: False", (
        "in exclusive-process mode, no step would work"
    )
    assert facts.rows["GPU"]["name"] == "H"


def test_generated_files_have_the_requested_rows_and_no_two_rounds_are_equal(gsm8k: str, tmp_path: Path) -> None:
    small = tmp_path / "few.parquet"
    pq.write_table(pq.read_table(gsm8k).slice(0, 7), small)
    made = pq.read_table(generated_file(Task(True, (str(small),), (), str(tmp_path)), 20))
    assert made["prompt"].slice(0, 7).to_pylist() == pq.read_table(small)["prompt"].to_pylist()
    contents = [row[0]["content"] for row in made["prompt"].to_pylist()]
    assert len(set(contents)) == len(contents) == 20
    assert made["extra_info"].combine_chunks().field("index").to_pylist() == [*range(20)]


def test_texts_are_of_their_kind_and_size(gsm8k: str, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.parquet"
    rows = [[{"role": "user", "content": "Wie viel ist 1 + 1?"}], [{"role": "user", "content": "一加一等于几？"}]]
    pq.write_table(pa.table({"prompt": rows}), foreign)
    task = Task(True, (gsm8k, str(foreign)), (), str(tmp_path))
    short, long, other = (texts(task, kind, 300_000) for kind in KINDS)
    for some in (short, long, other):
        assert 300_000 <= pc.sum(pc.binary_length(some)).as_py() < 310_000
    assert pc.max(pc.binary_length(short)).as_py() < 2000
    assert all(60 << 10 < size < 68 << 10 for size in pc.binary_length(long[:-1]).to_pylist())
    assert other[0].as_py() == "一加一等于几？"
    assert "Wie viel ist" not in " ".join(other.to_pylist())
    data, offsets = flat(short.slice(3, 2))
    assert data.tobytes().decode() == "".join(short.slice(3, 2).to_pylist())
    assert offsets.tolist()[0] == 0
    with pytest.raises(MissingError, match="no file has"):
        texts(Task(True, (gsm8k,), (), str(tmp_path)), "multilingual", 1000)


def test_pages_say_what_is_wrong_and_name_no_directories() -> None:
    section = {"at": "", "commit": "", "status": "done", "facts": {"a|b": {"seconds": 0.001234, "same": False}}}
    page = gpu_page({"gpu": "X", "rehearsal": False, "sections": {"dlpack": section}}, "x.json")
    assert "| a\\|b | 0.00123 | **no** |" in page
    assert "rehearsal" not in page
    assert without_directories(f'File "{ROOT}/bench/x.py" and "/some/where/else.py", 3 rows/s, a/b') == (
        'File "bench/x.py" and "else.py", 3 rows/s, a/b'
    )
