"""`gpuload doctor --gpu --dump` and `--replay`: a wrong kernel of a simulated GPU is found on the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulator.host_kernels import COMPILER, build, launch
from simulator.strict_arrays import StrictKernels, _memory

from gpuload.cli import known_answers, ladder, launches
from gpuload.cli.launches import Allocations, save_wrong
from gpuload.cli.main import main
from gpuload.core.errors import OptionError
from gpuload.engines.device import verdict
from gpuload.engines.device.kernel_source import source
from gpuload.engines.device.verdict import Step

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
RIGHT, WRONG = "out[before + place++] = id;", "out[before + place++] = id ^ (id == 97);"  # in `write_ids`


class Wrong(StrictKernels):
    """Kernels of a simulated GPU whose compiler has made a mistake, or on which a kernel does not end."""

    def __init__(self, right: str = RIGHT, wrong: str = WRONG, stuck: str = "") -> None:
        super().__init__()
        self.text, self.stuck = source().replace(right, wrong), stuck

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        if name == self.stuck:
            raise RuntimeError("illegal memory access")
        launch(build(self.text, "SEGMENT=16"), name, blocks, 0, [_memory(argument) for argument in arguments])


class Simulated(Allocations):
    """The memory of a simulated GPU."""

    def __init__(self, kernels: StrictKernels) -> None:
        self._xp, self.lock = kernels.xp, kernels.xp._lock

    @property
    def nbytes(self) -> dict[int, int]:  # type: ignore[override]
        return dict(self._xp.known.values())


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: case for name, case in known_answers.cases().items() if name in ("shapes of conversations", CASE)}
    monkeypatch.setattr(known_answers, "cases", lambda: some)


CASE = "encode: byte-level BPE"


def saved(kernels: StrictKernels, directory: Path, kernel: str | None = None) -> str | None:
    return save_wrong(kernels, Simulated(kernels), directory, kernel, {"gpu": "H"})


def replayed(directory: Path) -> tuple[int, str]:
    """In a process of its own: in this one, the addresses are in use."""
    command = [sys.executable, "-m", "gpuload", "doctor", "--replay", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@needs_compiler
@pytest.mark.usefixtures("one_case")
@pytest.mark.parametrize("kernel", [None, "write_ids"])
def test_the_wrong_launch_is_found_on_the_host(tmp_path: Path, kernel: str | None) -> None:
    wrong = saved(Wrong(), tmp_path, kernel)
    assert (wrong or "").startswith(f"{CASE}: MismatchError: ids of ")
    about = json.loads((tmp_path / "about.json").read_text())
    assert (about["gpu"], about["case"]) == ("H", CASE)
    code, output = replayed(tmp_path)
    assert code == 1
    assert "-write_ids: out[" in output.splitlines()[-1], output
    assert " is 96 on the GPU and 97 on the host; " in output.splitlines()[-1]


@needs_compiler
@pytest.mark.usefixtures("one_case")
def test_right_launches_are_the_same_in_any_order_of_threads(tmp_path: Path) -> None:
    kernels = Wrong(wrong=RIGHT)
    assert saved(kernels, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    # As if the mistake were in no kernel.
    with launches._saving(kernels, Simulated(kernels), tmp_path, None):
        known_answers.cases()[CASE](kernels)
    (tmp_path / "about.json").write_text(json.dumps({"source": launches._digest()}))
    code, output = replayed(tmp_path)
    assert code == 0
    assert output.endswith(" launches write on the host what they wrote on the GPU\n")


@needs_compiler
@pytest.mark.usefixtures("one_case")
def test_a_launch_that_does_not_end_is_saved_before_it_begins(tmp_path: Path) -> None:
    assert "illegal memory access" in (saved(Wrong(stuck="find_equal"), tmp_path) or "")
    code, output = replayed(tmp_path)
    assert code == 1
    assert [line.partition("-")[2] for line in output.splitlines()[-2:]] == [
        "find_equal: did not end on the GPU",
        "find_equal: ends on the host",
    ]


def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError, match="there is no kernel write_id: did you mean write_ids?"):
        saved(StrictKernels(), tmp_path / "new", "write_id")
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(OptionError, match="--dump: .* has files"):
            saved(StrictKernels(), place)
        assert main(["doctor", "--gpu", "--dump", str(place)]) == 1, "before a process is started"
        assert "has files" in capsys.readouterr().err
        assert main(["doctor", "--replay", str(place)]) == 1
        assert "has no launches" in capsys.readouterr().err
    assert main(["doctor", "--gpu", "--dump", str(tmp_path / "file" / "new")]) == 1
    assert "cannot make the directory" in capsys.readouterr().err
    for given, message in (
        (["--dump", "x"], "--kernel needs --dump"),
        (["--gpu", "--kernel", "pad"], "--kernel needs --dump"),
        (["--gpu", "--replay", "x"], "use it without --gpu"),
        (["--gpu", "-1"], "expected the number of a GPU"),
    ):
        with pytest.raises(SystemExit):
            main(["doctor", *given])
        assert message in capsys.readouterr().err


def test_directories_that_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "about.json").write_text('{"source": "x", "gpuload": "0.1"}')
    assert main(["doctor", "--replay", str(tmp_path)]) == 1
    assert "is of other kernels: use gpuload 0.1 as it was there" in capsys.readouterr().err
    (tmp_path / "about.json").write_text(json.dumps({"source": launches._digest()}))
    (tmp_path / "00001-pad.before.npz").write_bytes(b"PK")
    assert main(["doctor", "--replay", str(tmp_path)]) == 1
    assert "00001-pad.before.npz cannot be read" in capsys.readouterr().err


def test_the_command_saves_in_another_process_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def run(name: str, number: int, limit: float, *more: str) -> Step:
        asked.append((name, number, more))
        if number:
            (tmp_path / "about.json").touch()
        return Step("some line\n", "it is wrong")

    monkeypatch.setattr(verdict, "run_step", run)
    monkeypatch.setattr(launches, "replay", asked.append)
    monkeypatch.setattr(ladder, "nvidia_smi", lambda *asked: f"what it prints for {asked}")
    assert main(["doctor", "--gpu", "--dump", str(tmp_path)]) == 1
    assert "some line\nit is wrong\n\nNothing was saved" in capsys.readouterr().out
    assert main(["doctor", "--gpu", "1", "--dump", str(tmp_path), "--kernel", "pad"]) == 1
    assert (tmp_path / "nvidia-smi.txt").read_text() == "what it prints for ('-q',)"
    assert asked[1:] == [("dump", 1, ("--dump", str(tmp_path), "--kernel", "pad")), tmp_path]
    assert "some line\nit is wrong\n\nPlease report" in capsys.readouterr().out
    monkeypatch.setattr(verdict, "run_step", lambda *_: Step("right\n", ""))
    assert main(["doctor", "--gpu", "--dump", str(tmp_path / "new")]) == 0
