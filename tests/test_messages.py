"""What trainers that tokenize conversations message by message share: templates, turns and rows."""

import copy
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpuload.core.arrays import Ragged
from gpuload.core.errors import OptionError
from gpuload.core.marks import split
from gpuload.integrations.messages.rows import NO_LOSS, MessageRows, each_part, trimmed
from gpuload.integrations.messages.templates import COMPILE_MIN_ROWS, Templates, render
from gpuload.integrations.messages.turns import MessageTurns

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fgh"]


def column(*chats: str | None) -> pa.Array:
    """Conversations of messages with one letter each, the role's first one, which is also the content."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "-": None}
    return pa.array(
        [None if chat is None else [{"role": roles[role], "content": role} for role in chat] for chat in chats],
        pa.list_(MESSAGE),
    )


def contents(pieces: pa.Array) -> list[str]:
    return ["".join(message["content"] for message in piece) for piece in pieces.to_pylist()]


def test_turns_of_conversations() -> None:
    turns = MessageTurns(column("sua", None, "", "uattta"), joined="tool")
    assert contents(turns.alone()) == ["s", "u", "a", "u", "a", "ttt", "a"]
    assert turns.row.tolist() == [0, 0, 0, 3, 3, 3, 3]
    assert turns.opening.tolist() == [True, False, False, True, False, False, False]
    assert turns.counts.tolist() == [3, 0, 0, 6]
    assert contents(turns.with_message({"role": "user", "content": "!"}, after=turns.opening)) == [
        "s!", "!u", "!a", "u!", "!a", "!ttt", "!a"
    ]  # fmt: skip
    assert MessageTurns(column("-tt", "tt"), joined="tool").size.tolist() == [1, 2, 2]
    assert MessageTurns(column("-tt").slice(1)).is_role("tool").tolist() == []
    assert MessageTurns(column("a", "-tt").slice(1)).is_role("tool").tolist() == [False, True, True]


def test_rows_of_trimmed_turns() -> None:
    turns = MessageTurns(column("ua", "", "sa"))
    ids = Ragged.from_lists([[1, 2], [3, 4, 5, 6], [7], [8, 9, 10]])
    front, back = np.array([0, 1, 5, 1]), np.array([1, 0, 0, 1])
    rows, loss = split(trimmed(ids, turns, front, np.where(turns.is_role("assistant"), 1, NO_LOSS), back))
    assert rows.to_lists() == [[1, 4, 5, 6], [], [9]]
    assert loss.to_lists() == [[False, False, True, True], [], [False]]


def test_rows_of_parts() -> None:
    parts = each_part(lambda ids: MessageRows(Ragged.from_lists(ids), {1: "odd"}), [[[1], [2, 3]], [[4], [5], [6]]])
    rows = MessageRows.joined(parts, np.array([0, 2, 3, 5, 6]), {1: "empty", 4: "none"})
    assert rows.ids.to_lists() == [[1], [], [], [4], [], [], [6]]
    assert rows.fallback == {1: "empty", 2: "odd", 4: "none", 5: "odd"}
    assert MessageRows.joined([], np.zeros(0, np.int64), {0: "none"}).ids.to_lists() == [[]]


@pytest.mark.parametrize("count", [3, COMPILE_MIN_ROWS * 3])
def test_pieces_are_rendered_with_their_own_arguments(qwen: Any, count: int) -> None:
    given: list[dict[str, Any]] = [{"tools": TOOLS[:2]}, {}, {"add_generation_prompt": True, "tools": TOOLS[2:]}]
    arguments = [given[row % 3] for row in range(count)]
    templates = Templates(qwen)
    pieces = column(*("sua"[row % 3] for row in range(count)))
    text = render(pieces, *templates.choose(arguments))
    expected = [
        qwen.apply_chat_template(chat, tokenize=False, **own)
        for chat, own in zip(pieces.to_pylist(), arguments, strict=True)
    ]
    assert text.text.to_pylist() == expected
    assert templates.ids(text.text).to_lists() == qwen(expected, add_special_tokens=False)["input_ids"]
    assert text.compiled_rows == (count if count >= COMPILE_MIN_ROWS * 3 else 0)
    kept, number = templates.choose([{}])
    assert (kept, number.tolist()) == ([templates.default], [0])


def test_pieces_with_tools_that_few_others_have(qwen: Any) -> None:
    """They need no template of their own: the compiled one without tools renders each with its tools."""
    own = [[TOOLS[row % 3] | {"description": f"tool {row}"}, *TOOLS[: row % 2]] for row in range(40)]
    arguments = [{"tools": tools, "add_generation_prompt": row % 2 == 0} for row, tools in enumerate(own)]
    templates = Templates(qwen)
    pieces = column(*("suatt"[: row % 5 + 1] for row in range(40)))
    text = render(pieces, *templates.choose(arguments))
    assert text.text.to_pylist() == [
        qwen.apply_chat_template(chat, tokenize=False, **some)
        for chat, some in zip(pieces.to_pylist(), arguments, strict=True)
    ]
    assert text.compiled_rows == 40


def test_pieces_with_tools_that_a_template_rejects(qwen: Any) -> None:
    template = "{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ tools }}"
    templates = Templates(qwen, {"chat_template": template})
    for _ in range(2):
        pieces = column(*"ut" * 20)
        text = render(pieces, *templates.choose([{"tools": [TOOLS[0] | {"n": row}]} for row in range(40)]))
        assert text.rejected == dict.fromkeys(range(1, 40, 2), "no")
        assert [row for row, each in enumerate(text.text.to_pylist()) if each] == list(range(0, 40, 2))


def test_pieces_that_a_template_rejects_have_no_ids(qwen: Any) -> None:
    template = "{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    templates = Templates(qwen, {"chat_template": template})
    text = render(column("u", "t", "a"), *templates.choose([{}] * 3))
    assert text.rejected == {1: "no"}
    assert templates.ids(text.text).lengths.tolist() == [1, 0, 1]
    assert len(render(column(), *templates.choose([]))) == 0
    with pytest.raises(OptionError, match="max_length"):
        Templates(qwen, {"max_length": 3})


def test_ids_of_a_tokenizer_that_encodes_in_its_own_way(qwen: Any) -> None:
    class Own(type(qwen)):  # type: ignore[misc]
        def apply_chat_template(self, chat: Any, *given: Any, **named: Any) -> Any:
            made = super().apply_chat_template(chat, *given, **named)
            return made if isinstance(made, str) else made | {"input_ids": [5, *made["input_ids"]]}

    own = copy.copy(qwen)
    own.__class__ = Own
    templates = Templates(own)
    assert not templates.encodes_rendered_text
    pieces = column(*"sua" * 7)
    given = [{"tools": TOOLS[: row % 2]} if row % 2 else {} for row in range(21)]
    expected = [
        own.apply_chat_template(chat, return_dict=True, **arguments)["input_ids"]
        for chat, arguments in zip(pieces.to_pylist(), given, strict=True)
    ]
    assert templates.encode(render(pieces, *templates.choose(given))).to_lists() == expected
