"""Training with the integration with TRL: the losses of five steps equal those of TRL's own trainers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import core, exhaustive
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from export_cases import five_steps, one_thread, small_model  # noqa: E402
from test_trl_files import in_file  # noqa: E402
from tokenizer_cases import small_tokenizer  # noqa: E402
from trl_cases import COMPLETIONS, IMPLICIT_TEXTS, LABELED, MESSAGES, PAIRS, PLAIN, TEXTS  # noqa: E402

from gpuload.integrations import trl as ours  # noqa: E402
from gpuload.integrations.trl import batches  # noqa: E402
from gpuload.integrations.trl.rows import FlatDataset  # noqa: E402

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text()
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def trained(kind: Any, name: str, rows: Any, output: Path, template: str = QWEN3, **settings: Any) -> Any:
    """The trainer's data and five losses.

    Args:
        kind: module whose trainer is used: TRL, or the integration.
        name: of the trainer.
        rows: a dataset, or its rows.
    """
    tokenizer = small_tokenizer(template)
    model = small_model(Qwen2ForSequenceClassification if name == "RewardTrainer" else Qwen2ForCausalLM, tokenizer)
    more = {"ref_model": small_model(Qwen2ForCausalLM, tokenizer)} if name in ("DPOTrainer", "KTOTrainer") else {}
    dataset = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
    config = getattr(trl, name.replace("Trainer", "Config"))
    return five_steps(getattr(kind, name), config, model, dataset, tokenizer, output, more, **settings)


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("SFTTrainer", MESSAGES, {"assistant_only_loss": True, "pad_to_multiple_of": 8}),
    ("DPOTrainer", PAIRS, {"max_length": 80}),
    ("RewardTrainer", PAIRS, {}),
    ("KTOTrainer", LABELED, {}),
    ("DPOTrainer", PAIRS, {"precompute_ref_log_probs": True}),
    ("KTOTrainer", LABELED, {"precompute_ref_log_probs": True}),
    ("SFTTrainer", COMPLETIONS, {"assistant_only_loss": True, "completion_only_loss": False}),
    ("SFTTrainer", MESSAGES, {"packing": True, "packing_strategy": "bfd", "max_length": 64}),
    ("SFTTrainer", MESSAGES, {"packing": True, "packing_strategy": "wrapped", "max_length": 64}),
    ("SFTTrainer", MESSAGES, {}),
    ("SFTTrainer", COMPLETIONS, {"max_length": 60}),
    ("SFTTrainer", TEXTS, {"padding_free": True, "max_length": None}),
    ("SFTTrainer", PLAIN, {"dataloader_num_workers": 1, "remove_unused_columns": False}),
    ("SFTTrainer", MESSAGES, {"padding_free": True, "packing": True, "packing_strategy": "wrapped", "max_length": 64}),
    ("DPOTrainer", PAIRS, {"padding_free": True}),  # which TRL 1.16 replaces by padding
    ("DPOTrainer", IMPLICIT_TEXTS, {}),
    ("RewardTrainer", IMPLICIT_TEXTS, {"center_rewards_coefficient": 0.01}),
    ("KTOTrainer", PAIRS, {"max_length": 90, "loss_type": "apo_zero_unpaired"}),
]


@pytest.mark.parametrize(("name", "rows", "settings"), core(CASES, *CASES[:8]))
def test_losses_of_five_steps(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, name: str, rows: Any, settings: dict[str, Any]
) -> None:
    data, losses = trained(ours, name, rows, tmp_path, **settings)
    expected, theirs = trained(trl, name, rows, tmp_path, **settings)
    assert losses == theirs
    assert list(data) == list(expected)
    assert isinstance(data, FlatDataset)
    assert not [line.message for line in caplog.records if "falls back" in line.message]


STREAMS: list[tuple[str, Any]] = [
    ("KTOTrainer", LABELED),
    ("SFTTrainer", MESSAGES),
    ("DPOTrainer", PAIRS),
    ("RewardTrainer", PAIRS),
]


@pytest.mark.parametrize(("name", "rows"), core(STREAMS, *STREAMS[:1]))
def test_losses_of_a_stream(caplog: pytest.LogCaptureFixture, tmp_path: Path, name: str, rows: Any) -> None:
    def five(kind: Any) -> Any:
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        data, losses = trained(kind, name, stream, tmp_path)
        assert isinstance(data, datasets.IterableDataset)
        return list(data), losses

    assert five(ours) == five(trl)
    assert not [line.message for line in caplog.records if "falls back" in line.message]


def test_losses_of_an_evaluation(tmp_path: Path) -> None:
    """Datasets given to the trainer, several by name, and one that is given later."""
    rows = [datasets.Dataset.from_list(MESSAGES).select(range(k, k + 9)) for k in (0, 9, 18)]

    def evaluated(kind: Any) -> Any:
        tokenizer = small_tokenizer(QWEN3)
        args = trl.SFTConfig(
            output_dir=str(tmp_path), report_to=[], bf16=False, use_cpu=True, per_device_eval_batch_size=4
        )
        model = small_model(Qwen2ForCausalLM, tokenizer)
        held_out = {"a": rows[1], "b": rows[2]}
        made = kind.SFTTrainer(
            model, args=args, train_dataset=rows[0], eval_dataset=held_out, processing_class=tokenizer
        )
        with one_thread():
            found = made.evaluate() | {"later": made.evaluate(rows[0])}
        losses = {name: value for name, value in found.items() if name.endswith("loss")}
        return losses | {"later": found["later"]["eval_loss"]}, made

    (losses, made), (expected, _) = evaluated(ours), evaluated(trl)
    assert losses == expected
    assert set(losses) == {"eval_a_loss", "eval_b_loss", "later"}
    assert all(isinstance(dataset, FlatDataset) for dataset in made.eval_dataset.values())


@pytest.mark.parametrize(("name", "rows"), [("DPOTrainer", PAIRS), ("KTOTrainer", LABELED)])
def test_log_probabilities_of_the_reference_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: Any
) -> None:
    """Batches for them are made from flat ids, and the second start, which maps the dataset, finds them, as TRL's."""
    passes: list[Any] = []

    def counted(self: Any, model: Any, batch: Any) -> Any:
        passes.append(batch)
        return computed(self, model, batch)

    def ours_or_theirs(kind: Any, folder: Path) -> Any:
        settings = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 8}
        return trained(kind, name, in_file(rows, folder), tmp_path, **settings)

    stock = getattr(trl, name)
    computed = stock.compute_ref_log_probs
    monkeypatch.setattr(stock, "compute_ref_log_probs", counted)
    expected, losses = ours_or_theirs(trl, tmp_path / "theirs")
    theirs = len(passes)
    lists: list[int] = []
    made = batches._Flat._stock
    monkeypatch.setattr(batches._Flat, "_stock", lambda self, rows: lists.append(len(rows)) or made(self, rows))
    for start in range(2):
        passes.clear()
        lists.clear()
        found, ours_losses = ours_or_theirs(ours, tmp_path / "ours")
        assert isinstance(found, FlatDataset)
        assert list(found) == list(expected)
        assert ours_losses == losses
        assert len(passes) == (0 if start else theirs)
        assert lists == ([2] if start else [8, 2])  # the first batch of each pass


@pytest.mark.parametrize(("name", "rows"), [("DPOTrainer", PAIRS), ("KTOTrainer", LABELED)])
def test_trl_rejects_streams_for_the_reference_model(tmp_path: Path, name: str, rows: Any) -> None:
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    for kind in (ours, trl):
        with pytest.raises(ValueError, match="is not supported with IterableDataset"):
            trained(kind, name, stream, tmp_path, precompute_ref_log_probs=True)


def test_a_dataset_to_evaluate_with_the_reference_model(tmp_path: Path) -> None:
    """That is given to `evaluate` before the first step, with columns that others lack."""
    rows = [datasets.Dataset.from_list(IMPLICIT_TEXTS).select(range(k, k + 9)) for k in (0, 9, 18)]
    rows[0] = rows[0].remove_columns("margin")

    def evaluated(kind: Any, name: str) -> Any:
        tokenizer = small_tokenizer(QWEN3)
        config = getattr(trl, name.replace("Trainer", "Config"))
        more = {"precompute_ref_log_probs": True} if name == "DPOTrainer" else {}
        args = config(output_dir=str(tmp_path), report_to=[], bf16=False, use_cpu=True, max_steps=2, **more)
        model = small_model(Qwen2ForCausalLM if more else Qwen2ForSequenceClassification, tokenizer)
        made = getattr(kind, name)(
            model, args=args, train_dataset=rows[0], eval_dataset=rows[1], processing_class=tokenizer
        )
        with one_thread():
            losses = [made.evaluate(rows[2])["eval_loss"], made.evaluate()["eval_loss"]]
            made.train()
            return [*losses, made.evaluate()["eval_loss"], [entry.get("loss") for entry in made.state.log_history]]

    for name in ("DPOTrainer", "RewardTrainer"):
        assert evaluated(ours, name) == evaluated(trl, name)


def test_a_collator_of_the_user_gets_lists(tmp_path: Path) -> None:
    kinds = set()

    class Collator(trl.trainer.sft_trainer.DataCollatorForLanguageModeling):  # type: ignore[misc,name-defined]
        def torch_call(self, examples: Any) -> Any:
            kinds.add((type(examples), type(examples[0]), type(examples[0]["input_ids"])))
            return super().torch_call(examples)

    tokenizer = small_tokenizer(QWEN3)
    data, _ = five_steps(
        ours.SFTTrainer, trl.SFTConfig, small_model(Qwen2ForCausalLM, tokenizer), datasets.Dataset.from_list(MESSAGES),
        tokenizer, tmp_path, {"data_collator": Collator(pad_token_id=tokenizer.pad_token_id)},
    )  # fmt: skip
    assert type(data) is datasets.Dataset
    assert kinds == {(list, dict, list)}


@exhaustive
def test_grpo_with_prompts(tmp_path: Path) -> None:
    """A trivial reward; the same prompts, without the long ones, and the same losses."""
    import pyarrow as pa

    rows = [{"messages": row["prompt"], "answer": row["n"]} for row in COMPLETIONS]
    tokenizer = small_tokenizer(CHATML)
    lengths = [
        len(tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True)["input_ids"]) for row in rows
    ]
    limit = sorted(lengths)[len(rows) // 2]
    kept = [
        {"prompt": row["messages"], "answer": row["answer"]}
        for row, length in zip(rows, lengths, strict=True) if length <= limit
    ]  # fmt: skip
    found = ours.prompts(pa.Table.from_pylist(rows), tokenizer, limit, prompt_key="messages")
    assert list(found) == kept
    assert 0 < len(kept) < len(rows)

    def reward(completions: Any, answer: Any, **_: Any) -> list[float]:
        return [float(len(str(each)) % 7 + n) for each, n in zip(completions, answer, strict=True)]

    def losses(dataset: Any) -> list[float]:
        settings = {"num_generations": 2, "max_completion_length": 6}
        more = {"reward_funcs": reward}
        model = small_model(Qwen2ForCausalLM, tokenizer)
        return five_steps(trl.GRPOTrainer, trl.GRPOConfig, model, dataset, tokenizer, tmp_path, more, **settings)[1]

    assert losses(found) == losses(datasets.Dataset.from_list(kept))


@exhaustive
def test_two_processes(tmp_path: Path) -> None:
    """Both ranks get TRL's losses, with gloo, from both trainers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 2: {name} equal" for rank in range(2) for name in ("DPOTrainer", "SFTTrainer")]


def one_rank(name: str, rows: Any, output: Path, **settings: Any) -> None:
    """What each process of the test above runs."""
    settings |= {"ddp_backend": "gloo"}
    data, losses = trained(ours, name, rows, output, **settings)
    expected, theirs = trained(trl, name, rows, output, **settings)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    same = losses == theirs and list(data) == list(expected) and isinstance(data, FlatDataset)
    # One write: both processes write into the same pipe, and `print` writes the end of a line on its own.
    os.write(1, f"rank {rank} of {world}: {name} {'equal' if same else (losses, theirs)}\n".encode())


if __name__ == "__main__":
    one_rank("SFTTrainer", MESSAGES, Path(sys.argv[1]), assistant_only_loss=True)
    one_rank("DPOTrainer", PAIRS, Path(sys.argv[1]))
