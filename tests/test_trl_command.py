"""TRL's own command line on data that `gpuload prepare --export` writes: a configuration file, and one step."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiers import exhaustive
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM, Qwen2ForSequenceClassification

datasets = pytest.importorskip("datasets", reason="the format is that of datasets")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from export_cases import one_thread, small_model  # noqa: E402
from tokenizer_cases import small_tokenizer  # noqa: E402
from trl_cases import MESSAGES, PAIRS  # noqa: E402

from gpuload.cli.main import main  # noqa: E402

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text()


def configuration(directory: Path, kind: str, rows: Any, **settings: Any) -> Path:
    """A configuration file for a step on exported rows, with a small model."""
    tokenizer = small_tokenizer(QWEN3)
    tokenizer.save_pretrained(directory / "model")
    model = Qwen2ForSequenceClassification if kind == "rm" else Qwen2ForCausalLM
    small_model(model, tokenizer).save_pretrained(directory / "model")
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare = ["prepare", str(file), "--tokenizer", str(directory / "model"), "--max-length", "512"]
    assert main([*prepare, "--columns", "", "--export", kind, str(directory / "data")]) == 0
    config = directory / "config.yaml"
    config.write_text(json.dumps({  # JSON is YAML
        "model_name_or_path": str(directory / "model"), "dataset_name": str(directory / "data"), "max_steps": 1,
        "output_dir": str(directory / "out"), "report_to": "none", "bf16": False, "use_cpu": True, "max_length": 512,
        "per_device_train_batch_size": 2, "save_strategy": "no", "logging_steps": 1, "eval_strategy": "no",
    } | settings))  # fmt: skip
    return config


@exhaustive
def test_the_command(tmp_path: Path) -> None:
    config = configuration(tmp_path, "sft", MESSAGES, dataset_kwargs={"skip_prepare_dataset": True})
    call = "import sys; from trl.cli import main; sys.argv[0] = 'trl'; main()"
    done = subprocess.run(
        [sys.executable, "-c", call, "sft", "--config", str(config)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'train_loss'" in done.stdout
    assert "Tokenizing" not in done.stderr


@pytest.mark.parametrize(
    ("command", "kind", "rows", "settings"),
    [
        ("sft", "packed", MESSAGES, {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": True}),
        ("reward", "rm", PAIRS, {}),
    ],
)
def test_the_script_that_a_command_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str, kind: str, rows: Any, settings: dict[str, Any],
) -> None:  # fmt: skip
    """In this process: two processes import TRL for each command."""
    config = configuration(tmp_path, kind, rows, **settings)
    script = Path(trl.__file__).parent / "scripts" / f"{command}.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--config", str(config)])
    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", None)  # nothing is tokenized again
    with one_thread():
        runpy.run_path(str(script), run_name="__main__")
    assert "'train_loss'" in capsys.readouterr().out
