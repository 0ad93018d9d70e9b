"""Prompts of a stream for TRL's `GRPOTrainer`: those that `prompts` makes of the same rows in memory; and losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tiers import exhaustive

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
from tokenizer_cases import small_tokenizer  # noqa: E402
from trl_cases import COMPLETIONS, user  # noqa: E402

from gpuload.core.errors import DataError, OptionError  # noqa: E402
from gpuload.integrations.trl import grpo, prompts  # noqa: E402
from gpuload.kinds.prompts import PromptKind  # noqa: E402

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ more }}"
ROWS = [{"answer": row["n"], "messages": row["prompt"]} for row in COMPLETIONS]
LIMIT = 60


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer(TEMPLATE)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "_BATCH", 10)


def typed(rows: list[Any]) -> Any:
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=min(3, len(rows)))


def untyped(rows: list[Any]) -> Any:
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


def kept(rows: list[Any], tokenizer: Any, limit: int = LIMIT, **settings: Any) -> list[Any]:
    """The rows whose prompts are not too long, as the tokenizer itself makes them."""

    def length(messages: Any) -> int:
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **settings)["input_ids"])

    return [{"prompt": row["messages"], "answer": row["answer"]} for row in rows if length(row["messages"]) <= limit]


@pytest.mark.parametrize("make", [typed, untyped])
@pytest.mark.parametrize("settings", [{}, {"more": "and more and more"}])
def test_prompts_of_a_stream(tokenizer: Any, make: Any, settings: dict[str, Any]) -> None:
    options = {"prompt_key": "messages", "apply_chat_template_kwargs": settings}
    expected = kept(ROWS, tokenizer, **settings)
    found = prompts(make(ROWS), tokenizer, LIMIT, **options)
    rows = list(found)
    assert rows == expected == list(prompts(pa.Table.from_pylist(ROWS), tokenizer, LIMIT, **options))
    assert [list(row) for row in rows] == [["prompt", "answer"]] * len(expected)
    assert 9 < len(expected) < len(ROWS)
    for stop in (1, 3, len(expected) - 1):
        position = iter(found)
        assert [next(position) for _ in range(stop)] == expected[:stop]
        again = prompts(make(ROWS), tokenizer, LIMIT, **options)
        again.load_state_dict(json.loads(json.dumps(found.state_dict())))
        assert list(again) == expected[stop:]


def test_types_of_a_stream_stay(tokenizer: Any) -> None:
    stream = typed(ROWS)
    found = prompts(stream, tokenizer, LIMIT, prompt_key="messages")
    assert list(found.features) == ["prompt", "answer"]
    assert found.features["prompt"] == stream.features["messages"]


def test_rows_are_those_of_the_stream(tokenizer: Any) -> None:
    """Messages keep their keys, and other columns their objects, also where no type of Arrow has all of them."""
    answers = [[k] if k % 2 else str(k) for k in range(25)]
    rows = [{"answer": answers[k], "messages": [user("one") | ({"id": k} if k % 3 else {})]} for k in range(25)]
    found = list(prompts(untyped(rows), tokenizer, LIMIT, prompt_key="messages"))
    assert found == [{"prompt": row["messages"], "answer": row["answer"]} for row in rows]
    assert list(prompts(untyped(rows), tokenizer, 1, prompt_key="messages")) == []


def test_all_batches_have_one_engine(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = PromptKind.engine
    monkeypatch.setattr(PromptKind, "engine", lambda *given: built.append(0) or build(*given))
    assert list(prompts(untyped(ROWS), tokenizer, LIMIT, prompt_key="messages")) == kept(ROWS, tokenizer)
    assert len(built) == 1


def test_rows_that_cannot_be_prompts(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    for bad in ("text", None, [{"role": "user", "content": [{"type": "text", "text": "x"}]}], ["text"]):
        stream = untyped([*ROWS, {"answer": 0, "messages": bad}])
        with pytest.raises(DataError, match="column 'messages' has no messages with text: TRL renders"):
            list(prompts(stream, tokenizer, LIMIT, prompt_key="messages"))
    assert not caplog.records
    rows = [*ROWS, *[{"answer": 0, "messages": []}] * 12]  # a whole batch, and more
    assert list(prompts(untyped(rows), tokenizer, LIMIT, prompt_key="messages")) == kept(ROWS, tokenizer)
    assert [record.message for record in caplog.records] == [
        "gpuload: prompts of a stream are dropped: prompt is an empty list"
    ]


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (DataError, "the stream has no column 'prompt': its columns are 'answer', 'messages'", {}),
        (DataError, "column 'prompt' exists next to prompt_key='messages'", {"prompt_key": "messages", "extra": True}),
        (OptionError, "max_samples=3 has no effect on a stream: use the methods of datasets", {"max_samples": 3}),
        (OptionError, "unknown option promt_key: did you mean prompt_key", {"promt_key": "messages"}),
        (OptionError, "turns='served' is not made of a stream yet", {"turns": "served"}),
    ],
)
def test_errors_before_rows_are_read(tokenizer: Any, kind: Any, message: str, options: dict[str, Any]) -> None:
    rows = [row | {"prompt": "x"} for row in ROWS] if options.pop("extra", False) else ROWS
    with pytest.raises(kind, match=message):
        prompts(typed(rows), tokenizer, LIMIT, **options)


def test_several_splits_are_an_error(tokenizer: Any) -> None:
    for splits in (datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}), {"test": untyped(ROWS)}):
        with pytest.raises(OptionError, match="files are the splits 'test': pass one of them"):
            prompts(splits, tokenizer, LIMIT)


@exhaustive
def test_losses_of_a_stream(tokenizer: Any, tmp_path: Path) -> None:
    """A trivial reward; TRL's trainer with the stream, and with a stream that has no long prompts."""
    trl = pytest.importorskip("trl")
    from export_cases import five_steps, small_model
    from transformers import Qwen2ForCausalLM

    def trained(stream: Any) -> Any:
        seen: list[Any] = []

        def reward(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
            seen.append((prompts, completions, answer))
            return [float(len(str(each)) % 7 + n) for each, n in zip(completions, answer, strict=True)]

        settings = {"num_generations": 2, "max_completion_length": 6}
        model = small_model(Qwen2ForCausalLM, tokenizer)
        more = {"reward_funcs": reward}
        losses = five_steps(trl.GRPOTrainer, trl.GRPOConfig, model, stream, tokenizer, tmp_path, more, **settings)[1]
        return losses, seen

    # With several shards, the trainer would shuffle those of other rows.
    stream, short = (datasets.Dataset.from_list(rows).to_iterable_dataset() for rows in (ROWS, kept(ROWS, tokenizer)))
    found, expected = trained(prompts(stream, tokenizer, LIMIT, prompt_key="messages")), trained(short)
    assert found == expected
    assert len(expected[1]) == 5
