"""The integration with TRL: what `_prepare_dataset` makes of every kind of data equals what TRL makes of it."""

from __future__ import annotations

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
    assert not [record for record in caplog.records if record.name == LOG and "falls back" in record.message]
