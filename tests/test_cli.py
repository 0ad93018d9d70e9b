"""The command line, as a person would call it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuload
from gpuload.cli import doctor
from gpuload.cli.main import main
from gpuload.engines.device import cuda
from gpuload.engines.host.engine import HostEngine


def test_inspect(gsm8k: str, qwen: Any, qwen_folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["inspect", gsm8k, "--tokenizer", qwen_folder, "--max-samples", "500", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    lengths = np.sort(gpuload.load(gsm8k, qwen, max_samples=500).tokens.lengths)
    assert "500 rows read, 500 kept" in shown
    assert re.search(r"extra_info +struct<answer: string", shown)
    everything = next(line for line in shown.splitlines() if line.startswith("  all "))
    numbers = [int(word.replace(",", "")) for word in everything.split()[1:]]
    assert numbers == [500, *np.percentile(lengths, (0, 5, 25, 50, 75, 95, 99, 100), method="nearest").tolist()]
    assert re.search(r"openai/gsm8k +500", shown)
    histogram = re.findall(r"^ +[\d,]+ - +[\d,]+ +([\d,]+) #*$", shown, re.MULTILINE)
    assert sum(int(count.replace(",", "")) for count in histogram) == 500
    stays = shown[shown.index("rows kept with") :].splitlines()
    limits, shares = stays[0].split()[4:], stays[1].split()[2:]
    for limit, share in zip(limits, shares, strict=True):
        assert share == f"{100 * (lengths <= int(limit)).mean():.1f}%"
    assert "500 rows read" in page.read_text()


def test_a_closed_pipe_ends_a_command_quietly(gsm8k: str, qwen_folder: str) -> None:
    command = [sys.executable, "-m", "gpuload", "inspect", gsm8k, "--tokenizer", qwen_folder, "--max-samples", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `| head -0` does
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_inspect_names_what_is_wrong(
    write: Callable[..., str], qwen_folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["inspect", str(tmp_path / "none*.parquet"), "--tokenizer", qwen_folder]) == 1
    assert re.fullmatch(r"gpuload: .*none\*.parquet: no file matches.*\n", capsys.readouterr().err)
    assert main(["inspect", write({"q": ["a"]}), "--tokenizer", qwen_folder]) == 1
    assert "no column 'prompt'" in capsys.readouterr().err
    assert (
        main(["inspect", write({"q": ["a", "b c"]}), "--tokenizer", qwen_folder, "--prompt-key", "q", "--no-template"])
        == 0
    )
    assert "p100" in capsys.readouterr().out


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for package in ("torch", "transformers", "gigatoken", "pyarrow"):
        assert re.search(rf"  {package} +\d", shown)
    stages = "".join(rf"    {stage} +\d+\.\d+ s\n" for stage in ("prepare", "read", "render", "encode", "batch"))
    assert re.search(rf"  cpu +works\n{stages}    uses +cpu: chat template compiled, encoded by gigatoken", shown)
    assert re.search(rf"  cuda +(works\n{stages}|not available: .*(CUDA|GPU|installed))", shown)
    assert re.search(r"  CUDA +torch is built (for \d|without CUDA)", shown)


def test_doctor_requires(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is that of the required engine, and the other one is left alone."""
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device: f"no {device} today")
    assert main(["doctor", "--require", "cuda"]) == 1
    shown = capsys.readouterr().out
    assert shown.endswith("\n  cuda          not available: no cuda today\n")
    assert "  cpu " not in shown
    assert main(["doctor", "--require", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "  cpu           works\n" in shown
    assert "  cuda " not in shown
    with pytest.raises(SystemExit):
        main(["doctor", "--require", "tpu"])
    assert "choose from" in capsys.readouterr().err


def test_doctor_tells_the_stage_that_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def render(self: HostEngine, prompts: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(HostEngine, "render", render)
    assert main(["doctor", "--require", "cpu"]) == 1
    assert re.search(
        r"  cpu +DOES NOT WORK\n    prepare .*\n    read .*\n    render +FAILED: MemoryError\n    uses ",
        capsys.readouterr().out,
    )


def test_doctor_tries_out_the_gpu_where_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is the host's here: what is built is what is tried out."""
    built: list[str] = []
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device: None)
    monkeypatch.setattr(
        cuda, "cuda_engine", lambda reference, device="cuda": (built.append(device), HostEngine(reference))[1]
    )
    assert main(["doctor", "--require", "cuda"]) == 0
    assert built == ["cuda"]
    assert re.search(r"  cuda +works\n    prepare +\d", capsys.readouterr().out)


def test_doctor_without_a_gpu_starts_no_cuda() -> None:
    code = (
        "import sys, torch; from gpuload.cli.main import main; assert main(['doctor']) == 0;"
        "print(torch.cuda.is_initialized(), [m for m in ('cudf', 'pylibcudf', 'cupy', 'rmm') if m in sys.modules])"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "False []"


def test_doctor_tells_gpu_and_driver(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        (): "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |",
        ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"): (
            "NVIDIA A, 100 MiB, 580.95.05\nNVIDIA B, 200 MiB, 580.95.05\n"
        ),
    }
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *arguments: told[arguments])
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"  GPU 0 +NVIDIA A, 100 MiB\n  GPU 1 +NVIDIA B, 200 MiB\n", shown)
    assert re.search(r"  driver +580\.95\.05, supports CUDA up to 13\.0\n", shown)


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "8,792 rows read, 8,792 kept" in shown
    assert re.search(r"\d+\.\d times as fast; 8,792 rows compared, 0 tokens differ\n$", shown)
    assert re.search(r"input_ids +int64 +\(256, 512\)", shown)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["frobnicate"], ["inspect"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"gpuload {gpuload.__version__}\n"


def test_progress(gsm8k: str, qwen: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar where one is asked for (or on a terminal), and nothing where output goes elsewhere."""
    gpuload.load(gsm8k, qwen, max_samples=50)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
    gpuload.load(gsm8k, qwen, max_samples=50, progress=True)
    assert "prompts" in capsys.readouterr().err


def test_inspect_template(gsm8k: str, qwen_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--template", "--tokenizer", qwen_folder]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^system, user\n  '<\|im_start\|>system\\n' \+ \[message 0 content\] \+ ", shown, re.MULTILINE)
    assert main(["inspect", "--template", "--tokenizer", qwen_folder, gsm8k]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("user\n  '<|im_start|>system\\nYou are Qwen")
    assert "8,792 rows compiled, 0 rendered by transformers, 0 rejected" in shown
    with pytest.raises(SystemExit):
        main(["inspect", "--tokenizer", qwen_folder])
    assert "no files given" in capsys.readouterr().err
