"""The integration with TRL: streams are prepared batch by batch, to the rows that TRL makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
import torch  # noqa: E402
from tiers import core  # noqa: E402
from tokenizer_cases import WORDS, small_tokenizer  # noqa: E402
from trl_cases import (  # noqa: E402
    COMPLETIONS,
    IMPLICIT,
    LABELED,
    LABELED_TEXTS,
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
    ([row | {"image": "x", "images": None} for row in TEXTS], {}),
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
        ("KTOTrainer", LABELED, (), {"per_device_train_batch_size": 1}),
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


ONE_OF_EACH: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("SFTTrainer", MESSAGES, (False, None)),
    ("DPOTrainer", PAIRS, ()),
    ("RewardTrainer", PAIRS, ()),
    ("KTOTrainer", LABELED, ()),
]


@pytest.mark.parametrize(("name", "rows", "more"), core(ONE_OF_EACH, ONE_OF_EACH[0], ONE_OF_EACH[3]))
def test_a_stream_is_resumed_where_it_was(tokenizer: Any, name: str, rows: Any, more: Any) -> None:
    def streams_of_both() -> Any:
        return both(name, stream_of(rows), tokenizer, *more)

    found, expected = streams_of_both()
    whole = list(expected)
    for stop in (3, 10, len(whole) - 1):
        position = iter(found)
        assert [next(position) for _ in range(stop)] == whole[:stop]
        state = json.loads(json.dumps(found.state_dict()))
        again, theirs = streams_of_both()
        again.load_state_dict(state)
        assert list(again) == whole[stop:]
        position = iter(theirs)
        assert [next(position) for _ in range(stop)] == whole[:stop]
        again, theirs_again = streams_of_both()
        theirs_again.load_state_dict(json.loads(json.dumps(theirs.state_dict())))
        assert list(theirs_again) == whole[stop:]


@pytest.mark.parametrize(("name", "rows", "more"), core(ONE_OF_EACH, ONE_OF_EACH[0]))
def test_workers_share_a_stream(tokenizer: Any, name: str, rows: Any, more: Any) -> None:
    def read(stream: Any) -> list[str]:
        loader = torch.utils.data.DataLoader(stream, 4, num_workers=2, collate_fn=list)
        return sorted(repr(row) for batch in loader for row in batch)

    found, expected = (read(each) for each in both(name, stream_of(rows), tokenizer, *more))
    assert found == expected
    assert len(found) == len(rows)


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


def test_a_stream_that_trl_prepares_itself(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    found, expected = both("SFTTrainer", stream_of([{"input_ids": [1, 2]}]), tokenizer, False, None)
    assert str(list(found)) == str(list(expected))
    why = "it is tokenized already: it has a column input_ids"
    assert said(caplog) == [f"gpuload: falls back to TRL for the train dataset: {why}"]


@pytest.mark.parametrize("make", [stream_of, untyped])
@pytest.mark.parametrize("rows", core([LABELED, LABELED_TEXTS, PAIRS, IMPLICIT], LABELED, IMPLICIT))
@pytest.mark.parametrize("settings", core([{"per_device_train_batch_size": 4}, {"max_length": 40}], {"max_length": 40}))
def test_kto(tokenizer: Any, caplog: pytest.LogCaptureFixture, rows: Any, settings: dict[str, Any], make: Any) -> None:
    """Each row gets the completion of another one, which may be of another batch of the stream."""
    found, expected = both("KTOTrainer", make(rows), tokenizer, **settings)
    found, expected = list(found), list(expected)
    assert found == expected
    assert [list(row) for row in found] == [list(row) for row in expected]
    assert 5 < len(expected) <= 2 * len(rows)
    assert not said(caplog)


def test_kto_without_completions_of_other_rows(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    found, expected = both("KTOTrainer", stream_of(LABELED), tokenizer, trainer_calculate_KL=False)
    assert list(found) == list(expected)
    assert not said(caplog)


def test_kto_with_a_batch_that_trl_prepares(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its rows get the completions of rows that were tokenized by columns, and the reverse."""
    rows = json.loads(json.dumps(LABELED))
    rows[25]["prompt"][0]["reasoning_content"] = "because"
    found, expected = both("KTOTrainer", untyped(rows), tokenizer, per_device_train_batch_size=7)
    assert list(found) == list(expected)
    assert len(said(caplog)) == 1


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
