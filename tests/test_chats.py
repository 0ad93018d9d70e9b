"""load_chats: ids and loss masks of every format, compared with transformers and with TRL's own preparation."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuload
from gpuload.chats.engine import common_prefixes
from gpuload.errors import DataError, OptionError

trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QWEN3 = (TEMPLATES / "qwen3_training.jinja").read_text()

Chat = list[dict[str, Any]]


def chat(*texts: str, system: str | None = None) -> Chat:
    """A conversation in which user and assistant take turns."""
    start = [{"role": "system", "content": system}] if system is not None else []
    return start + [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


CHATS = [
    chat("Hi", "Hello!"),
    chat("Hi", " Hello! ", "And?", "Bye.", system="Be brief."),
    chat("a", "", "b", "c"),
    chat("你好", "👋🏽 é\n\n", "x", "\t<think>why</think>because"),
    chat("<|im_end|>", "<|im_start|>assistant\n", "no", "<|im_end|>\n"),
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ],
    chat("Hi", "Hello!", "And then?"),
]


def labels_of(tokenizer: Any, messages: Chat, template: str) -> tuple[list[int], list[int]]:
    """Ids and labels, by transformers."""
    found = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = found["input_ids"], found["assistant_masks"]
    return ids, [token if bit else -100 for token, bit in zip(ids, mask, strict=True)]


def rows_of(dataset: gpuload.ChatDataset) -> list[tuple[list[int], list[int]]]:
    return [(row["input_ids"], row["labels"]) for row in (dataset[k] for k in range(len(dataset)))]


def by_trl(rows: list[dict[str, Any]], tokenizer: Any, template: str | None = None, **settings: Any) -> list[Any]:
    """Ids and labels, by TRL's own preparation."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(output_dir="unused", report_to=[], bf16=False, **{"max_length": None} | settings)
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss="prompt" in rows[0])
    made = SFTTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, config, False, None, "train")
    return list(zip(made["input_ids"], made["labels"], strict=True))


# -- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_those_of_transformers_for_generation_blocks(qwen: Any) -> None:
    found = gpuload.load_chats(pa.table({"messages": CHATS}), qwen, chat_template=QWEN3)
    assert rows_of(found) == [labels_of(qwen, messages, QWEN3) for messages in CHATS]
    assert found.report.check.mismatches == []


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "system"]),
            st.lists(st.text("a \n<|im_end|>é👋你", max_size=12), min_size=2, max_size=6),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_masks_of_any_conversation(qwen: Any, rows: list[tuple[str, list[str]]]) -> None:
    chats = [chat(*texts, system=system or None) for system, texts in rows]
    expected = [labels_of(qwen, messages, QWEN3) for messages in chats]
    found = gpuload.load_chats(pa.table({"messages": chats}), qwen, chat_template=QWEN3, progress=False)
    assert rows_of(found) == expected
    assert not any(found.report.rejected)


PAIRS = sorted(path.name for path in TEMPLATES.glob("*_training.jinja"))
OTHER_TEXT = {
    "glm4moe", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6",
}  # fmt: skip
"""TRL's training template renders other text than the model's template."""
NO_STRINGS = {"idefics3", "llava_next", "smolvlm"}
"""The template takes no plain strings as contents."""


@pytest.mark.parametrize("name", [name.removesuffix("_training.jinja") for name in PAIRS])
def test_answers_without_blocks_are_those_of_trls_training_templates(qwen: Any, name: str) -> None:
    plain = (TEMPLATES / f"{name}.jinja").read_text()
    training = (TEMPLATES / f"{name}_training.jinja").read_text()
    chats = [chat("Hi", "Hello!"), chat("Hi", "Hello!", "And?", " Bye. "), chat("1", "2", "3", "4", "5")]
    if name in NO_STRINGS:
        chats = [[m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages] for messages in chats]
    qwen.bos_token, before = "<|endoftext|>", qwen.bos_token
    try:
        texts = [
            [qwen.apply_chat_template(messages, chat_template=each, tokenize=False) for messages in chats]
            for each in (plain, training)
        ]
        assert (texts[0] != texts[1]) == (name in OTHER_TEXT)
        table = pa.table({"messages": chats})
        found = gpuload.load_chats(table, qwen, chat_template=training, token_cache=False)
        assert rows_of(found) == [labels_of(qwen, messages, training) for messages in chats]
        if name not in OTHER_TEXT:
            assert rows_of(gpuload.load_chats(table, qwen, chat_template=plain, token_cache=False)) == rows_of(found)
    finally:
        qwen.bos_token = before


def test_loss_on_the_last_answer_and_on_everything(qwen: Any) -> None:
    table = pa.table({"messages": [chat("Hi", "Hello!", "And?", "Bye.")]})
    for template in ("default", QWEN3):
        every = gpuload.load_chats(table, qwen, chat_template=template)
        last = gpuload.load_chats(table, qwen, chat_template=template, loss_on="last")
        assert last.tokens.to_lists() == every.tokens.to_lists()
        kept = qwen.decode(last.tokens.values[last.loss_mask.values])
        assert "Bye." in kept
        assert "Hello" not in kept
        whole = gpuload.load_chats(table, qwen, chat_template=template, loss_on="all")
        assert whole.loss_mask.values.all()


OWN: list[dict[str, Any]] = [
    {"messages": chat("Hi", "Hello!"), "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": chat("Hi", "Hello!"), "chat_template_kwargs": {"enable_thinking": True}},
    {"messages": chat("Hi", "Hello!"), "chat_template_kwargs": {}},
]


def test_arguments_of_rows_are_those_of_trl(qwen: Any) -> None:
    """A column `chat_template_kwargs`."""
    template = "{{ enable_thinking }}" + QWEN3
    found = gpuload.load_chats(pa.Table.from_pylist(OWN), qwen, chat_template=template)
    rows = [row | {"chat_template_kwargs": dict(row["chat_template_kwargs"])} for row in OWN]
    config = {"assistant_only_loss": True}
    assert rows_of(found) == by_trl(rows, qwen, template, **config)
    completions = [
        {"prompt": row["messages"][:1], "completion": row["messages"][1:]}
        | {"chat_template_kwargs": row["chat_template_kwargs"]}
        for row in rows
    ]
    found = gpuload.load_chats(pa.Table.from_pylist(completions), qwen, chat_template=template)
    assert rows_of(found) == by_trl(completions, qwen, template)
    assert "chat_template_kwargs" not in found.passed_through.names


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"tokenize": True}, "chat_template_kwargs has tokenize, which gpuload sets"),
        ("enable_thinking", "chat_template_kwargs is str, not an object"),
    ],
)
def test_arguments_of_rows_that_cannot_be_used(qwen: Any, own: Any, reason: str) -> None:
    rows = [{"messages": chat("Hi", "Hello!"), "chat_template_kwargs": own}]
    with pytest.raises(DataError, match=reason):
        gpuload.load_chats(pa.Table.from_pylist(rows), qwen)


def test_tools_and_tool_calls(qwen: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    rows = [
        {"messages": chat("Hi", "Hello!"), "tools": None},
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "7"},
                {"role": "assistant", "content": "It is 7."},
            ],
            "tools": json.dumps([tool]),
        },
    ]
    expected = []
    for row in rows:
        found = qwen.apply_chat_template(
            row["messages"], tools=json.loads(row["tools"] or "null"), chat_template=QWEN3, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        masked = zip(found["input_ids"], found["assistant_masks"], strict=True)
        expected.append((found["input_ids"], [token if bit else -100 for token, bit in masked]))
    file = Path(pytest.__file__)  # replaced below
    del file
    assert rows_of(load_json(rows, qwen, chat_template=QWEN3)) == expected


def load_json(rows: list[Any], tokenizer: Any, **options: Any) -> gpuload.ChatDataset:
    """Rows of different shapes, by way of a JSON file."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.json"
        path.write_text(json.dumps(rows))
        return gpuload.load_chats(str(path), tokenizer, **options)


# -- TRL's preparation -------------------------------------------------------------------------------------------------


def test_assistant_only_as_trl_prepares_it(qwen: Any) -> None:
    rows = [{"messages": messages} for messages in CHATS]
    expected = by_trl(rows, qwen, QWEN3, assistant_only_loss=True)
    assert rows_of(gpuload.load_chats(pa.Table.from_pylist(rows), qwen, chat_template=QWEN3)) == expected


def test_plain_conversations_as_trl_prepares_them(qwen: Any) -> None:
    rows = [{"messages": messages} for messages in CHATS]
    assert rows_of(gpuload.load_chats(pa.Table.from_pylist(rows), qwen, loss_on="all")) == by_trl(rows, qwen)


@pytest.mark.parametrize("template", ["default", QWEN3], ids=["compiled", "blocks"])
def test_prompts_with_completions_as_trl_prepares_them(qwen: Any, template: str) -> None:
    rows = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in CHATS if len(messages) > 1]
    expected = by_trl(rows, qwen, None if template == "default" else template)
    found = gpuload.load_chats(pa.Table.from_pylist(rows), qwen, chat_template=template)
    assert rows_of(found) == expected
    if template != "default":
        expected = by_trl(rows[:-1], qwen, template, assistant_only_loss=True)
        found = gpuload.load_chats(pa.Table.from_pylist(rows[:-1]), qwen, chat_template=template, loss_on="assistant")
        assert rows_of(found) == expected


def test_texts_as_trl_prepares_them(qwen: Any) -> None:
    texts = ["one", "two" + qwen.eos_token, "", "é 你"]
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    assert rows_of(gpuload.load_chats(pa.Table.from_pylist(rows), qwen)) == by_trl(rows, qwen)
    rows = [{"prompt": f"{text} and", "completion": f" {text}!"} for text in texts]
    assert rows_of(gpuload.load_chats(pa.Table.from_pylist(rows), qwen)) == by_trl(rows, qwen)


def test_texts_need_no_chat_template(bpe: dict[str, tuple[Any, Any]]) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = next(iter(bpe.values()))[1]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    assert tokenizer.chat_template is None
    for row in ({"text": "one"}, {"prompt": "one", "completion": " two"}):
        (found,) = rows_of(gpuload.load_chats(pa.Table.from_pylist([row]), tokenizer, token_cache=False))
        assert tokenizer.decode(found[0]) == "".join(row.values()) + "<|endoftext|>"


@pytest.mark.parametrize("overlong", ["keep_start", "keep_end"])
def test_truncation_as_trl_truncates(qwen: Any, overlong: Any) -> None:
    rows = [{"messages": messages} for messages in CHATS]
    settings = {"assistant_only_loss": True, "max_length": 14, "truncation_mode": overlong}
    expected = by_trl(rows, qwen, QWEN3, **settings)
    found = gpuload.load_chats(pa.Table.from_pylist(rows), qwen, chat_template=QWEN3, max_length=14, overlong=overlong)
    assert rows_of(found) == expected
    assert sum(found.report.rejected.values()) == len(rows) - len(expected)
    for batch in found.loader(3):
        assert (batch["labels"] != -100).any(dim=1).all()


@pytest.mark.skipif(SHARED is None, reason="no ../shared")
@pytest.mark.parametrize("name", ["qwen3", "llama3.1-instruct", "gemma3", "smollm", "gpt2", "deepseek-v3"])
def test_real_conversations_as_transformers_masks_them(name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    table = pq.read_table(SHARED / "datasets" / "zh_multiturn.parquet").slice(0, 120).select(["prompt"])
    template = QWEN3 if name in ("qwen3", "gpt2") else (TEMPLATES / "llama3_training.jinja").read_text()
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    found = gpuload.load_chats(table, tokenizer, messages_key="prompt", chat_template=template, pad_token_id=0)
    expected = [labels_of(tokenizer, messages, template) for messages in table["prompt"].to_pylist()]
    kept = [row for row in expected if any(label != -100 for label in row[1]) and len(row[0]) <= 4096]
    assert rows_of(found) == kept


def test_common_prefixes() -> None:
    from gpuload.arrays import Ragged

    rows = [([1, 2, 3], [1, 2, 4]), ([], [1]), ([1], []), ([5], [5, 6]), ([7, 8], [9]), ([1, 1], [1, 1])]
    one, other = (Ragged.from_lists([pair[k] for pair in rows]) for k in (0, 1))
    assert common_prefixes(one, other).tolist() == [2, 0, 0, 1, 0, 2]


# -- formats ---------------------------------------------------------------------------------------------------------


def test_sharegpt_and_alpaca_are_conversations(qwen: Any) -> None:
    expected = rows_of(gpuload.load_chats(pa.table({"messages": [CHATS[1]]}), qwen))
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": " Hello! "}]
    turns += [{"from": "human", "value": "And?"}, {"from": "gpt", "value": "Bye."}]
    sharegpt = pa.table({"conversations": [turns], "system": ["Be brief."]})
    assert rows_of(gpuload.load_chats(sharegpt, qwen)) == expected
    row = {"instruction": "And?", "input": "", "output": "Bye.", "system": "Be brief.", "history": [["Hi", " Hello! "]]}
    found = gpuload.load_chats(pa.Table.from_pylist([row]), qwen)
    assert rows_of(found) == expected
    assert "format: alpaca, loss on assistant" in found.report.notes
    assert found.columns.num_columns == 0


def test_sharegpt_function_calls_are_tool_calls(qwen: Any) -> None:
    call = {"name": "f", "arguments": {"a": [1, None]}}
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(call)}]
    turns += [{"from": "observation", "value": "7"}, {"from": "gpt", "value": "It is 7."}]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    found = load_json([{"conversations": turns}], qwen, chat_template=QWEN3)
    assert rows_of(found) == [labels_of(qwen, messages, QWEN3)]


@pytest.mark.skipif(SHARED is None, reason="no ../shared")
@pytest.mark.parametrize(
    ("file", "options", "found"),
    [
        ("alpaca_en_demo.json", {}, "alpaca"),
        ("glaive_toolcall_zh_demo.json", {}, "sharegpt"),
        ("kto_en_demo.json", {}, "messages"),
        ("dpo_en_demo.json", {"format": "sharegpt", "loss_on": "all"}, "sharegpt"),
    ],
)
def test_published_files(qwen: Any, file: str, options: dict[str, Any], found: str) -> None:
    path = SHARED / "datasets" / "chats_and_pairs" / file
    chats = gpuload.load_chats(str(path), qwen, verify="full", max_samples=100, strict=True, max_length=9000, **options)
    assert any(note.startswith(f"format: {found}") for note in chats.report.notes)
    assert chats.report.check.rows == len(chats) == 100
    assert chats.report.check.mismatches == []


@pytest.mark.parametrize(
    ("table", "options", "error", "message"),
    [
        ({"question": ["q"], "output": ["a"]}, {}, DataError, "closest format is alpaca.*instruction missing"),
        ({"prompt": [CHATS[0]]}, {}, DataError, "pass messages_key='prompt'"),
        ({"messages": ["x"]}, {}, DataError, "closest format is messages, which has messages of another type"),
        ({"messages": [CHATS[0]]}, {"messages_key": "chats"}, DataError, "no column 'chats'"),
        ({"messages": [CHATS[0]]}, {"format": "alpaca"}, DataError, "not format='alpaca'"),
        ({"messages": [CHATS[0]]}, {"format": "share"}, OptionError, "did you mean sharegpt"),
        ({"messages": [CHATS[0]]}, {"loss_on": "completion"}, OptionError, "use one of 'assistant', 'last', 'all'"),
        ({"messages": [CHATS[0]]}, {"loss_on": "user"}, OptionError, "loss_on='user'"),
        ({"messages": [CHATS[0]]}, {"max_length": 0}, OptionError, "max_length=0"),
        ({"messages": [CHATS[0]]}, {"overlong": "cut"}, OptionError, "overlong='cut'"),
        (
            {"messages": [CHATS[0]]},
            {"apply_chat_template_kwargs": {"sanitize_control_tokens": True}},
            OptionError,
            "sanitize_control_tokens is not supported by load_chats",
        ),
        ({"messages": [CHATS[0]], "chosen": ["a"], "rejected": ["b"]}, {}, DataError, "preference data"),
        ({"messages": [chat("Hi")]}, {}, DataError, "no token has loss: there is no answer of an assistant"),
    ],
)
def test_what_cannot_be_loaded(
    qwen: Any, table: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gpuload.load_chats(pa.table(table), qwen, **options)


def test_files_of_different_formats(qwen: Any, write: Callable[..., str], tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": [CHATS[0]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="different formats .*a.parquet is messages, .*b.parquet is text"):
        gpuload.load_chats(str(tmp_path / "*.parquet"), qwen)


def test_a_template_without_a_generation_prompt_needs_blocks(qwen: Any) -> None:
    from gpuload.errors import TokenizerError

    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(TokenizerError, match="nothing begins an assistant.s turn: pass a chat_template"):
        gpuload.load_chats(pa.table({"messages": CHATS[:1]}), qwen, chat_template=template)
    assert len(gpuload.load_chats(pa.table({"messages": CHATS[:1]}), qwen, chat_template=template, loss_on="all")) == 1


def test_rows_that_are_dropped_are_counted(qwen: Any) -> None:
    rows = [CHATS[0], chat("Hi"), None, [], [{"role": "user", "content": None}]]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    found = gpuload.load_chats(pa.table({"messages": pa.array(rows, kind)}), qwen)
    assert len(found) == 1
    assert sum(found.report.rejected.values()) == 4
    with pytest.raises(DataError, match="row 1: no token has loss"):
        gpuload.load_chats(pa.table({"messages": pa.array(rows, kind)}), qwen, strict=True)


# -- rows, batches, caches -------------------------------------------------------------------------------------------


def test_batches_are_padded_rows(qwen: Any) -> None:
    found = gpuload.load_chats(pa.table({"messages": CHATS, "n": list(range(len(CHATS)))}), qwen)
    batch = found.batch([3, 0, -1])
    rows = [found[k] for k in (3, 0, len(found) - 1)]
    assert batch["n"].tolist() == [row["n"] for row in rows]
    for k, row in enumerate(rows):
        size = len(row["input_ids"])
        assert batch["input_ids"][k, :size].tolist() == row["input_ids"]
        assert batch["labels"][k].tolist() == row["labels"] + [-100] * (batch["labels"].shape[1] - size)
        assert batch["attention_mask"][k].tolist() == [1] * size + [0] * (batch["labels"].shape[1] - size)
        assert batch["position_ids"][k, :size].tolist() == list(range(size))
    assert found.batch([0], padding="max_length")["input_ids"].shape == (1, 4096)
    assert (found.batch([0], padding="max_length")["input_ids"][0, -1]) == found.pad_token_id


def test_loaders_resume_and_datasets_are_pickled(qwen: Any) -> None:
    found = gpuload.load_chats(pa.table({"messages": CHATS}), qwen)
    loader = found.loader(2, shuffle=True, seed=1)
    batches = iter(loader)
    next(batches)
    state, expected = loader.state_dict(), next(batches)
    resumed = pickle.loads(pickle.dumps(found)).loader(2, shuffle=True, seed=1)
    resumed.load_state_dict(state)
    assert torch.equal(next(iter(resumed))["labels"], expected["labels"])


def test_the_token_cache_keeps_masks_apart(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    file = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"messages": CHATS}), file)
    options: list[dict[str, Any]] = [{}, {"loss_on": "all"}, {"loss_on": "last"}, {"chat_template": QWEN3}]
    cold = [rows_of(gpuload.load_chats(str(file), qwen, **each)) for each in options]
    for each, expected in zip(options, cold, strict=True):
        warm = gpuload.load_chats(str(file), qwen, **each)
        assert warm.report.from_cache == [str(file)]
        assert rows_of(warm) == expected
    assert gpuload.load_chats(str(file), qwen, max_length=20, overlong="keep_start").report.from_cache
    assert np.unique([str(rows) for rows in cold]).size == len(cold)


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": messages} for messages in CHATS],
        [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in CHATS],
        [{"prompt": "one", "completion": " two"}, {"prompt": "", "completion": "three"}],
        [{"text": "one"}, {"text": ""}],
        [{"messages": CHATS[0], "tools": json.dumps([TOOL])}, {"messages": CHATS[1], "tools": None}],
    ],
    ids=["messages", "completions", "plain completions", "texts", "tools"],
)
def test_a_wrong_mask_is_noticed(qwen: Any, monkeypatch: pytest.MonkeyPatch, rows: list[Any]) -> None:
    """Then the tokenizer itself does everything, with the same result."""
    table = pa.Table.from_pylist(rows)
    from gpuload.chats import engine

    right = engine.ChatEngine.encode

    def wrong(self: Any, text: Any) -> Any:
        made = right(self, text)
        if not self.by_prompt:
            made.ids.values[-1] ^= 1 << 30
        return made

    monkeypatch.setattr(engine.ChatEngine, "encode", wrong)
    with pytest.warns(UserWarning, match="differs from the tokenizer"):
        found = gpuload.load_chats(table, qwen, verify="full")
    monkeypatch.undo()
    assert found.report.engine.startswith("cpu: rendered and encoded by")
    assert rows_of(found) == rows_of(gpuload.load_chats(table, qwen))
