"""The integration with TRL: streams are prepared batch by batch, to the rows that TRL makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
import torch  # noqa: E402
from tokenizer_cases import WORDS, small_tokenizer  # noqa: E402
from trl_cases import (  # noqa: E402
    COMPLETIONS,
    IMPLICIT,
    LABELED,
    MESSAGES,
    PAIRS,
    PLAIN,
    TEXT_PAIRS,
    TEXTS,
    TOOLS,
    chat,
    prepared,
)

from gpuload.integrations import trl as ours  # noqa: E402
from gpuload.integrations.trl import streams  # noqa: E402
from gpuload.kinds.training_options import training_engine  # noqa: E402

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text()
SHAREGPT = [
    {"conversations": [{"from": message["role"], "value": message["content"]} for message in chat(row)], "n": row}
    for row in range(45)
]
LOG = "gpuload.integrations.trl"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer(QWEN3)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_BATCH", 10)


def stream_of(rows: list[Any]) -> Any:
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=min(3, len(rows)))


def untyped(rows: list[Any]) -> Any:
    """A stream whose columns are unknown until its rows are read."""
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


def both(name: str, stream: Any, tokenizer: Any, *more: Any, **settings: Any) -> tuple[Any, Any]:
    config = getattr(trl, name.replace("Trainer", "Config"))
    found, expected = (
        prepared(getattr(kind, name), config, stream, tokenizer, *more, **settings) for kind in (ours, trl)
    )
    assert type(found) is type(expected) is datasets.IterableDataset
    return found, expected


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == LOG]


SFT: list[tuple[Any, dict[str, Any]]] = [
    (MESSAGES, {}),
    (MESSAGES, {"assistant_only_loss": True, "trainer_chat_template": QWEN3, "max_length": 30}),
    (TOOLS, {}),
    (COMPLETIONS, {"trainer_completion_only_loss": True, "max_length": 30}),
    (COMPLETIONS, {"assistant_only_loss": True, "trainer_chat_template": QWEN3}),
    (TEXTS, {"shuffle_dataset": True, "seed": 3}),
    (PLAIN, {"max_length": 12, "truncation_mode": "keep_end"}),
]


@pytest.mark.parametrize("make", [stream_of, untyped])
@pytest.mark.parametrize(("rows", "settings"), SFT)
def test_sft_data(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, rows: Any, settings: dict[str, Any], make: Any
) -> None:
    found, expected = both("SFTTrainer", make(rows), tokenizer, False, None, **settings)
    found, expected = list(found), list(expected)
    assert found == expected
    assert [list(row) for row in found] == [list(row) for row in expected]
    assert expected
    assert not said(caplog)


def test_sharegpt(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    found, expected = both("SFTTrainer", stream_of(SHAREGPT), tokenizer, False, None)
    assert list(found) == list(expected)
    assert not said(caplog)


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_packed_data(tokenizer: Any, caplog: pytest.LogCaptureFixture, strategy: str) -> None:
    settings = {"max_length": 64, "packing_strategy": strategy}
    found, expected = both("SFTTrainer", stream_of(MESSAGES), tokenizer, True, None, **settings)
    assert list(found) == list(expected)
    assert not said(caplog)


def test_a_function_that_makes_texts(tokenizer: Any) -> None:
    found, expected = both("SFTTrainer", stream_of(MESSAGES), tokenizer, False, lambda row: row["source"] + " x")
    assert list(found) == list(expected)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("DPOTrainer", PAIRS), ("DPOTrainer", IMPLICIT), ("DPOTrainer", TEXT_PAIRS), ("RewardTrainer", PAIRS)],
)
@pytest.mark.parametrize("settings", [{}, {"max_length": 70}])
def test_preference_data(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, name: str, rows: Any, settings: dict[str, Any]
) -> None:
    found, expected = both(name, stream_of(rows), tokenizer, **settings)
    assert list(found) == list(expected)
    assert not said(caplog)


@pytest.mark.parametrize(
    ("name", "rows", "more", "settings"),
    [
        ("SFTTrainer", MESSAGES, (False, None), {}),
        ("SFTTrainer", MESSAGES, (False, None), {"assistant_only_loss": True, "trainer_chat_template": QWEN3}),
        ("SFTTrainer", COMPLETIONS, (False, None), {"trainer_completion_only_loss": True}),
        ("DPOTrainer", PAIRS, (), {}),
    ],
)
def test_all_batches_have_one_engine(
    name: str, rows: Any, more: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a tokenizer that changes meanwhile changes the batches that follow, as it does for TRL."""
    built: list[Any] = []
    monkeypatch.setattr(streams, "training_engine", lambda *given, **named: built.append(0) or build(*given, **named))
    build = training_engine
    tokenizer = small_tokenizer(QWEN3)
    found, expected = both(name, stream_of(rows), tokenizer, *more, **settings)
    found, expected = iter(found), iter(expected)
    assert [next(found) for _ in range(30)] == [next(expected) for _ in range(30)]
    assert len(built) == 1
    tokenizer.add_tokens([word for word in WORDS if len(word) > 3])
    rest = list(expected)
    assert list(found) == rest
    assert rest
    assert len(built) == 2


def test_a_stream_is_resumed_where_it_was(tokenizer: Any) -> None:
    found, expected = both("SFTTrainer", stream_of(MESSAGES), tokenizer, False, None)
    rows = list(expected)
    for stop in (0, 3, 10, 17, len(rows) - 1):
        position = iter(found)
        assert [next(position) for _ in range(stop)] == rows[:stop]
        state = json.loads(json.dumps(found.state_dict()))
        again, _ = both("SFTTrainer", stream_of(MESSAGES), tokenizer, False, None)
        again.load_state_dict(state)
        assert list(again) == rows[stop:]


def test_workers_share_a_stream(tokenizer: Any) -> None:
    found, expected = both("SFTTrainer", stream_of(MESSAGES), tokenizer, False, None)
    first: list[Any] = []
    second: list[Any] = []
    for each, ids in zip((found, expected), (first, second), strict=True):
        for batch in torch.utils.data.DataLoader(each, 4, num_workers=2, collate_fn=list):
            ids += [row["input_ids"] for row in batch]
    assert sorted(first) == sorted(second)
    assert len(first) == len(MESSAGES)


def test_messages_with_other_keys(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """They are not the same with null for a key that they do not have."""
    rows = json.loads(json.dumps(MESSAGES))
    rows[25]["messages"][0]["reasoning_content"] = "because"
    found, expected = both("SFTTrainer", untyped(rows), tokenizer, False, None)
    assert list(found) == list(expected)
    assert said(caplog) == [
        "gpuload: falls back to TRL for some rows of the train dataset: messages have different keys"
    ]


def test_a_row_that_trl_rejects(tokenizer: Any) -> None:
    rows = [*MESSAGES[:30], {"messages": chat(0)[:1], "source": "", "n": 0}]
    settings = {"assistant_only_loss": True, "trainer_chat_template": QWEN3}
    errors = []
    for each in both("SFTTrainer", stream_of(rows), tokenizer, False, None, **settings):
        with pytest.raises(RuntimeError, match="has no assistant tokens") as raised:
            list(each)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("why", "stream"),
    [
        ("it is tokenized already: it has a column input_ids", stream_of([{"input_ids": [1, 2]}])),
        ("a column image is not supported", stream_of([row | {"image": "x"} for row in TEXTS])),
    ],
)
def test_streams_that_trl_prepares_itself(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, why: str, stream: Any
) -> None:
    found, expected = both("SFTTrainer", stream, tokenizer, False, None)
    assert str(list(found)) == str(list(expected))
    assert said(caplog) == [f"gpuload: falls back to TRL for the train dataset: {why}"]


def test_kto(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each row gets the completion of another one."""
    found, expected = both("KTOTrainer", stream_of(LABELED), tokenizer)
    assert list(found) == list(expected)
    assert said(caplog) == ["gpuload: falls back to TRL for the train dataset: it is read as a stream"]


def test_rows_that_differ_from_those_of_trl(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_columns = streams._BatchSteps.by_columns
    monkeypatch.setattr(
        streams._BatchSteps, "by_columns", lambda self, batch: dict(by_columns(self, batch)) | {"n": [0] * 16}
    )
    found, expected = both("SFTTrainer", stream_of(MESSAGES), tokenizer, False, None)
    assert list(found) == list(expected)
    assert "its first 16 rows differ from TRL's" in caplog.text
