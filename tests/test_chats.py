"""load_chats: ids and loss masks of every format, compared with transformers and with TRL's own preparation."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import SHARED, core, examples, shared

import gpuload
from gpuload.core.errors import DataError, OptionError

trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
import trl_cases  # noqa: E402
from tokenizer_cases import needs_sanitizing  # noqa: E402

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
    settings |= {"trainer_chat_template": template, "trainer_completion_only_loss": "prompt" in rows[0]}
    unhashed = trl_cases.unhashed(rows)
    made = trl_cases.prepared(trl.SFTTrainer, trl.SFTConfig, unhashed, tokenizer, False, None, **settings)
    return list(zip(made["input_ids"], made["labels"], strict=True))


# -- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_those_of_transformers_for_generation_blocks(qwen: Any) -> None:
    found = gpuload.load_chats(pa.table({"messages": CHATS}), qwen, chat_template=QWEN3)
    assert rows_of(found) == [labels_of(qwen, messages, QWEN3) for messages in CHATS]
    assert found.report.check.mismatches == []


@examples(20)
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


PAIRS = sorted(path.name.removesuffix("_training.jinja") for path in TEMPLATES.glob("*_training.jinja"))
OTHER_TEXT = {
    "glm4moe", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6",
}  # fmt: skip
"""TRL's training template renders other text than the model's template."""
NO_STRINGS = {"idefics3", "llava_next", "smolvlm"}
"""The template takes no plain strings as contents."""


@pytest.mark.parametrize("name", core(PAIRS, *PAIRS[::6]))
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
        ({"sanitize_control_tokens": True}, "chat_template_kwargs has sanitize_control_tokens, which gpuload sets"),
        ({"truncation": True, "max_length": 5}, "chat_template_kwargs has truncation, max_length, which gpuload sets"),
        ("enable_thinking", "chat_template_kwargs is not valid JSON"),
        ('"enable_thinking"', "chat_template_kwargs is str, not an object"),
    ],
)
def test_arguments_of_rows_that_cannot_be_used(qwen: Any, own: Any, reason: str) -> None:
    rows = [{"messages": chat("Hi", "Hello!"), "chat_template_kwargs": own}]
    with pytest.raises(DataError, match=reason):
        gpuload.load_chats(pa.Table.from_pylist(rows), qwen)


def test_arguments_of_rows_that_change_nothing(qwen: Any) -> None:
    """As all rows have, where the column is a struct."""
    own = {"enable_thinking": False, "padding": None, "sanitize_control_tokens": False}
    rows = [{"messages": chat("Hi", "Hello!"), "chat_template_kwargs": own}]
    assert len(gpuload.load_chats(pa.Table.from_pylist(rows), qwen)) == 1


def test_messages_without_a_template(qwen: Any) -> None:
    rows = {"messages": [chat("Hi", "Hello!")]}
    pairs = {"prompt": [chat("Hi", "Hello!")[:1]], "chosen": [chat("Hi", "a")[1:]], "rejected": [chat("Hi", "b")[1:]]}
    for load, data in ((gpuload.load_chats, rows), (gpuload.load_pairs, pairs)):
        with pytest.raises(OptionError, match="chat_template=None is for texts: data in the format .* has messages"):
            load(pa.table(data), qwen, chat_template=None)
    assert len(gpuload.load_chats(pa.table({"text": ["a"]}), qwen, chat_template=None)) == 1


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


def test_texts_need_no_chat_template(qwen_folder: str) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_file(f"{qwen_folder}/tokenizer.json")
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


@shared
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
    from gpuload.core.arrays import Ragged, common_prefixes

    rows = [([1, 2, 3], [1, 2, 4]), ([], [1]), ([1], []), ([5], [5, 6]), ([7, 8], [9]), ([1, 1], [1, 1])]
    one, other = (Ragged.from_lists([pair[k] for pair in rows]) for k in (0, 1))
    assert common_prefixes(one, other).tolist() == [2, 0, 0, 1, 0, 2]


# -- prompts and completions with different fields -------------------------------------------------------------------

SHOWS_KEYS = (
    "{% for m in messages %}{% generation %}{% for k in m %}{% if m[k] is string %}[{{ k }}:{{ m[k] }}]{% else %}"
    "[{{ k }}={{ m[k] | tojson }}]{% endif %}{% endfor %}{% endgeneration %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
"""Prints every key of every message, in their order, and so all that may be lost or added when messages are joined."""


def reasoned(count: int, share: str) -> list[dict[str, Any]]:
    """Prompts without fields for reasoning and calls; completions with them, in some or in all rows."""
    rows = []
    for k in range(count):
        call = {"type": "function", "function": {"name": "f", "arguments": {"city": f"c{k}"}}}
        answer: dict[str, Any] = {"content": f"answer {k}", "role": "assistant"}  # in another order than in the prompt
        if share == "all" or k % 16 == 5:
            answer |= {"reasoning_content": f"because {k}", "tool_calls": [call]}
        rows.append({"prompt": chat(f"q {k}", "a", "and?"), "completion": [answer]})
    return rows


def source_of(form: str, rows: list[Any], tmp_path: Path) -> Any:
    """The same rows as a file or as a frame in memory."""
    if form == "jsonl":
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "rows.jsonl")
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        return str(tmp_path / "rows.parquet")
    if form == "pandas":
        return pytest.importorskip("pandas").DataFrame(rows)
    return pytest.importorskip("datasets").Dataset.from_list(rows)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "pandas", "datasets"])
@pytest.mark.parametrize("share", ["few", "all"])
@pytest.mark.parametrize("template", [SHOWS_KEYS, QWEN3], ids=["keys", "qwen3"])
def test_completions_keep_fields_that_their_prompts_lack(
    qwen: Any, tmp_path: Path, form: str, share: str, template: str
) -> None:
    rows = reasoned(40, share)
    found = gpuload.load_chats(source_of(form, rows, tmp_path), qwen, chat_template=template, verify="off")
    expected = []
    # In columns all messages have all keys; transformers 4 shows those that are None to the template.
    for row in rows if form == "jsonl" else pa.Table.from_pylist(rows).to_pylist():
        prompt, whole = (
            qwen.apply_chat_template(messages, return_dict=False, chat_template=template, add_generation_prompt=begun)
            for messages, begun in ((row["prompt"], True), (row["prompt"] + row["completion"], False))
        )
        same = next(k for k, (one, other) in enumerate(zip([*prompt, -1], whole, strict=False)) if one != other)
        expected.append((whole, [-100] * same + whole[same:]))
    assert rows_of(found) == expected
    if share == "all":
        checked = gpuload.load_chats(source_of(form, rows, tmp_path), qwen, chat_template=template, verify="full")
        assert checked.report.check.mismatches == []
        assert rows_of(checked) == expected


def test_prompts_keep_fields_that_their_completions_lack(qwen: Any) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "name": f"n{k}", "content": f"q{k}", "weights": [1, k]}],
            "completion": [{"role": "assistant", "content": "a"}],
        }
        for k in range(20)
    ]
    found = gpuload.load_chats(pa.Table.from_pylist(rows), qwen, chat_template=SHOWS_KEYS, verify="off")
    expected = [
        qwen.apply_chat_template(row["prompt"] + row["completion"], return_dict=False, chat_template=SHOWS_KEYS)
        for row in rows
    ]
    assert [ids for ids, _ in rows_of(found)] == expected


def test_completions_with_text_fields_of_their_own_stay_compiled(qwen: Any) -> None:
    rows = [row | {"completion": [row["completion"][0] | {"tool_calls": None}]} for row in reasoned(30, "all")]
    found = gpuload.load_chats(pa.Table.from_pylist(rows), qwen, chat_template=QWEN3, verify="full", strict=True)
    assert found.report.rows_compiled == len(found) == 30


VALUES = st.sampled_from(["", "x", " é ", "<|im_end|>", None, [], [1, None], {"a": None}, {"b": {"c": []}}, 3, True])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from(["a", "", "b\n"])},
    optional={"name": VALUES, "reasoning_content": VALUES, "tool_calls": VALUES},
)


@examples(40)
@given(st.lists(st.tuples(st.lists(MESSAGE, max_size=3), st.lists(MESSAGE, max_size=2)), min_size=1, max_size=5))
def test_any_fields_of_json_are_those_of_the_reference(qwen: Any, pairs: list[tuple[Chat, Chat]]) -> None:
    """Every key of every message, absent or null, at any depth."""
    from gpuload.engines.protocol import ArrowPrompts
    from gpuload.kinds.chats.engine import ChatEngine
    from gpuload.kinds.chats.reference import ChatReference
    from gpuload.sources.types import as_json

    template = SHOWS_KEYS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    reference = ChatReference(qwen, "completion", chat_template=template)
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    text = ChatEngine(reference).render(ArrowPrompts(as_json(rows)))
    expected = [None if reference.problem(row) or not row["prompt"] else reference.render(row) for row in rows]
    assert text.text.to_pylist() == expected
    assert [row for row in range(len(rows)) if expected[row] is None] == sorted(text.rejected)


def test_completions_of_large_columns_are_joined_slice_by_slice(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.engines.host import render

    rows = [{"prompt": None, "completion": None}, *reasoned(40, "all"), {"prompt": chat("a"), "completion": None}] * 2
    table = pa.Table.from_pylist(rows).slice(3, 70)
    expected = gpuload.load_chats(table, qwen, chat_template=QWEN3, verify="full")
    monkeypatch.setattr(render, "MOST_BYTES", 1 << 10)
    found = gpuload.load_chats(table, qwen, chat_template=QWEN3, verify="full")
    assert found.report.check.mismatches == []
    assert len(found) == 68
    assert found.report.rejected == expected.report.rejected
    assert rows_of(found) == rows_of(expected)


@shared
@pytest.mark.parametrize("form", ["jsonl", "arrow"])
def test_real_trajectories_as_prompts_and_completions(form: str, tmp_path: Path) -> None:
    """Cut at the first call, so that prompts have neither `tool_calls` nor `tool_call_id`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen2.5-instruct")
    rows: list[Any] = []
    with open(SHARED / "datasets" / "agent_trajectories" / "tau_airline.jsonl") as lines:
        for line in lines:
            messages = json.loads(line)["messages"]
            cut = next((k for k, message in enumerate(messages) if message.get("tool_calls")), 0)
            if cut:
                rows.append({"prompt": messages[:cut], "completion": messages[cut:]})
    source: Any = source_of("jsonl", rows, tmp_path)
    if form == "arrow":
        source = pa.Table.from_pylist(rows)
        rows = source.to_pylist()
    found = gpuload.load_chats(source, tokenizer, max_length=1 << 20, loss_on="all", verify="off")
    whole = [tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=False) for row in rows]
    assert len(whole) > 50
    assert [ids for ids, _ in rows_of(found)] == whole


# -- rows of other forms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
def test_a_text_among_conversations_is_dropped_by_every_way(qwen: Any, loss_on: Any) -> None:
    rows: list[Any] = [{"messages": chat("a", "b")}, {"messages": "plain text"}, {"messages": chat("c", "d")}]
    for verify in ("off", "full"):
        found = load_json(rows, qwen, loss_on=loss_on, verify=verify)
        assert found.report.rejected == {"the row is text, in a column of messages": 1}
        assert found.report.check.mismatches == []
        assert rows_of(found) == rows_of(load_json(rows[::2], qwen, loss_on=loss_on))


@pytest.mark.parametrize("loss_on", core(["completion", "assistant", "all"], "assistant"))
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"prompt": chat("x"), "completion": chat("", "y")[1:]}, None),
        ({"prompt": "x", "completion": 3}, "prompt and completion are neither both text nor both messages"),
        ({"prompt": "x", "completion": None}, "is null"),
        ({"prompt": "x", "completion": "\ud800"}, "lone surrogate"),
        ({"prompt": "x", "completion": chat("", "y")[1:]}, "neither both text nor both messages"),
    ],
    ids=["messages", "number", "null", "surrogate", "text and messages"],
)
def test_one_row_of_another_kind_among_texts(qwen: Any, loss_on: Any, other: Any, reason: str | None) -> None:
    rows = [{"prompt": f"q {k} ", "completion": f"a {k}"} for k in range(40)]
    rows[7] = other
    found = load_json(rows, qwen, loss_on=loss_on, verify="full", strict=reason is None)
    assert found.report.check.mismatches == []
    texts = load_json(rows[:7] + rows[8:], qwen, **({} if loss_on == "assistant" else {"loss_on": loss_on}))
    expected = rows_of(texts)
    if reason is None:
        expected.insert(7, rows_of(load_json([other], qwen, loss_on=loss_on))[0])
    assert rows_of(found) == expected
    assert [reason in why for why in found.report.rejected] == [True] * (reason is not None)


def test_texts_of_mixed_json_have_the_special_tokens_of_texts(qwen: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = qwen.backend_tokenizer.from_str(qwen.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 151644)])
    tokenizer = trl_tokenizer(backend)
    rows: list[Any] = [{"text": "a"}, {"text": 3}, {"text": "b"}]
    assert rows_of(load_json(rows, tokenizer, verify="off")) == rows_of(load_json(rows[::2], tokenizer))
    assert rows_of(load_json(rows, tokenizer, verify="off"))[0][0][0] == 151644


def trl_tokenizer(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@pytest.mark.parametrize(
    "more", [{"name": "bob"}, {"tags": ["x", None]}, {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
)
def test_one_row_of_json_with_another_key_leaves_the_others_compiled(qwen: Any, more: Any) -> None:
    rows = [{"messages": chat(f"q {k}", f" a {k} ")} for k in range(400)]
    plain = load_json(rows, qwen, chat_template=QWEN3)
    rows[123]["messages"][1] |= more
    found = load_json(rows, qwen, chat_template=QWEN3, verify="full", strict=True)
    assert found.report.rows_compiled >= 399
    assert [row for k, row in enumerate(rows_of(found)) if k != 123] == [
        row for k, row in enumerate(rows_of(plain)) if k != 123
    ]


def test_plain_rows_of_json_are_kept_where_the_template_changes_texts(qwen: Any) -> None:
    """Only the compiled template knows where such texts are."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | replace('ñ', 'n') }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"messages": chat(f"q {k}", f"mañana {k}")} for k in range(50)]
    plain = gpuload.load_chats(pa.Table.from_pylist(rows), qwen, chat_template=template)
    rows[20]["messages"][0]["name"] = "bob"
    found = load_json(rows, qwen, chat_template=template)
    assert len(found) == 50
    assert rows_of(found) == rows_of(plain)


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


@pytest.mark.parametrize("key", ["dialog", "messages"])
def test_sharegpt_in_a_column_with_another_name(qwen: Any, key: str) -> None:
    turns = [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]] * 2
    expected = gpuload.load_chats(pa.table({"conversations": turns}), qwen)
    table = pa.table({key: turns})
    for options in ({}, {"format": "sharegpt"}):
        assert rows_of(gpuload.load_chats(table, qwen, messages_key=key, **options)) == rows_of(expected)
    served = [gpuload.load_chats(each, qwen, turns="served", messages_key=name, max_length=99)
              for each, name in ((table, key), (pa.table({"conversations": turns}), "conversations"))]  # fmt: skip
    assert rows_of(served[0]) == rows_of(served[1])
    marked = [[{**turn, "weight": k} for k, turn in enumerate(turns[0])]]
    found = gpuload.load_chats(pa.table({key: marked}), qwen, messages_key=key, loss_on="marked")
    assert rows_of(found) == rows_of(expected)[:1]


def test_a_system_message_of_the_turns_is_the_only_one(qwen: Any) -> None:
    """As in LLaMA-Factory, which takes the column for rows without one."""
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
    own = [{"from": "system", "value": "Be kind."}, *turns]
    data = gpuload.load_chats(pa.table({"conversations": [own, turns], "system": ["Be brief."] * 2}), qwen)
    texts = [qwen.decode(row["input_ids"]) for row in data]
    assert ["Be kind." in text for text in texts] == [True, False]
    assert ["Be brief." in text for text in texts] == [False, True]
    chosen, rejected = ([[{"from": "gpt", "value": each}]] * 2 for each in "ab")
    table = pa.table({"conversations": [own[:2], turns[:1]], "system": ["Be brief."] * 2})
    pairs = gpuload.load_pairs(table.append_column("chosen", [chosen]).append_column("rejected", [rejected]), qwen)
    assert ["Be brief." in qwen.decode(row["prompt_ids"]) for row in pairs] == [False, True]


@pytest.mark.parametrize("make", [pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 2)])
def test_messages_in_all_encodings_of_lists(qwen: Any, make: Any) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    kind = pa.struct([("role", pa.string()), ("content", pa.string())])
    column = pa.array([None, *[chat] * 3], make(kind)).slice(1)
    expected = gpuload.load_chats(pa.table({"messages": [chat] * 3}), qwen)
    assert rows_of(gpuload.load_chats(pa.table({"messages": column}), qwen)) == rows_of(expected)
    other = pa.array([[chat[0], {"role": "assistant", "content": "y"}]] * 3, make(kind))
    pairs = gpuload.load_pairs(pa.table({"chosen": column, "rejected": other}), qwen)
    assert [qwen.decode(row["chosen_ids"]).strip() for row in pairs] == ["x<|im_end|>"] * 3


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [([{"role": "user", "content": "q"}], "a"), ("q", [{"role": "assistant", "content": "a"}])],
)
def test_columns_of_two_forms_are_not_read_by_half(qwen: Any, prompt: Any, completion: Any) -> None:
    table = pa.table({"prompt": [prompt], "completion": [completion]})
    with pytest.raises(DataError, match="make both text, or both messages of role and content"):
        gpuload.load_chats(table, qwen)


CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("content", "printed"),
    [
        ("m.content if m.content else '-'", "-"),
        ("m.content if m.content is not none and m.content is defined else 'None'", ""),
        ("m.content + ''", ""),
    ],
    ids=["any", "prints null", "needs a text"],
)
def test_sharegpt_function_calls_have_the_content_that_the_template_needs(
    qwen: Any, content: str, printed: str
) -> None:
    call = {"name": "f", "arguments": {"x": "y"}}
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(call)}]
    template = CALLING.replace("CONTENT", content)
    found = load_json([{"conversations": turns}], qwen, chat_template=template, loss_on="all", verify="full")
    text = f'<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{printed}{{"x": "y"}}<|im_end|>\n'
    assert [qwen.decode(ids) for ids, _ in rows_of(found)] == [text]
    assert found.report.check.mismatches == []


def test_calls_that_a_template_does_not_write_are_no_empty_answers(qwen: Any) -> None:
    template = CALLING.replace("CONTENT", "m.content + ''").replace("c.function.arguments | tojson", "''")
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    rows = [
        {"conversations": [{"from": "human", "value": "q"}, each]} for each in (call, {"from": "gpt", "value": "a"})
    ]
    found = load_json(rows, qwen, chat_template=template, loss_on="all")
    assert len(found) == 1
    assert sum(found.report.rejected.values()) == 1


@shared
@pytest.mark.parametrize("name", ["glaive_toolcall_en_demo", "glaive_toolcall_zh_demo"])
def test_real_function_calls_of_sharegpt_with_qwen3(name: str) -> None:
    tokenizer = str(SHARED / "tokenizers" / "qwen3")
    file = str(SHARED / "datasets" / "chats_and_pairs" / f"{name}.json")
    found = gpuload.load_chats(file, tokenizer, max_length=32768)
    assert found.report.rejected == {}
    assert len(found) > 290


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


@shared
@pytest.mark.parametrize(
    ("file", "options", "found"),
    [
        ("alpaca_en_demo.json", {}, "alpaca"),
        ("glaive_toolcall_zh_demo.json", {}, "sharegpt"),
        ("kto_en_demo.json", {"format": "messages"}, "messages"),
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
        pytest.param(
            {"messages": [CHATS[0]]},
            {"apply_chat_template_kwargs": {"sanitize_control_tokens": True}},
            OptionError,
            "sanitize_control_tokens is not supported by load_chats",
            marks=needs_sanitizing,
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


FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHATS[0]},
    "prompt-completion": {"prompt": "Q", "completion": "A"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    "alpaca": {"instruction": "Q", "input": "", "output": "A"},
}


def labeled(form: str, name: str, labels: Any) -> pa.Table:
    return pa.table({key: [value] * len(labels) for key, value in FORMS[form].items()} | {name: labels})


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("label", [True, False]),
        ("label", [1, 0]),
        ("label", [True, True]),
        ("kto_tag", [True, False]),
        ("kto_tag", [1, 1]),
        ("kto_tag", [0, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS)
def test_labels_of_kto(qwen: Any, form: str, name: str, labels: list[Any]) -> None:
    table = labeled(form, name, labels)
    remedy = "use load_pairs" if form != "alpaca" else "make columns prompt and completion, then use load_pairs"
    message = f"Table: column '{name}' says which answers .* data for KTO: {remedy}, or pass format='{form}' to train"
    with pytest.raises(DataError, match=message):
        gpuload.load_chats(table, qwen)
    assert len(gpuload.load_chats(table, qwen, format=form)) == len(labels)


@pytest.mark.parametrize(
    "labels",
    [
        [0.0, 1.0],
        [1.0, None, 0.0],
        ["true", "false"],
        ["True", "False", None],
        ["1", "0"],
        pa.array(["true", "false"]).dictionary_encode(),
        pa.array([1, 0], pa.decimal128(3, 1)),
    ],
    ids=str,
)
def test_labels_of_kto_that_are_neither_booleans_nor_integers(qwen: Any, labels: Any) -> None:
    """load_pairs takes neither texts nor fractions."""
    for name in ("label", "kto_tag"):
        message = f"'{name}' says .*: convert '{name}' to booleans, then use load_pairs, or pass format='messages'"
        with pytest.raises(DataError, match=message):
            gpuload.load_chats(labeled("messages", name, labels), qwen)


def test_labels_of_kto_of_any_types_in_json(qwen: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"messages": CHATS[0], "label": label} for label in (True, "false", 1)]))
    with pytest.raises(DataError, match="column 'label' says which answers"):
        gpuload.load_chats(str(path), qwen)
    path.write_text(json.dumps([{"messages": CHATS[0], "label": label} for label in (True, "maybe", {"a": 1})]))
    assert len(gpuload.load_chats(str(path), qwen)) == 3


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "table"])
@pytest.mark.parametrize("last", [0, 2])
def test_all_labels_count_not_the_first_ones_only(qwen: Any, tmp_path: Path, name: str, last: int) -> None:
    """Data is often sorted by label."""
    table = labeled("prompt-completion", "label", [1] * 9000 + [0] * 10 + [last])
    path, data = tmp_path / name, table
    if name == "a.parquet":
        pq.write_table(table, path, row_group_size=5000)
    elif name == "a.jsonl":
        path.write_text("\n".join(map(json.dumps, table.to_pylist())))
    data = table if name == "table" else str(path)
    if last == 2:
        assert len(gpuload.load_chats(data, qwen)) == 9011
        return
    with pytest.raises(DataError, match="column 'label' says which answers"):
        gpuload.load_chats(data, qwen)


def test_labels_of_all_files_count(qwen: Any, tmp_path: Path) -> None:
    for part, labels in enumerate(([1, 1], [0, 0])):
        pq.write_table(labeled("messages", "label", labels), tmp_path / f"{part}.parquet")
    with pytest.raises(DataError, match=r"0\.parquet: column 'label' says which answers"):
        gpuload.load_chats(str(tmp_path), qwen)
    pq.write_table(labeled("messages", "label", [3, 4]), tmp_path / "2.parquet")
    assert len(gpuload.load_chats(str(tmp_path), qwen)) == 6


def test_only_the_column_of_labels_is_read_for_this(qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.sources import read

    pq.write_table(labeled("messages", "label", [1, 0]), tmp_path / "a.parquet")
    decoded: list[list[str]] = []
    read_row_group = read.read_row_group

    def recorded(parquet: Any, again: Any, group: int, columns: list[str]) -> Any:
        decoded.append(columns)
        return read_row_group(parquet, again, group, columns)

    monkeypatch.setattr(read, "read_row_group", recorded)
    with pytest.raises(DataError, match="column 'label' says"):
        gpuload.load_chats(str(tmp_path / "a.parquet"), qwen)
    assert decoded == [["label"]]


@pytest.mark.parametrize(
    "label",
    [
        [0, 1, 2],
        [0, 1, 4],
        ["a", "b", "c"],
        ["true", "false", "maybe"],
        [1, 1, None],
        [0.0, 1.0, 0.5],
        [1.0, 1.0, 1.0],
        [[0], [1], [0]],
        [None] * 3,
    ],
    ids=str,
)
def test_labels_of_classes(qwen: Any, label: list[Any]) -> None:
    assert len(gpuload.load_chats(pa.table({"messages": [CHATS[0]] * 3, "label": label}), qwen)) == 3
    assert len(gpuload.load_chats(pa.table({"text": ["a"] * 3, "label": [True, False, True]}), qwen)) == 3


def test_files_of_different_formats(qwen: Any, write: Callable[..., str], tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": [CHATS[0]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="different formats .*a.parquet is messages, .*b.parquet is text"):
        gpuload.load_chats(str(tmp_path / "*.parquet"), qwen)


def test_a_template_without_a_generation_prompt_needs_blocks(qwen: Any) -> None:
    from gpuload.core.errors import TokenizerError

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
    from gpuload.kinds.chats import engine

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
