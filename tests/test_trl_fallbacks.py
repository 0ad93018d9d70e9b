"""What the integration with TRL does not prepare itself: it says why, and the result is TRL's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from tokenizer_cases import small_tokenizer  # noqa: E402
from trl_cases import COMPLETIONS, LABELED, MESSAGES, PAIRS, Row, chat, equal, prepared  # noqa: E402

import gpuload  # noqa: E402
from gpuload.integrations import trl as ours  # noqa: E402
from gpuload.integrations.trl import steps  # noqa: E402

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text()
LOG = "gpuload.integrations.trl"
PLAIN: tuple[Any, ...] = (False, None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer(QWEN3)


def result_of(kind: Any, name: str, rows: Any, tokenizer: Any, *more: Any, **settings: Any) -> Any:
    """What a trainer makes of rows: a dataset, or the error."""
    config = getattr(trl, name.replace("Trainer", "Config"))
    try:
        return prepared(getattr(kind, name), config, rows, tokenizer, *more, **settings)
    except Exception as error:
        return error


def structured(message: Row) -> Row:
    return {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}


NO_TURNS = [{"conversations": [{"from": "user", "content": "Hi"}]}]
TWO_TEXTS = [{"prompt": "a", "completion": "b", "n": 1, "text": "c"}]
STRUCTURED = [{"messages": [structured(message) for message in row["messages"]]} for row in MESSAGES]
TEMPLATED = [row | {"chat_template_kwargs": {"tools": [{"name": "f"}]}} for row in MESSAGES]
FORMATTED = datasets.Dataset.from_list(MESSAGES).with_format("numpy")
CHOSEN = datasets.Dataset.from_list(MESSAGES).with_format(None, columns=["messages"])
TRANSFORMED = datasets.Dataset.from_list(MESSAGES).with_transform(lambda rows: rows)


MIXED = "prompts and answers are neither all text nor all messages with text"


@pytest.mark.parametrize(
    ("why", "rows", "more", "settings"),
    [
        ("it has a format or a transform", FORMATTED, PLAIN, {}),
        ("it has a format or a transform", CHOSEN, PLAIN, {}),
        ("it has a format or a transform", TRANSFORMED, PLAIN, {}),
        ("it is tokenized already: it has a column input_ids", [{"input_ids": [1, 2]}], PLAIN, {}),
        ("messages are neither texts nor messages with text", STRUCTURED, PLAIN, {}),
        ("its columns are conversations", NO_TURNS, PLAIN, {}),
        ("its columns are prompt, completion, n, text", TWO_TEXTS, PLAIN, {}),
        ("its columns are messages, prompt", [{"messages": chat(n), "prompt": chat(n)} for n in range(9)], PLAIN, {}),
        ("chat_template_kwargs has tools", TEMPLATED, PLAIN, {}),
        ("packing needs max_length", MESSAGES, (True, None), {}),
        (MIXED, [row | {"prompt": "one"} for row in PAIRS], "DPO", {}),
        ("it has no column rejected", [{"chosen": row["chosen"]} for row in PAIRS], "Reward", {}),
        ("it has a column messages too", [row | {"messages": "x"} for row in LABELED], "KTO", {}),
    ],
)
def test_data_that_trl_prepares_itself(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, why: str, rows: Any, more: Any, settings: Any
) -> None:
    """`more` are further arguments of SFT's preparation, or the name of another trainer."""
    name, more = (f"{more}Trainer", ()) if isinstance(more, str) else ("SFTTrainer", more)
    found, expected = (result_of(kind, name, rows, tokenizer, *more, **settings) for kind in (ours, trl))
    if isinstance(expected, Exception):
        assert (type(found), str(found)) == (type(expected), str(expected))
    elif isinstance(expected, datasets.Dataset):
        equal(found, expected)
    else:
        assert list(found) == list(expected)
    said = [record.message for record in caplog.records if record.name == LOG]
    assert said == [f"gpuload: falls back to TRL for the train dataset: {why}"]


def test_processes_that_have_no_effect(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"dataset_num_proc": 1, "trainer_calculate_KL": False}
    result_of(ours, "SFTTrainer", MESSAGES, tokenizer, *PLAIN, **settings)
    result_of(ours, "SFTTrainer", COMPLETIONS, tokenizer, True, None, max_length=64, **settings)
    said = [record.message for record in caplog.records if record.name == LOG]
    # The second dataset is packed, by TRL's function.
    assert said == ["gpuload: dataset_num_proc=1 has no effect: the train dataset is tokenized by columns"]


def test_a_row_that_cannot_be_tokenized(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """TRL keeps it or raises an error: which column it looks at depends on the order of a set of names."""
    rows = [*COMPLETIONS, COMPLETIONS[1] | {"completion": []}, *COMPLETIONS]
    settings = {"trainer_completion_only_loss": True}
    found, expected = (result_of(kind, "SFTTrainer", rows, tokenizer, *PLAIN, **settings) for kind in (ours, trl))
    if isinstance(expected, Exception):
        assert (type(found), str(found)) == (type(expected), str(expected))
    else:
        equal(found, expected)
    assert "falls back to TRL for the train dataset: 1 of 91 rows cannot be tokenized: " in caplog.text


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer"])
def test_rows_that_differ_from_those_of_trl(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def chats(kind: Any, table: Any, tokenizer: Any, options: dict[str, Any], engines: Any) -> Any:
        return gpuload.load_chats(table, tokenizer, **options | {"loss_on": "last"})

    def pairs(kind: Any, table: Any, tokenizer: Any, options: dict[str, Any], engines: Any) -> Any:
        turned = [{"chosen": "rejected", "rejected": "chosen"}.get(name, name) for name in table.column_names]
        return gpuload.load_pairs(table.rename_columns(turned), tokenizer, **options)

    monkeypatch.setattr(steps, "load_given", chats if name == "SFTTrainer" else pairs)
    rows, more = (MESSAGES, PLAIN) if name == "SFTTrainer" else (PAIRS, ())
    equal(*(result_of(kind, name, rows, tokenizer, *more) for kind in (ours, trl)))
    assert "its rows of a sample differ from those of load_chats and load_pairs" in caplog.text


def test_errors_are_those_of_trl(tokenizer: Any) -> None:
    rows = [{"messages": row["messages"][:1]} for row in MESSAGES]
    found, expected = (
        result_of(kind, "SFTTrainer", rows, tokenizer, *PLAIN, assistant_only_loss=True, trainer_chat_template=QWEN3)
        for kind in (ours, trl)
    )
    assert isinstance(expected, RuntimeError)
    assert (type(found), str(found)) == (type(expected), str(expected))


def test_kto_warns_of_weights_that_do_not_balance_labels(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOG):
        result_of(ours, "KTOTrainer", LABELED, tokenizer)
    assert "15 rows are desirable and 30 are not" in caplog.text
    caplog.clear()
    result_of(ours, "KTOTrainer", LABELED, tokenizer, trainer_desirable_weight=2.0)
    assert "are desirable" not in caplog.text
