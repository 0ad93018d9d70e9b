"""Marks in messages that say which answers have loss: `loss_on="marked"`."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import core, examples

import gpuload
from gpuload.core.errors import DataError, NoRowsError, OptionError
from gpuload.reference.template_source import blocks_of_a_message
from gpuload.template.loss_marks import KEYS, spans_with_loss
from gpuload.template.marks import UnknownAnswersError

trl = pytest.importorskip("trl", reason="TRL has the templates of these tests")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QWEN3 = (TEMPLATES / "qwen3_training.jinja").read_text()

Chat = list[dict[str, Any]]

REMEDY = ": correct it, or pass loss_on='assistant' to ignore marks"

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "why"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def load_json(rows: list[dict[str, Any]], tokenizer: Any, **options: Any) -> gpuload.ChatDataset:
    """Rows of different shapes, by way of a file of JSON lines."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return gpuload.load_chats(str(path), tokenizer, **options)


def labels_of(found: gpuload.ChatDataset) -> list[list[int]]:
    return [found[k]["labels"] for k in range(len(found))]


def without_answers(labels: list[int], dropped: set[int]) -> list[int]:
    """Labels of all answers, without those of some of them, by their number: an answer is a run of labels."""
    made, number, inside = [], -1, False
    for label in labels:
        number += label != -100 and not inside
        inside = label != -100
        made.append(-100 if number in dropped else label)
    return made


VALUES: dict[bool, list[Any]] = {True: [True, 1, 1.0, None], False: [False, 0, 0.0]}
texts = st.text("a \n<|im_end|>é👋", max_size=8)
turns = st.tuples(texts, texts, st.booleans(), st.sampled_from(KEYS), st.integers(0, 3))


@pytest.mark.parametrize("template", ["default", QWEN3], ids=["answers found", "generation blocks"])
@examples(15)
@given(st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=6))
def test_answers_without_loss(qwen: Any, template: str, rows: list[list[tuple[str, str, bool, str, int]]]) -> None:
    """An answer that is marked has loss or not, and all others are as without marks."""
    plain: list[Chat] = [[m for ask, say, *_ in row for m in (user(ask), answer(say))] for row in rows]
    marked = [
        [m for ask, say, loss, key, k in row for m in (user(ask), answer(say) | {key: (VALUES[loss] * 2)[k]})]
        for row in rows
    ]
    options: dict[str, Any] = {"chat_template": template, "progress": False}
    every = labels_of(load_json([{"messages": each} for each in plain], qwen, **options))
    expected = [
        without_answers(labels, {number for number, turn in enumerate(row) if not turn[2]})
        for labels, row in zip(every, rows, strict=True)
    ]
    expected = [labels for labels in expected if set(labels) != {-100}]
    options |= {"loss_on": "marked", "verify": "full"}
    if not expected:
        with pytest.raises(NoRowsError, match="no answer of an assistant that is marked to have loss"):
            load_json([{"messages": each} for each in marked], qwen, **options)
        return
    found = load_json([{"messages": each} for each in marked], qwen, **options)
    assert labels_of(found) == expected
    assert found.report.check.mismatches == []
    assert found.report.rows_by_reference == 0


def in_structs(values: list[Any], kind: pa.DataType) -> pa.Table:
    fields = [("role", pa.string()), ("content", pa.string()), ("train", kind)]
    chats = [[user("Hi"), answer("Hello!", train=value), user("And?"), answer("Bye.")] for value in values]
    return pa.table({"messages": pa.array(chats, pa.list_(pa.struct(fields)))})


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.float32(), pa.float64()], ids=str)
def test_columns_of_messages(qwen: Any, kind: pa.DataType) -> None:
    table = in_structs([0, 1, None], kind) if kind != pa.bool_() else in_structs([False, True, None], kind)
    found = gpuload.load_chats(table, qwen, verify="full", strict=True)
    every = labels_of(gpuload.load_chats(table, qwen, loss_on="assistant"))
    assert labels_of(found) == [without_answers(every[0], {0}), *every[1:]]
    assert found.report.notes[:2] == [
        "format: messages, loss on marked",
        "messages say which answers have loss (train): loss_on='assistant' for all",
    ]
    assert found.report.rejected == {}


def test_what_is_no_mark(qwen: Any) -> None:
    """Marks of users, texts and other numbers are not taken for marks, nor are keys elsewhere."""
    for more in ({"train": "x"}, {"loss": 0.34}, {"weight": None}, {"extra": [{"train": True}]}):
        found = load_json([{"messages": [user("Hi", train=False), answer("Hello!", **more)]}], qwen)
        assert found.report.notes[0] == "format: messages, loss on assistant"
    none = gpuload.load_chats(in_structs([None, None], pa.bool_()), qwen)
    assert none.report.notes[0] == "format: messages, loss on assistant"
    assert labels_of(none) == labels_of(
        gpuload.load_chats(in_structs([None, None], pa.bool_()), qwen, loss_on="marked")
    )


@pytest.mark.parametrize("mark", [{"train": "false"}, {"loss": "False"}, {"weight": "0"}, {"loss_mask": "1"}])
def test_truth_values_as_texts_are_marks_that_are_wrong(qwen: Any, mark: dict[str, str]) -> None:
    """Where all marks are such, answers that are marked out would otherwise be learned."""
    rows = [{"messages": [user("Hi"), answer("Hello!", **mark)]}, {"messages": [user("Hi"), answer("Hello!")]}]
    ((name, value),) = mark.items()
    found = load_json(rows, qwen, strict=False)
    assert (len(found), [*found.report.rejected]) == (1, [wrong_mark(name, value)])
    assert "format: messages, loss on marked" in found.report.notes
    assert len(load_json(rows, qwen, loss_on="assistant")) == 2
    kind = pa.list_(pa.struct([(each, pa.string()) for each in ("role", "content", name)]))
    found = gpuload.load_chats(pa.table({"messages": pa.array([row["messages"] for row in rows], kind)}), qwen)
    assert (len(found), sum(found.report.rejected.values())) == (1, 1)


def wrong_mark(name: str, value: str) -> str:
    what = "a weight is 0 or a positive number of float32" if name == "weight" else "a mark is true, false, 1 or 0"
    return f"{name} of message 1 is {value!r}: {what}{REMEDY}"


def test_marks_of_other_roles_mean_nothing(qwen: Any) -> None:
    rows = [{"messages": [user("Hi", loss=1, weight="80 kg"), answer("Hello!", loss=1)]}]
    found = load_json(rows, qwen)
    assert found.report.notes[0] == "format: messages, loss on marked"
    assert labels_of(found) == labels_of(load_json(rows, qwen, loss_on="assistant"))


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ({"train": True, "weight": 0}, "the marks of message 1 contradict each other: train is True, weight is 0"),
        (
            {"loss": "no"},
            f"loss of message 1 is 'no': a mark is true, false, 1 or 0{REMEDY}",
        ),
        (
            {"loss_mask": [1]},
            f"loss_mask of message 1 is [1]: a mark is true, false, 1 or 0{REMEDY}",
        ),
        (
            {"train": 0.5},
            f"train of message 1 is 0.5: a mark is true, false, 1 or 0{REMEDY}",
        ),
        *(
            (
                {"weight": value},
                f"weight of message 1 is {value!r}: a weight is 0 or a positive number of float32{REMEDY}",
            )
            for value in (-1, float("nan"), float("inf"), 1e39, 1e-60, "0.5")
        ),
        (
            {"weight": 0.5, "train": False},
            "the marks of message 1 contradict each other: train is False, weight is 0.5",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("tools", [False, True])
def test_marks_that_are_errors_of_their_row(qwen: Any, marks: dict[str, Any], reason: str, tools: bool) -> None:
    good = [{"messages": [user("Hi"), answer("Hello!", train=True, loss=1)]}]
    bad: dict[str, Any] = {"messages": [user("Hi"), answer("Hello!", **marks)]}
    found = load_json([*good, bad | ({"tools": [TOOL]} if tools else {})], qwen, verify="full", strict=False)
    assert found.report.rejected == {reason: 1}
    assert found.report.examples[reason][0].endswith("rows.jsonl row 1")
    assert len(found) == 1


def test_texts_as_marks_in_columns(qwen: Any) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("loss", pa.string())]))
    chats = [[user("Hi"), answer("Hello!", loss=loss)] for loss in (None, "1")]
    found = gpuload.load_chats(pa.table({"messages": pa.array(chats, kind)}), qwen, loss_on="marked")
    assert found.report.rejected == {"loss of message 1 is a text or a list: a mark is true, false, 1 or 0": 1}


@pytest.mark.parametrize("name", core(["qwen3", "qwen2_5", "deepseekv3", "glm4moe", "gptoss_training"], "qwen3"))
def test_calls_of_tools(qwen: Any, name: str) -> None:
    """The calls of a message have its mark, and an empty answer belongs to its message."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    calling = answer("", tool_calls=[CALL])
    result = {"role": "tool", "name": "f", "content": "r"}
    chat = [user("q"), calling, result, answer("one"), user("x"), answer("two")]
    if name == "deepseekv3":
        chat = [user("q"), answer("one"), user("x"), answer("two"), user("y"), answer("three")]
    ours = [k for k, message in enumerate(chat) if message["role"] == "assistant"]
    rows = [[m | ({"train": False} if k == off else {}) for k, m in enumerate(chat)] for off in ours]
    options: dict[str, Any] = {"chat_template": template, "token_cache": False}
    (every,) = labels_of(load_json([{"messages": chat}], qwen, **options))
    found = load_json([{"messages": row} for row in rows], qwen, verify="full", strict=True, **options)
    runs = [without_answers(every, {number}) for number in range(8)]
    expected = [labels for labels in runs if labels != every]
    assert len(expected) >= len(ours)
    if name == "gptoss_training":  # a call and what is said are turns of one message
        for labels in labels_of(found):
            assert set(labels) != {-100}
            assert all(label in (-100, known) for label, known in zip(labels, every, strict=False))
    else:
        assert labels_of(found) == expected


SAME_TEXT = [
    "cohere", "cohere2", "deepseekv3", "gemma", "gemma3", "gptoss", "llama3", "nemotron_3_nano", "phi3", "qwen2_5",
]  # fmt: skip
"""Templates without generation blocks, for which TRL has one with blocks that renders the same text."""


@pytest.mark.parametrize("name", core(SAME_TEXT, "deepseekv3", "gptoss", "llama3", "phi3"))
def test_marks_are_the_same_with_and_without_blocks(qwen: Any, name: str) -> None:
    draw = random.Random(name)
    rows = []
    for _ in range(20):
        turns = [(user(f"u{k}"), answer(draw.choice(["a", " b\n", "c d"]), loss=draw.choice([0, 1]))) for k in range(4)]
        rows.append({"messages": [message for turn in turns[: draw.randint(1, 4)] for message in turn]})
    qwen.bos_token, before = "<|endoftext|>", qwen.bos_token
    try:
        one, other = (
            load_json(rows, qwen, chat_template=(TEMPLATES / f"{each}.jinja").read_text(), token_cache=False)
            for each in (name, f"{name}_training")
        )
    finally:
        qwen.bos_token = before
    assert labels_of(one) == labels_of(other)
    assert one.report.rejected == other.report.rejected
    assert 0 < len(one) < 20


def test_tools_of_each_row(qwen: Any) -> None:
    chat = [user("q"), answer("", tool_calls=[CALL], weight=0), {"role": "tool", "content": "r"}, answer("a")]
    row = {"messages": chat, "tools": [TOOL]}
    found = load_json([row], qwen, verify="full", strict=True)
    (every,) = labels_of(load_json([row], qwen, loss_on="assistant"))
    assert labels_of(found) == [without_answers(every, {0})]


def test_sharegpt(qwen: Any) -> None:
    """As axolotl and LLaMA-Factory have it."""
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "loss": False},
    ]
    turns += [{"from": "observation", "value": "r"}, {"from": "gpt", "value": "a", "loss": True}]
    found = load_json([{"conversations": turns}], qwen, chat_template=QWEN3, verify="full", strict=True)
    assert found.report.notes[0] == "format: sharegpt, loss on marked"
    (every,) = labels_of(load_json([{"conversations": turns}], qwen, chat_template=QWEN3, loss_on="assistant"))
    assert labels_of(found) == [without_answers(every, {0})]


def test_prompts_with_completions(qwen: Any) -> None:
    """Answers of the completion that are not marked otherwise have loss."""
    prompt = [user("a"), answer("b", train=True), user("c")]
    rows = [{"prompt": prompt, "completion": [answer("d", train=False), user("e"), answer("f")]}]
    found = load_json(rows, qwen, verify="full", strict=True)
    assert found.report.notes[0] == "format: prompt-completion, loss on marked"
    (every,) = labels_of(load_json(rows, qwen, loss_on="assistant"))
    assert labels_of(found) == [without_answers(every, {0})]
    rows[0]["completion"] = [answer("d")]
    assert load_json(rows, qwen).report.notes[0] == "format: prompt-completion, loss on completion"


def test_the_token_cache_keeps_marked_answers_apart(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    file = tmp_path / "chats.parquet"
    pq.write_table(in_structs([False, True], pa.bool_()), file)
    cold = [labels_of(gpuload.load_chats(str(file), qwen, **each)) for each in ({}, {"loss_on": "assistant"})]
    assert cold[0] != cold[1]
    for options, expected in zip(({}, {"loss_on": "assistant"}), cold, strict=True):
        warm = gpuload.load_chats(str(file), qwen, **options)
        assert warm.report.from_cache == [str(file)]
        assert labels_of(warm) == expected


def test_formats_without_marks(qwen: Any) -> None:
    with pytest.raises(OptionError, match="loss_on='marked': data in the format text has no such part"):
        gpuload.load_chats(pa.table({"text": ["one"]}), qwen, loss_on="marked")


def test_answers_belong_to_messages() -> None:
    """Spans of answers, of which some have no text."""
    texts = [(0, 0), (10, 1), (20, 3), (40, 5)]  # where texts begin, and their messages
    ours = [False, True, True, True, False, True]
    loss = [True, False, True, True, True, False]
    spans = [(10, 15), (16, 18), (19, 25), (40, 41)]
    assert list(spans_with_loss(spans, texts, loss, ours, True)) == [(16, 18), (19, 25)]
    with pytest.raises(UnknownAnswersError, match="whose answer"):  # (16, 18) may be what is written around a text
        spans_with_loss(spans, texts, loss, ours, False)
    with pytest.raises(UnknownAnswersError, match="whose answer"):
        spans_with_loss([(10, 12), (13, 14), (16, 18)], texts, loss, ours, True)
    with pytest.raises(UnknownAnswersError, match="one answer"):
        spans_with_loss([(10, 25)], texts, loss, ours, True)
    draw = random.Random(0)
    for _ in range(50):  # all or none, whatever the template does
        some = [(at, at + 1) for at in sorted(draw.sample(range(45), 6))]
        assert list(spans_with_loss(some, texts, [True] * 6, ours, True)) == some
        assert spans_with_loss(some, texts, [False] * 6, ours, True) == {}


def in_blocks(*parts: str, when: str = "true") -> str:
    """A template whose answers have a block for each of some parts, if they have what is asked for."""
    blocks = "".join(f"{{% generation %}}{part}{{% endgeneration %}}" for part in parts)
    return (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{%- if m.role == 'assistant' %}"
        f"{{%- if {when} %}}{blocks}{{%- endif %}}"
        "{%- else %}{{ m.content }}<|im_end|>{%- endif %}{%- endfor %}"
    )


THINKING = "{{ '<think>\n\n</think>\n\n' }}", "{{ m.content }}<|im_end|>"
ENDING = "{{ m.content }}", "<|im_end|>"


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("blocks", [THINKING, ENDING], ids=["thinking", "ending"])
@pytest.mark.parametrize("answer", ["no", "</think>", "</think> no", "", " "])
def test_the_last_message_may_have_several_blocks(
    qwen: Any, blocks: tuple[str, ...], answer: str, verify: Any, tmp_path: Path
) -> None:
    first = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    row = [*first, {"role": "user", "content": "r"}, {"role": "assistant", "content": answer}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (row, row[2:])))
    given = {"chat_template": in_blocks(*blocks), "verify": verify, "progress": False, "token_cache": False}
    (ids, every), (_, only) = (
        (each["input_ids"], each["labels"]) for each in gpuload.load_chats(str(path), qwen, **given)[:]
    )
    found = gpuload.load_chats(str(path), qwen, loss_on="last", **given)
    start = len(ids) - ids[::-1].index(qwen.convert_tokens_to_ids("<|im_start|>"))
    assert labels_of(found) == [[-100] * start + every[start:], only]
    assert not found.report.check.mismatches


@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_last_message_without_a_block(qwen: Any, verify: Any, tmp_path: Path) -> None:
    """No other answer is learned in its place."""
    texts = [("user", "q"), ("assistant", "yes"), ("user", "r"), ("assistant", "")]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in texts]}))
    template = in_blocks("{{ m.content }}<|im_end|>", when="m.content")
    with pytest.raises(NoRowsError, match="no token has loss"):
        gpuload.load_chats(str(path), qwen, chat_template=template, loss_on="last", verify=verify)


@pytest.mark.parametrize("marks", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_block_without_a_text_between_two_answers_with_other_marks(
    qwen: Any, marks: tuple[bool, ...], verify: Any, tmp_path: Path
) -> None:
    """It may be of the empty answer between, which this template does not print, or of the one behind."""
    answers = zip(("yes", "", "no"), marks, strict=True)
    row: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    row += [{"role": "assistant", "content": text, "train": mark} for text, mark in answers]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": row}))
    template = in_blocks(*THINKING, when="m.content")
    with pytest.raises(NoRowsError, match="whose answer"):
        gpuload.load_chats(str(path), qwen, chat_template=template, loss_on="marked", verify=verify)


def test_another_format_than_that_of_the_messages(qwen: Any) -> None:
    table = pa.table({"messages": [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]})
    with pytest.raises(DataError, match="pass format='messages'"):
        gpuload.load_chats(table, qwen, format="sharegpt")


IN_ROLES = in_blocks("{{ m.content | trim }}<|im_end|>").replace("== 'assistant'", "in ['assistant', 'model']")
MACRO = "{%- macro put(x) %}{% generation %}{{ x }}{% endgeneration %}{%- endmacro %}"
CALLED_TWICE = MACRO + in_blocks("").replace(
    "{% generation %}{% endgeneration %}", "{{ put('<think></think>\n') }}{{ m.content }}{{ put('<|im_end|>') }}"
)


def message(role: str, content: str, train: bool | None = None) -> dict[str, Any]:
    return {"role": role, "content": content} | ({} if train is None else {"train": train})


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize(
    ("template", "loss_on", "row", "learned"),
    [
        (IN_ROLES, "last", [user("q"), message("model", ""), answer("y")], "y<|im_end|>"),
        (IN_ROLES, "marked", [user("q"), message("model", "", False), answer("y")], "y<|im_end|>"),
        (IN_ROLES, "last", [user("q"), message("model", "x"), message("ipython", "r")], "x<|im_end|>"),
        (CALLED_TWICE, "last", [user("q"), answer("x"), answer("y")], None),
        (CALLED_TWICE, "last", [user("q"), answer("x"), user("r"), answer("y")], "<think></think>\n<|im_end|>"),
    ],
)
def test_whose_block_it_is(
    qwen: Any, template: str, loss_on: Any, row: list[Any], learned: str | None, verify: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": row}))
    given: dict[str, Any] = {"chat_template": template, "loss_on": loss_on, "verify": verify, "progress": False}
    if learned is None:
        with pytest.raises(NoRowsError, match="whose answer"):
            gpuload.load_chats(str(path), qwen, **given)
        return
    found = gpuload.load_chats(str(path), qwen, **given)
    assert qwen.decode([label for label in found[0]["labels"] if label != -100]) == learned
    assert not found.report.check.mismatches


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("{% generation %}a{% endgeneration %}", 1),
        (
            "{% if m.x %}{% generation %}a{% endgeneration %}{% else %}{% generation %}b{% endgeneration %}{% endif %}",
            1,
        ),
        (
            "{% if m.x and 'y' in m %}{% generation %}a{% endgeneration %}{% endif %}"
            "{% if m.x and 'y' not in m %}{% generation %}b{% endgeneration %}{% endif %}",
            1,
        ),
        ("{% if m.x %}{% generation %}a{% endgeneration %}{% endif %}{% generation %}b{% endgeneration %}", 2),
        ("{% for p in m.x %}{% generation %}a{% endgeneration %}{% endfor %}", 2),
        (
            "{% set x = m.x %}{% if x %}{% generation %}a{% endgeneration %}{% set x = false %}{% endif %}"
            "{% if not x %}{% generation %}b{% endgeneration %}{% endif %}",
            2,
        ),
        (
            "{% if ns.x %}{% generation %}a{% endgeneration %}{% set ns.x = false %}{% endif %}"
            "{% if not ns.x %}{% generation %}b{% endgeneration %}{% endif %}",
            2,
        ),
        (
            "{% for p in [] %}{% else %}{% generation %}a{% endgeneration %}{% endfor %}"
            "{% generation %}b{% endgeneration %}",
            2,
        ),
    ],
)
def test_how_many_blocks_a_message_can_have(body: str, count: int) -> None:
    loop = f"{{% for m in messages %}}{body}{{% endfor %}}"
    assert blocks_of_a_message(loop) == count
    assert blocks_of_a_message(f"{{% if messages %}}{loop}{{% endif %}}") == count
    assert blocks_of_a_message(f"{loop}{{% generation %}}end{{% endgeneration %}}") == count
