"""A TRL whose code is not known: what it prepares is compared with ours, and the log says how that went."""

from __future__ import annotations

import functools
from typing import Any

import pytest

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from tokenizer_cases import small_tokenizer  # noqa: E402
from trl_cases import IMPLICIT, LABELED, MESSAGES, PAIRS, PLAIN, TEXTS, equal, prepared  # noqa: E402

from gpuload.integrations import trl as ours  # noqa: E402
from gpuload.integrations.trl import contract, preparation  # noqa: E402

LOG = "gpuload.integrations.trl"
RELEASE = f"TRL {trl.__version__}"
SFT: tuple[Any, ...] = (False, None)
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"""


@pytest.fixture
def tokenizer() -> Any:
    return small_tokenizer(TEMPLATE)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "KNOWN", {})
    trainers = pytest.importorskip("gpuload.integrations.trl.trainers")
    monkeypatch.setattr(trainers, "KNOWN", {})


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == LOG]


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize(
    ("name", "rows", "more", "settings"),
    [
        ("SFTTrainer", MESSAGES, SFT, {}),
        ("SFTTrainer", MESSAGES * 2, SFT, {"max_length": 30}),
        ("SFTTrainer", MESSAGES, (True, None), {"max_length": 64}),
        ("SFTTrainer", PLAIN, SFT, {"max_length": 12, "trainer_completion_only_loss": True, "shuffle_dataset": True}),
        ("DPOTrainer", IMPLICIT, (), {"max_length": 20}),
        ("RewardTrainer", PAIRS, (), {"max_length": 30}),
        ("KTOTrainer", LABELED, (), {"max_length": 30}),
        ("KTOTrainer", PAIRS, (), {"dataset_num_proc": 2}),
    ],
)
def test_code_that_is_not_known_is_used_if_rows_are_equal(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, name: str, rows: Any, more: Any, settings: dict[str, Any]
) -> None:
    config = getattr(trl, name.replace("Trainer", "Config"))
    found = prepared(getattr(ours, name), config, rows, tokenizer, *more, **settings)
    lines = [line for line in said(caplog) if "desirable" not in line]
    count = min(len(rows), 64)
    assert lines == [
        f"gpuload: {RELEASE}: {name}._prepare_dataset has changed; {count} rows prepared by both are equal: used"
    ]
    equal(found, prepared(getattr(trl, name), config, rows, tokenizer, *more, **settings))


def changed_method(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """TRL's method, with another result: `change` gets it and the dataset's name."""
    stock = trl.SFTTrainer._prepare_dataset

    @functools.wraps(stock)
    def method(self: Any, dataset: Any, *given: Any, **named: Any) -> Any:
        return change(stock(self, dataset, *given, **named), named.get("dataset_name", given[-1] if given else ""))

    del method.__wrapped__  # type: ignore[attr-defined]
    method.__signature__ = __import__("inspect").signature(stock)  # type: ignore[attr-defined]
    monkeypatch.setattr(trl.SFTTrainer, "_prepare_dataset", method)


def test_a_method_with_the_same_result_is_used(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_method(monkeypatch, lambda made, name: made)
    prepared(ours.SFTTrainer, trl.SFTConfig, MESSAGES, tokenizer, *SFT)
    assert said(caplog) == [
        f"gpuload: {RELEASE}: SFTTrainer._prepare_dataset has changed; 45 rows prepared by both are equal: used"
    ]


FALLS_BACK = (
    f"gpuload: falls back to TRL for the train dataset: {RELEASE}: SFTTrainer._prepare_dataset has changed, and "
)


@pytest.mark.parametrize(
    ("change", "settings", "why"),
    [
        # Each row, in the sample too.
        (
            lambda made, name: made.map(lambda row: {"input_ids": row["input_ids"][:-1]}),
            {},
            "its rows of a sample differ",
        ),
        # Only where it is truncated, which the sample is not.
        (
            lambda made, name: made if "sample" in name else made.filter(lambda row: len(row["input_ids"]) < 30),
            {"max_length": 30},
            "45 rows prepared by both differ",
        ),
    ],
)
def test_a_method_with_another_result_is_not(
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    settings: Any,
    why: str,
) -> None:
    changed_method(monkeypatch, change)
    found = prepared(ours.SFTTrainer, trl.SFTConfig, MESSAGES, tokenizer, *SFT, **settings)
    (line,) = said(caplog)
    assert line.startswith(FALLS_BACK + why)
    equal(found, prepared(trl.SFTTrainer, trl.SFTConfig, MESSAGES, tokenizer, *SFT, **settings))


def test_a_method_that_raises_an_error(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(made: Any, name: str) -> Any:
        if "sample" not in name:
            raise RuntimeError("new")
        return made

    changed_method(monkeypatch, change)
    with pytest.raises(RuntimeError, match="new"):
        prepared(ours.SFTTrainer, trl.SFTConfig, TEXTS, tokenizer, *SFT)
    assert said(caplog) == [FALLS_BACK + "TRL raises RuntimeError: new"]


@pytest.mark.usefixtures("unknown")
def test_what_is_not_supported_is_not_compared(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_difference", None)
    prepared(ours.SFTTrainer, trl.SFTConfig, [{"input_ids": [1, 2]}], tokenizer, False, None)
    why = "it is tokenized already: it has a column input_ids"
    assert said(caplog) == [f"gpuload: falls back to TRL for the train dataset: {why}"]
