"""TRL's own command line on data that `gpuload prepare --export` writes: a configuration file, and one step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification

datasets = pytest.importorskip("datasets", reason="the format is that of datasets")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from export_cases import small_model  # noqa: E402
from trl_cases import MESSAGES, PAIRS, small_tokenizer  # noqa: E402

from gpuload.cli.main import main  # noqa: E402

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text()


@pytest.mark.parametrize(
    ("command", "kind", "rows", "settings"),
    [
        ("sft", "sft", MESSAGES, {"dataset_kwargs": {"skip_prepare_dataset": True}}),
        ("sft", "packed", MESSAGES, {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": True}),
        ("reward", "rm", PAIRS, {}),
    ],
)
def test_a_step_by_a_configuration_file(
    tmp_path: Path, command: str, kind: str, rows: Any, settings: dict[str, Any]
) -> None:
    tokenizer = small_tokenizer(QWEN3)
    tokenizer.save_pretrained(tmp_path / "model")
    model = Qwen2ForSequenceClassification if command == "reward" else Qwen2ForCausalLM
    small_model(model, tokenizer).save_pretrained(tmp_path / "model")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare = ["prepare", str(file), "--tokenizer", str(tmp_path / "model"), "--max-length", "512"]
    assert main([*prepare, "--columns", "", "--export", kind, str(tmp_path / "data")]) == 0
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({  # JSON is YAML
        "model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "data"), "max_steps": 1,
        "output_dir": str(tmp_path / "out"), "report_to": "none", "bf16": False, "use_cpu": True, "max_length": 512,
        "per_device_train_batch_size": 2, "save_strategy": "no", "logging_steps": 1, "eval_strategy": "no",
    } | settings))  # fmt: skip
    call = "import sys; from trl.cli import main; sys.argv[0] = 'trl'; main()"
    done = subprocess.run(
        [sys.executable, "-c", call, command, "--config", str(config)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'train_loss'" in done.stdout
    assert "Tokenizing" not in done.stderr
