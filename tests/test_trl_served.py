"""Rows as served in TRL's SFTTrainer: `dataset_kwargs={"turns": "served"}`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from export_cases import five_steps, one_thread, small_model  # noqa: E402
from test_served import BLOCKS, MESSAGES, STRIPPING  # noqa: E402
from tokenizer_cases import small_tokenizer  # noqa: E402
from transformers import Qwen2ForCausalLM  # noqa: E402
from trl_cases import prepared  # noqa: E402

import gpuload  # noqa: E402
from gpuload.core.errors import DataError, OptionError  # noqa: E402
from gpuload.integrations import trl as ours  # noqa: E402
from gpuload.integrations.trl import trainers  # noqa: E402

SERVED = {"turns": "served"}
ROWS = [{"n": k, "messages": MESSAGES[: 2 + 2 * (k % 2)]} for k in range(11)]


def rows_of(data: Any) -> list[Any]:
    """Ids, labels, conversation and turn of each row."""
    return [tuple(row[name] for name in ("input_ids", "labels", "conversation", "turn")) for row in data]


def loaded(rows: list[Any], template: str = STRIPPING, **options: Any) -> list[Any]:
    table = datasets.Dataset.from_list(rows).with_format("arrow")[:]
    return rows_of(gpuload.load_chats(table, small_tokenizer(template), turns="served", **options)[:])


def served(rows: Any, template: str = STRIPPING, more: tuple[Any, Any] = (False, None), **settings: Any) -> Any:
    settings = {"dataset_kwargs": SERVED} | settings
    return prepared(ours.SFTTrainer, trl.SFTConfig, rows, small_tokenizer(template), *more, **settings)


def test_rows_are_those_of_load_chats() -> None:
    """More rows than conversations."""
    made = served(ROWS)
    assert made.column_names == ["input_ids", "labels", "conversation", "turn"]
    assert rows_of(made) == loaded(ROWS)
    assert len(made) == 16 > len(ROWS)


def test_longer_rows_end_behind_an_answer() -> None:
    longest = max(len(row[0]) for row in loaded(ROWS))
    expected = loaded(ROWS, max_length=longest - 1, overlong="keep_start")
    assert rows_of(served(ROWS, max_length=longest - 1)) == expected != loaded(ROWS)


def test_selected_rows() -> None:
    """The numbers of conversations are those of the dataset that is passed."""
    chosen = [5, 0, 3]
    data = datasets.Dataset.from_list(ROWS).select(chosen)
    assert rows_of(served(data)) == loaded([ROWS[k] for k in chosen])


def test_options() -> None:
    without = [{"messages": [*MESSAGES, {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}]
    for options in ({"missing_reasoning": "skip"}, {"missing_reasoning": "learn"}, {"loss_on": "last"}):
        made = rows_of(served(without, dataset_kwargs=SERVED | options))
        assert made == loaded(without, **options) != loaded(without)


def test_prompts_with_completions() -> None:
    rows = [{"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}]
    completions = served(rows, trainer_completion_only_loss=True)
    assert rows_of(completions) == loaded(rows)
    assert len(completions) == 1
    everything = served(rows, trainer_completion_only_loss=False)
    assert rows_of(everything) == loaded([{"messages": MESSAGES}])
    assert len(everything) == 2


def test_packs() -> None:
    made = served(ROWS, more=(True, None), packing=True, max_length=200)
    pieces = [length for pack in made["seq_lengths"] for length in pack]
    assert sorted(pieces) == sorted(len(row[0]) for row in loaded(ROWS))
    assert len(made) > 1


def test_training(tmp_path: Path) -> None:
    """Steps of an epoch are those of the rows, and losses those of TRL's own trainer on the rows of load_chats."""

    def trained(kind: Any, data: Any, output: Path, **kwargs: Any) -> Any:
        tokenizer = small_tokenizer(STRIPPING)
        model = small_model(Qwen2ForCausalLM, tokenizer)
        return five_steps(kind.SFTTrainer, trl.SFTConfig, model, data, tokenizer, output, {}, dataset_kwargs=kwargs)

    own = gpuload.load_chats(datasets.Dataset.from_list(ROWS).data.table, small_tokenizer(STRIPPING), turns="served")
    tokens = datasets.Dataset.from_list([{name: row[name] for name in ("input_ids", "labels")} for row in own[:]])
    data, losses = trained(ours, datasets.Dataset.from_list(ROWS), tmp_path / "ours", **SERVED)
    _, expected = trained(trl, tokens, tmp_path / "trl", skip_prepare_dataset=True)
    assert losses == expected
    assert len(data) == len(own)


def test_an_epoch_has_all_rows(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(STRIPPING)
    args = trl.SFTConfig(
        output_dir=str(tmp_path), report_to=[], bf16=False, use_cpu=True, save_strategy="no", num_train_epochs=1,
        per_device_train_batch_size=4, dataset_kwargs=SERVED,
    )  # fmt: skip
    data = datasets.Dataset.from_list(ROWS)
    trainer = ours.SFTTrainer(
        small_model(Qwen2ForCausalLM, tokenizer), args, train_dataset=data, eval_dataset=data.select(range(3)),
        processing_class=tokenizer,
    )  # fmt: skip
    assert rows_of(trainer.eval_dataset) == loaded(ROWS[:3])
    with one_thread():
        steps = trainer.train().global_step
    assert steps == len(trainer.train_dataset) // 4 == 4 > -(-len(ROWS) // 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"truncation_mode": "keep_end"}, "truncation_mode='keep_end' takes answers"),
        ({"packing": True}, "packing needs max_length"),
        ({"packing": True, "max_length": 99, "packing_strategy": "wrapped"}, "use 'bfd'"),
        ({"dataset_kwargs": {"turns": "severed"}}, "turns='severed'"),
        ({"dataset_kwargs": SERVED | {"histroy": "sampled"}}, "unknown key 'histroy': did you mean history"),
        ({"dataset_kwargs": SERVED | {"skip_prepare_dataset": True}}, "remove one"),
        ({"dataset_kwargs": {"history": "sampled"}}, "turns='served'"),
        ({"dataset_kwargs": {"loss_on": "last"}}, "loss_on is for turns='served'"),
    ],
)
def test_settings_that_cannot_be_kept(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        served(ROWS, more=(settings.get("packing", False), None), **settings)


def test_data_that_cannot_be_prepared() -> None:
    """Nothing falls back to TRL, which would make one row of each conversation."""
    data = datasets.Dataset.from_list(ROWS)
    cases = [
        (data.to_iterable_dataset(), "pass a datasets.Dataset"),
        (data.with_transform(lambda batch: batch), "has a transform"),
        (datasets.Dataset.from_list([{"text": "a"}]), "turns='served' is for conversations"),
        (datasets.Dataset.from_list([{"messages": MESSAGES, "input_ids": [1]}]), "tokenized already"),
    ]
    for each, message in cases:
        with pytest.raises(OptionError, match=message):
            served(each)
    with pytest.raises(OptionError, match="pass a dataset with messages"):
        served(ROWS, more=(False, str))
    weighted = [{**message, "weight": 0.5} if message["role"] == "assistant" else message for message in MESSAGES]
    with pytest.raises(OptionError, match="which TRL's loss does not take"):
        served([{"messages": weighted}])
    with pytest.raises(DataError, match="the only row"):
        served([{"messages": MESSAGES[:1]}])


def test_other_trls_do_not_ignore_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainers.PROBLEMS, "SFTTrainer", "it has another parameter")
    with pytest.raises(OptionError, match="prepares datasets itself: it has another parameter"):
        served(ROWS, BLOCKS)


def test_one_row_per_conversation_is_trl_s() -> None:
    made = served(ROWS, dataset_kwargs={"turns": "conversation"})
    assert len(made) == len(ROWS)
