"""The integration with TRL: what `_prepare_dataset` makes of every kind of data equals what TRL makes of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from trl_cases import (  # noqa: E402
    COMPLETIONS,
    IMPLICIT,
    IMPLICIT_TEXTS,
    LABELED,
    LABELED_TEXTS,
    MESSAGES,
    PAIRS,
    PLAIN,
    TEXT_PAIRS,
    TEXTS,
    TOOLS,
    equal,
    prepared,
)  # fmt: skip

from gpuload.integrations import trl as ours  # noqa: E402
from gpuload.integrations.trl import sft  # noqa: E402

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text()
LOG = "gpuload.integrations.trl"


def both(name: str, rows: Any, tokenizer: Any, *more: Any, **settings: Any) -> tuple[Any, Any]:
    """What our trainer and TRL's make of the same rows."""
    config = getattr(trl, name.replace("Trainer", "Config"))
    return tuple(prepared(getattr(kind, name), config, rows, tokenizer, *more, **settings) for kind in (ours, trl))


@pytest.mark.parametrize("limit", [{}, {"max_length": 30}, {"max_length": 30, "truncation_mode": "keep_end"}])
@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (MESSAGES, {}),
        (MESSAGES, {"assistant_only_loss": True, "trainer_chat_template": QWEN3}),
        (TOOLS, {}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"trainer_completion_only_loss": True}),
        (
            COMPLETIONS,
            {"trainer_completion_only_loss": True, "assistant_only_loss": True, "trainer_chat_template": QWEN3},
        ),
        (TEXTS, {}),
        (PLAIN, {}),
        (PLAIN, {"trainer_completion_only_loss": True}),
    ],
)
def test_sft_data(
    qwen: Any, caplog: pytest.LogCaptureFixture, rows: Any, settings: dict[str, Any], limit: dict[str, Any]
) -> None:
    found, expected = both("SFTTrainer", rows, qwen, False, None, **settings, **limit)
    equal(found, expected)
    assert not caplog.records
    assert len(expected)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("settings", [{}, {"shuffle_dataset": True, "seed": 3}, {"dataset_num_proc": 2}])
def test_packed_data(qwen: Any, caplog: pytest.LogCaptureFixture, strategy: str, settings: dict[str, Any]) -> None:
    found, expected = both(
        "SFTTrainer", MESSAGES, qwen, True, None, max_length=64, packing_strategy=strategy, **settings
    )
    equal(found, expected)
    assert not caplog.records


def test_order_and_names_of_sft_data(qwen: Any) -> None:
    equal(*both("SFTTrainer", MESSAGES, qwen, False, None, shuffle_dataset=True, seed=5))
    renamed = [{"body": row["text"]} for row in TEXTS]
    equal(*both("SFTTrainer", renamed, qwen, False, None, dataset_text_field="body"))
    picked = datasets.Dataset.from_list(MESSAGES).shuffle(seed=0).select(range(20))
    equal(*both("SFTTrainer", picked, qwen, False, None))


@pytest.mark.parametrize("limit", [{}, {"max_length": 40}])
@pytest.mark.parametrize(
    ("name", "rows", "settings"),
    [
        *(("DPOTrainer", rows, {}) for rows in (PAIRS, IMPLICIT, TEXT_PAIRS, IMPLICIT_TEXTS)),
        ("DPOTrainer", PAIRS, {"truncation_mode": "keep_end"}),
        *(("RewardTrainer", rows, {}) for rows in (PAIRS, IMPLICIT, TEXT_PAIRS, IMPLICIT_TEXTS)),
        *(("KTOTrainer", rows, {}) for rows in (PAIRS, IMPLICIT, TEXT_PAIRS, LABELED, LABELED_TEXTS)),
        ("KTOTrainer", LABELED, {"trainer_calculate_KL": False}),
        ("KTOTrainer", LABELED, {"dataset_num_proc": 2, "per_device_train_batch_size": 4}),
    ],
)
def test_preference_data(
    qwen: Any, caplog: pytest.LogCaptureFixture, name: str, rows: Any, settings: dict[str, Any], limit: dict[str, Any]
) -> None:
    found, expected = both(name, rows, qwen, **settings, **limit)
    equal(found, expected)
    assert not [record for record in caplog.records if record.name == LOG and "TRL prepares" in record.message]


def test_data_that_trl_prepares_itself(qwen: Any, caplog: pytest.LogCaptureFixture) -> None:
    def left_to_trl(name: str, rows: Any, why: str, *more: Any, **settings: Any) -> None:
        caplog.clear()
        found, expected = both(name, rows, qwen, *more, **settings)
        if isinstance(expected, datasets.Dataset):
            equal(found, expected)
        (message,) = [record.getMessage() for record in caplog.records if record.name == LOG]
        assert message == f"gpuload: TRL prepares the train dataset itself: {why}"

    plain: tuple[Any, ...] = (False, None)
    left_to_trl("SFTTrainer", [{"input_ids": [1, 2]}], "it is tokenized already: it has a column input_ids", *plain)
    stream = datasets.Dataset.from_list(MESSAGES).to_iterable_dataset()
    left_to_trl("SFTTrainer", stream, "it is read as a stream", *plain)
    left_to_trl("SFTTrainer", TEXTS, "formatting_func is set", False, lambda row: row["text"] + "!")
    turns = [{"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}]}]
    left_to_trl("SFTTrainer", turns, "its columns are conversations", *plain)
    named = [row | {"chat_template_kwargs": {"a": 1}} for row in MESSAGES]
    left_to_trl("SFTTrainer", named, "a column chat_template_kwargs is not supported", *plain)
    why = "precompute_ref_log_probs needs the dataset in a file"
    left_to_trl("DPOTrainer", PAIRS, why, precompute_ref_log_probs=True)


def test_rows_that_only_trl_keeps(qwen: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*COMPLETIONS, COMPLETIONS[1] | {"completion": []}]
    equal(*both("SFTTrainer", rows, qwen, False, None, trainer_completion_only_loss=True))
    assert "TRL prepares the train dataset itself: 1 of 46 rows cannot be tokenized: " in caplog.text


def test_other_rows_than_trls_are_noticed(
    qwen: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "load_chats", lambda *given, **named: load(*given, **named | {"loss_on": "assistant"}))
    from gpuload import load_chats as load

    equal(*both("SFTTrainer", MESSAGES, qwen, False, None))
    assert "its rows of a sample differ from those of load_chats and load_pairs" in caplog.text


def test_errors_are_those_of_trl(qwen: Any) -> None:
    rows = [{"messages": row["messages"][:1]} for row in MESSAGES]
    for kind in (trl.SFTTrainer, ours.SFTTrainer):
        with pytest.raises(RuntimeError, match="at least one example has no assistant tokens"):
            prepared(kind, trl.SFTConfig, rows, qwen, False, None, assistant_only_loss=True)


def test_kto_warns_of_weights_that_do_not_balance_labels(qwen: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOG):
        prepared(ours.KTOTrainer, trl.KTOConfig, LABELED, qwen)
    assert "15 rows are desirable and 30 are not" in caplog.text
    caplog.clear()
    prepared(ours.KTOTrainer, trl.KTOConfig, LABELED, qwen, trainer_desirable_weight=2.0)
    assert "are desirable" not in caplog.text
