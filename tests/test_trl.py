"""The integration with TRL: what `_prepare_dataset` makes of every kind of data equals what TRL makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tiers import core

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from tokenizer_cases import small_tokenizer  # noqa: E402
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
    assistant,
    equal,
    prepared,
    unhashed,
    user,
)  # fmt: skip

from gpuload.integrations import trl as ours  # noqa: E402
from gpuload.pipeline.verify import Verifier  # noqa: E402

TOOL_COMPLETIONS = [row | {"tools": tools["tools"]} for row, tools in zip(COMPLETIONS, TOOLS, strict=True)]
QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer(QWEN3)


def ours_said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our lines in the log. TRL's own, of the sample or of its own preparation, depend on what it has said before."""
    return [record.message for record in caplog.records if record.name.startswith("gpuload")]


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
        (COMPLETIONS, {"assistant_only_loss": True, "trainer_chat_template": QWEN3}),
        (TOOL_COMPLETIONS, {"assistant_only_loss": True, "trainer_chat_template": QWEN3}),
        (TEXTS, {}),
        (PLAIN, {}),
        (PLAIN, {"trainer_completion_only_loss": True}),
    ],
)
def test_sft_data(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, rows: Any, settings: dict[str, Any], limit: dict[str, Any]
) -> None:
    found, expected = both("SFTTrainer", rows, tokenizer, False, None, **settings, **limit)
    equal(found, expected)
    assert not ours_said(caplog)
    assert len(expected)


@pytest.mark.parametrize(
    ("name", "rows", "more"),
    [
        ("SFTTrainer", [row | {"images": None} for row in MESSAGES], (False, None)),
        ("SFTTrainer", [row | {"image": "x"} for row in TEXTS], (False, None)),
        ("DPOTrainer", [row | {"images": None} for row in PAIRS], ()),
        ("RewardTrainer", [row | {"images": [row["n"]]} for row in PAIRS], ()),
        ("KTOTrainer", [row | {"images": []} for row in LABELED], ()),
    ],
)
def test_a_column_of_images_is_a_further_column(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, name: str, rows: Any, more: Any
) -> None:
    """TRL's method does not look at it: its trainers call the method only if the data of training have none."""
    equal(*both(name, rows, tokenizer, *more))
    assert "falls back" not in " ".join(ours_said(caplog))


def test_sft_data_with_the_tokenizer_of_a_model(qwen: Any) -> None:
    equal(*both("SFTTrainer", MESSAGES, qwen, False, None, assistant_only_loss=True, trainer_chat_template=QWEN3))


@pytest.mark.parametrize(
    ("name", "rows", "more"),
    [
        ("SFTTrainer", MESSAGES, (False, None)),
        ("DPOTrainer", TEXT_PAIRS, ()),
        ("RewardTrainer", IMPLICIT_TEXTS, ()),
        ("KTOTrainer", LABELED, ()),
    ],
)
def test_rows_do_not_depend_on_their_name(tokenizer: Any, qwen: Any, name: str, rows: Any, more: Any) -> None:
    """Oracles of other tests, and the sample of ours, are made by TRL of data that `map` does not name by a digest of
    the tokenizer. Here it does, for each trainer, with the tokenizer of a model."""
    trainer, config = getattr(trl, name), getattr(trl, name.replace("Trainer", "Config"))
    named = prepared(trainer, config, rows[:9], qwen, *more)
    found = prepared(trainer, config, unhashed(rows[:9]), qwen, *more)
    equal(found, named)
    assert found._fingerprint == "sample" != named._fingerprint
    shortest = [prepared(trainer, config, each, tokenizer, *more, max_length=30) for each in (unhashed(rows), rows)]
    equal(*shortest)  # with the name that `filter` gives


def test_a_warning_of_trl_is_given(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The prompt ends with a part of a token, which TRL warns of once per process."""
    from trl.trainer.sft_trainer import logger

    type(logger).warning_once.cache_clear()
    rows = [{"prompt": "t" * n + " tw", "completion": "o two"} for n in range(20)]
    prepared(ours.SFTTrainer, trl.SFTConfig, rows, tokenizer, False, None)
    said = [record.message for record in caplog.records if record.name == "trl.trainer.sft_trainer"]
    assert ["is not a prefix" in line for line in said] == [True]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("settings", core([{}, {"shuffle_dataset": True, "seed": 3}, {"dataset_num_proc": 2}], {}))
def test_packed_data(tokenizer: Any, caplog: pytest.LogCaptureFixture, strategy: str, settings: dict[str, Any]) -> None:
    found, expected = both(
        "SFTTrainer", MESSAGES, tokenizer, True, None, max_length=64, packing_strategy=strategy, **settings
    )
    equal(found, expected)
    assert not ours_said(caplog)


def test_order_and_names_of_sft_data(tokenizer: Any) -> None:
    equal(*both("SFTTrainer", MESSAGES, tokenizer, False, None, shuffle_dataset=True, seed=5))
    renamed = [{"body": row["text"]} for row in TEXTS]
    equal(*both("SFTTrainer", renamed, tokenizer, False, None, dataset_text_field="body"))
    picked = datasets.Dataset.from_list(MESSAGES).shuffle(seed=0).select(range(20))
    equal(*both("SFTTrainer", picked, tokenizer, False, None))


@pytest.mark.parametrize("limit", core([{}, {"max_length": 40}], {"max_length": 40}))
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
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
    name: str,
    rows: Any,
    settings: dict[str, Any],
    limit: dict[str, Any],
) -> None:
    found, expected = both(name, rows, tokenizer, **settings, **limit)
    equal(found, expected)
    assert not [line for line in ours_said(caplog) if "falls back" in line]


def rows_with_fields(name: str, where: str) -> Any:
    """Rows of which one, which is not in the sample, has a field that the other part of its conversation lacks."""
    rows = []
    for number in range(60):
        prompt, answers = [user(f"q {number}")], [[assistant(f"{part} {number}")] for part in "ab"]
        if number == 33:
            message = prompt[0] if where == "prompt" else answers[0][0]
            message["reasoning_content"] = message["name"] = "because"
        parts = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
        rows.append({"prompt": prompt, "completion": answers[0]} if name == "SFTTrainer" else parts)
    return datasets.Dataset(
        datasets.table.InMemoryTable(pa.Table.from_pylist(rows))
    )  # `from_list` would make JSON of such rows


@pytest.mark.parametrize("where", ["prompt", "answer"])
@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer"])
def test_fields_that_only_one_part_has(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str, where: str) -> None:
    """Also if no sample happens to have the row."""
    monkeypatch.setattr(Verifier, "compare", lambda *_: 0)
    template = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }} {{ m.content }}<|im_end|>{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    rows = rows_with_fields(name, where)
    found, expected = both(name, rows, tokenizer, *((False, None) if name == "SFTTrainer" else ()))
    ids = [column for column in expected.column_names if column.endswith("ids") or column == "labels"]
    assert ids
    for column in ids:
        assert list(found[column]) == list(expected[column])


SHAREGPT = [
    {
        "conversations": [
            {"from": message["role"], "value": message["content"], "w": 1} for message in row["messages"]
        ],
        "n": row["n"],
    }
    for row in MESSAGES
]
WITH_TEXT = [row | {"text": f"text {row['n']}"} for row in MESSAGES]


@pytest.mark.parametrize(
    ("rows", "function"),
    [
        (SHAREGPT, None),
        (WITH_TEXT, None),
        ([row | {"text": "t"} for row in COMPLETIONS], None),
        (
            [{"question": row["prompt"], "answer": row["completion"]} for row in PLAIN],
            lambda row: row["question"] + "!",
        ),
        (TEXTS, lambda row: row["text"].upper()),
        (MESSAGES, lambda row: str(row["n"])),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"max_length": 30}])
def test_data_that_becomes_text_or_messages(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, rows: Any, function: Any, settings: Any
) -> None:
    equal(*both("SFTTrainer", unhashed(rows), tokenizer, False, function, **settings))
    assert ours_said(caplog) == []


def test_sharegpt_with_loss_on_answers(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    equal(*both("SFTTrainer", unhashed(SHAREGPT), tokenizer, False, None, assistant_only_loss=True))
    assert ours_said(caplog) == []


def templated(rows: Any) -> Any:
    flags = [True, False, None]
    return [row | {"chat_template_kwargs": {"enable_thinking": flags[n % 3]}} for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("name", "rows", "settings"),
    [
        ("SFTTrainer", MESSAGES, {}),
        ("SFTTrainer", TOOLS, {}),
        ("SFTTrainer", COMPLETIONS, {"trainer_completion_only_loss": True}),
        ("DPOTrainer", PAIRS, {}),
        ("RewardTrainer", PAIRS, {}),
        ("KTOTrainer", LABELED, {"trainer_desirable_weight": 2.0}),
    ],
)
def test_rows_with_arguments_of_the_template(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, name: str, rows: Any, settings: Any
) -> None:
    rows = templated(rows)
    more = (False, None) if name == "SFTTrainer" else ()
    found, expected = both(name, unhashed(rows), tokenizer, *more, **settings)
    equal(found, expected)
    assert ours_said(caplog) == ["gpuload: rows have chat_template_kwargs; 45 rows prepared by both are equal: used"]
