"""Loss masks for templates without `{% generation %}` blocks: marks in every message, call and result of a conversation
show which of them have loss, and TRL's training templates which literals."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tiers import SHARED, shared

import gpuload
from gpuload.core.errors import NoRowsError, TokenizerError
from gpuload.reference.template_call import TemplateCall
from gpuload.template.answers import Answers, has_blocks
from gpuload.template.marks import UnknownAnswersError

trl = pytest.importorskip("trl", reason="TRL has the templates of these tests")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"

Chat = list[dict[str, Any]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "what it does",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "d"}},
                "required": [],
            },
        },
    }
    for name in ("f", "g")
]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def calling(*arguments: Any, content: str | None = "") -> dict[str, Any]:
    functions = [{"name": "f", "arguments": each} for each in arguments]
    calls = [{"id": "abcdefgh1", "type": "function", "function": each} for each in functions]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "f", "tool_call_id": "abcdefgh1", "content": content}


@dataclass
class Marked:
    """A random conversation with marks.

    Attributes:
        messages: of the conversation.
        marks: each mark and the number of its message.
    """

    rng: random.Random
    messages: Chat = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)

    def mark(self, kind: str) -> str:
        text = f"Q{kind}{len(self.marks):03d}q"
        self.marks[text] = len(self.messages)
        return text

    def value(self) -> Any:
        kind = self.rng.randrange(6)
        if kind == 0:
            number = 7_000_000 + len(self.marks)
            self.marks[str(number)] = len(self.messages)
            return number
        if kind == 1:
            return [self.mark("l"), True, None, 0.5]
        if kind == 2:
            return {self.mark("k"): self.mark("v"), "z": [1, 2]}
        return self.mark("v") + self.rng.choice(["", " 'two' \"words\"", "\n你好", " <|im_end|>"])

    def grow(self, complete: bool = False) -> Marked:
        """Some rounds of questions, calls, results and answers.

        Args:
            complete: each call has results that are not empty, as trainers have them.
        """
        rng = self.rng
        as_text, thinking, content = rng.random() < 0.3, rng.random() < 0.3, rng.choice(["", "", "mark", "none"])
        if rng.random() < 0.4:
            self.messages.append({"role": "system", "content": self.mark("s")})
        for _ in range(rng.randint(1, 3)):
            self.messages.append(user(self.mark("u")))
            for _ in range(rng.choice([0, 1, 1, 2])):
                given = [
                    {self.mark("k") if rng.random() < 0.3 else f"x{k}": self.value() for k in range(rng.randrange(3))}
                    for _ in range(rng.choice([1, 1, 1, 2]))
                ]
                arguments = [json.dumps(each, ensure_ascii=False) for each in given] if as_text else given
                said = {"": "", "none": None}.get(content) if content != "mark" else self.mark("c")
                message = calling(*arguments, content=said)
                if thinking:
                    message["reasoning_content"] = self.mark("r")
                self.messages.append(message)
                for _ in given if complete or rng.random() < 0.9 else ():
                    text = rng.choice(['{"r": "' + self.mark("t") + '"}', self.mark("t") + '\n"q"', self.mark("t"), ""])
                    self.messages.append(result(text or (self.mark("t") if complete else "")))
            if complete or rng.random() < 0.9:
                text = self.mark("a")
                if not complete and rng.random() < 0.1:
                    text = f"<think>\n{self.mark('r')}\n</think>\n\n{text}"
                message = answer(text)
                if thinking and rng.random() < 0.5:
                    message["reasoning_content"] = self.mark("r")
                self.messages.append(message)
        return self


def flags(text: str, spans: list[tuple[int, int]]) -> list[bool]:
    loss = [False] * len(text)
    for begin, end in spans:
        loss[begin:end] = [True] * (end - begin)
    return loss


def shown(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[begin:end] for begin, end in spans]


def wrong_marks(conversation: Marked, text: str, loss: list[bool]) -> Iterator[str]:
    """The marks that have loss and should not, or the other way round. A call's text is never partly in an answer."""
    for mark, number in conversation.marks.items():
        role = conversation.messages[number]["role"]
        for found in re.finditer(re.escape(mark), text):
            if set(loss[found.start() : found.end()]) != {role == "assistant"}:
                yield f"{mark} of message {number}, {role}"


def plain_templates() -> dict[str, str]:
    texts = {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}
    return {name: text for name, text in texts.items() if not has_blocks(text)}


PLAIN = plain_templates()
assert PLAIN, f"no such template in {TEMPLATES}"


def call_of(tokenizer: Any, template: str) -> TemplateCall:
    return TemplateCall(tokenizer, template, add_generation_prompt=False)


@pytest.fixture
def bos(qwen: Any) -> Iterator[Any]:
    """Some templates need a BOS token."""
    before, qwen.bos_token = qwen.bos_token, "<|endoftext|>"
    yield qwen
    qwen.bos_token = before


def check_marks(
    call: TemplateCall, seed: str, conversations: int, complete: bool = False, parts: bool = False
) -> tuple[int, int]:
    """How many random conversations have a mask, which is right, and how many have none.

    Args:
        complete: as for `Marked.grow`.
        parts: contents are lists of parts.
    """
    answers, rng = Answers(call, "assistant"), random.Random(seed)
    masked = dropped = 0
    for _ in range(conversations):
        made = Marked(rng).grow(complete)
        made.messages = as_parts(made.messages) if parts else made.messages
        own = replace(call, tools=TOOLS) if rng.random() < 0.5 else call
        try:
            text = own.render(made.messages)
        except Exception:  # not every template takes every conversation
            continue
        try:
            spans = answers.with_call(own).of_text(made.messages, text)
        except UnknownAnswersError:
            dropped += 1
            continue
        assert list(wrong_marks(made, text, flags(text, spans))) == [], (made.messages, shown(text, spans))
        masked += 1
    return masked, dropped


ONLY_PARTS = {"idefics3", "llava_next", "smolvlm"}
"""Templates that print lists of content parts only, not texts."""


def as_parts(messages: Chat) -> Chat:
    return [m | {"content": [{"type": "text", "text": m["content"]}]} if m["content"] else m for m in messages]


UNKNOWN_WITH_NONE = {"deepseek_r1_distill": 1, "deepseek-v3": 3}
"""How many random conversations have no mask where transformers shows contents that are None to the template: calls
with such contents do not end the turn in DeepSeek's."""


def unknown_of(call: TemplateCall, name: str) -> int:
    return 0 if call.changes.drops_none else UNKNOWN_WITH_NONE.get(name, 0)


@pytest.mark.parametrize("name", PLAIN)
def test_exactly_what_the_assistant_made_has_loss(bos: Any, name: str) -> None:
    for complete in (False, True):
        call = call_of(bos, PLAIN[name])
        masked, dropped = check_marks(call, name, 25, complete, name in ONLY_PARTS)
        assert masked > 0
        assert dropped == unknown_of(call, name)


def turns(*texts: str) -> Chat:
    return [(user, answer)[k % 2](text) for k, text in enumerate(texts)]


PLAIN_ROWS = [
    turns("Q", "A"),
    turns("Q", "A", "P", "B"),
    turns("Q", " A! ", "And?", "B.\n"),
    [{"role": "system", "content": "S"}, *turns("Q", "A")],
    turns("你好", "👋🏽 é", "x", "y", "z", "<think>\nw\n</think>\n\nB"),
]
REJECTED_BY_THE_TEMPLATE = {"gemma": {"System role not supported": 1}}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_conversations_keep_all_rows(bos: Any, name: str) -> None:
    rows = [{"messages": as_parts(row) if name in ONLY_PARTS else row} for row in PLAIN_ROWS]
    found = gpuload.load_chats(pa.Table.from_pylist(rows), bos, chat_template=PLAIN[name], verify="full")
    rejected = REJECTED_BY_THE_TEMPLATE.get(name, {})
    assert found.report.rejected == rejected
    assert len(found) == found.report.check.rows == len(rows) - sum(rejected.values())
    assert found.report.check.mismatches == []
    learned = [bos.decode([token for token in found[k]["labels"] if token != -100]) for k in range(2)]
    assert [[text for text in "QPAB" if text in re.split(r"\W+", each)] for each in learned] == [["A"], ["A", "B"]]


def hidden_answers(rng: random.Random) -> Iterator[tuple[Chat, Chat]]:
    """Conversations whose answers are nothing but tags that templates look for; and the same with other texts."""
    for _ in range(100):
        texts = []
        for k in range(rng.randint(1, 3)):
            texts += [f"Q{k}q", rng.choice(["<think>", "</think>", f"A{k}q", ""])]
        chat = turns(*texts, *(["Qq"] if rng.random() < 0.5 else []))
        if rng.random() < 0.5:
            chat = [{"role": "system", "content": rng.choice(["Sq", "<think>"])}, *chat]
        yield (
            chat,
            [
                {**m, "content": f"Z{k}z"} if m["role"] == "assistant" and "think" in m["content"] else m
                for k, m in enumerate(chat)
            ],
        )


def check_hidden_answers(call: TemplateCall) -> None:
    answers, compared = Answers(call, "assistant"), 0
    for chat, visible in hidden_answers(random.Random(0)):
        contents = {m["content"]: own["content"] for own, m in zip(chat, visible, strict=True)}

        def shown_again(text: str, contents: dict[str, str] = contents) -> str:
            return re.sub(r"Z\dz", lambda found: contents[found[0]], text)

        try:
            text, other = call.render(chat), call.render(visible)
        except Exception:  # not every template takes every conversation
            continue
        if shown_again(other) == text:  # if not, the template takes the tags for reasoning
            expected = [shown_again(each) for each in shown(other, answers.of_text(visible, other))]
            assert shown(text, answers.of_text(chat, text)) == expected, chat
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in ONLY_PARTS])
def test_answers_that_are_only_tags_have_loss(bos: Any, name: str) -> None:
    check_hidden_answers(call_of(bos, PLAIN[name]))


@shared
def test_answers_that_are_only_tags_have_loss_where_the_system_message_comes_late() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "mistral-nemo")
    check_hidden_answers(TemplateCall(tokenizer, add_generation_prompt=False))


@shared
@pytest.mark.parametrize(
    "name", ["qwen3", "llama3.1-instruct", "gemma3", "mistral-nemo", "deepseek-v3", "qwen2.5-instruct"]
)
def test_exactly_what_the_assistant_made_has_loss_with_real_tokenizers(name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    call = TemplateCall(tokenizer, add_generation_prompt=False)
    for complete in (False, True):
        masked, dropped = check_marks(call, name, 60, complete)
        assert masked > 0
        assert dropped == unknown_of(call, name)


@pytest.mark.parametrize(
    "name", [path.stem.removesuffix("_training") for path in sorted(TEMPLATES.glob("*_training.*"))]
)
@pytest.mark.parametrize("empty", [0.0, 0.4], ids=["", "empty"])
def test_answers_with_tools_are_those_of_trls_training_templates(bos: Any, name: str, empty: float) -> None:
    """Where both render the same text.

    Args:
        empty: how many texts of the assistant are empty.
    """
    plain, training = (call_of(bos, (TEMPLATES / f"{each}.jinja").read_text()) for each in (name, f"{name}_training"))
    answers, expected, rng = Answers(plain, "assistant"), Answers(training, "assistant"), random.Random(name)
    for _ in range(40):
        made = Marked(rng).grow(complete=True)
        for message in made.messages if empty else ():
            for key in ("reasoning_content", "thinking", "content"):
                if message["role"] == "assistant" and (key in message or key != "content") and rng.random() < empty:
                    message[key] = ""
        tools = {"tools": TOOLS} if rng.random() < 0.5 else {}
        one, other = replace(plain, **tools), replace(training, **tools)
        try:
            text = one.render(made.messages)
            if text != other.render(made.messages):
                continue
        except Exception:  # not every template takes every conversation
            continue
        spans = expected.with_call(other).of_text(made.messages, text)
        try:
            found = answers.with_call(one).of_text(made.messages, text)
        except UnknownAnswersError:
            assert name in UNKNOWN_WITH_NONE
            assert not plain.changes.drops_none
            continue
        assert flags(text, found) == flags(text, spans), (shown(text, found), shown(text, spans))


def turn(role: str, text: str) -> str:
    return "{% if m.role == '" + role + "' %}" + text + "{% endif %}"


SAY = "{{ m.content or '' }}"
CALLS = "{% for c in m.tool_calls or [] %}[CALL]{{ c.function | tojson }}{% endfor %}"
LOOP, END = "{% for m in messages %}", "{% endfor %}"


def prompt(header: str) -> str:
    return "{% if add_generation_prompt %}" + header + "{% endif %}"


AFTER_USER = "{{ '<|me|>' if loop.previtem.role == 'user' }}"

# Templates in the manner of models that write turns in an unusual way, and the answers of CONVERSATION.
CONVERSATION = [
    user("Q"), calling({"x": "V"}), result("R"), calling({"n": 7}), result("S"), answer("A"), user("P"), answer("B"),
]  # fmt: skip
ONE, TWO = ('[CALL]{"name": "f", "arguments": {"x": "V"}}', '[CALL]{"name": "f", "arguments": {"n": 7}}')
UNUSUAL: dict[str, tuple[str, list[str]]] = {
    "results end an answer, as users do": (
        LOOP + turn("user", f"<|user|>{SAY}") + turn("tool", f"<|observation|>{SAY}")
        + turn("assistant", f"<|assistant|>{SAY}{CALLS}") + END + prompt("<|assistant|>"),
        [f"{ONE}<|observation|>", f"{TWO}<|observation|>", "A<|user|>", "B"],
    ),
    "calls have an end of their own": (
        LOOP + turn("user", f"<|start|>user:{SAY}<|end|>") + turn("tool", f"<|start|>tool:{SAY}<|end|>")
        + turn("assistant", f"<|start|>me:{SAY}{CALLS}" + "{{ '<|call|>' if m.tool_calls else '<|end|>' }}") + END
        + prompt("<|start|>me:"),
        [f"{ONE}<|call|>", f"{TWO}<|call|>", "A<|end|>", "B<|end|>"],
    ),
    "no header behind results": (
        LOOP + turn("user", f"[INST]{SAY}[/INST]") + turn("tool", f"[TOOL_RESULTS]{SAY}[/TOOL_RESULTS]")
        + turn("assistant", f"{SAY}{CALLS}</s>") + END,
        [f"{ONE}</s>", f"{TWO}</s>", "A</s>", "B</s>"],
    ),
    "results within a turn, without a special token": (
        LOOP + turn("user", f"<|user|>{SAY}<|end|>") + turn("tool", f" ({SAY})")
        + turn("assistant", AFTER_USER + f"{SAY}{CALLS}" + "{{ '<|done|>' if m.tool_calls else '<|end|>' }}") + END
        + prompt("<|me|>"),
        [f"{ONE}<|done|>", f"{TWO}<|done|>", "A<|end|>", "B<|end|>"],
    ),
    "calls have a shorter header": (
        LOOP + turn("user", f"<|turn|><|user|>{SAY}<|end|>") + turn("tool", f"<|turn|><|tool|>{SAY}<|end|>")
        + turn("assistant", "<|turn|><|me|>{{ '' if m.tool_calls else '<|say|>' }}" + f"{SAY}{CALLS}<|end|>") + END
        + prompt("<|turn|><|me|><|say|>"),
        [f"{ONE}<|end|>", f"{TWO}<|end|>", "A<|end|>", "B<|end|>"],
    ),
    "calls are turns of their own": (
        LOOP + turn("user", f"user<|of|>{SAY}<|end|>") + turn("tool", f"result<|of|>{SAY}<|end|>")
        + turn("assistant", f"me<|of|>{SAY}<|end|>" + "{% for c in m.tool_calls or [] %}call<|of|>[CALL]"
               "{{ c.function | tojson }}<|end|>{% endfor %}") + END + prompt("me<|of|>"),
        [f"<|end|>call<|of|>{ONE}<|end|>", f"<|end|>call<|of|>{TWO}<|end|>", "A<|end|>", "B<|end|>"],
    ),
    "results are not printed": (
        LOOP + turn("user", f"<|user|>{SAY}<|end|>") + turn("assistant", f"<|me|>{SAY}{CALLS}<|end|>") + END
        + prompt("<|me|>"),
        [f"{ONE}<|end|>", f"{TWO}<|end|>", "A<|end|>", "B<|end|>"],
    ),
    "the prompt thinks": (
        LOOP + turn("user", f"<|user|>{SAY}<|end|>") + turn("tool", f"<|tool|>{SAY}<|end|>")
        + turn("assistant", f"<|me|>{SAY}{CALLS}<|end|>") + END
        + prompt("<|me|><|thought|><|no_thought|>"),
        [f"{ONE}<|end|>", f"{TWO}<|end|>", "A<|end|>", "B<|end|>"],
    ),
    "the prompt has other white space": (
        LOOP + turn("user", f"<|user|>{SAY}<|end|>") + turn("tool", f"<|tool|>{SAY}<|end|>")
        + turn("assistant", f"   <|me|>\n{SAY}{CALLS}<|end|>") + END
        + prompt("{{ '\\n<|me|>\\n\\n' }}"),
        [f"{ONE}<|end|>", f"{TWO}<|end|>", "A<|end|>", "B<|end|>"],
    ),
    "there always is a prompt": (
        LOOP + turn("user", f"<|turn|><|user|>{SAY}<|im_end|>") + turn("tool", f"<|turn|><|tool|>{SAY}<|im_end|>")
        + turn("assistant", f"<|turn|><|me|>{SAY}{CALLS}<|stop|><|im_end|>") + END + "<|turn|><|me|>",
        [f"{ONE}<|stop|><|im_end|>", f"{TWO}<|stop|><|im_end|>", "A<|stop|><|im_end|>", "B<|stop|><|im_end|>"],
    ),
    "contents stand behind results": (
        LOOP + turn("user", f"<|user|>{SAY}<|end|>") + turn("assistant", AFTER_USER + CALLS
            + "{% if m.tool_calls %}<|stop|>{% if not loop.last %}<|tool|>{{ loop.nextitem.content }}<|result|>"
            + "{% endif %}{% endif %}" + SAY + "{{ '<|end|>' if not m.tool_calls }}") + END + prompt("<|me|>"),
        [f"{ONE}<|stop|>", f"{TWO}<|stop|>", "A<|end|>", "B<|end|>"],
    ),
    "the prompt thinks in a channel, and results are within the turn": (
        LOOP + turn("user", f"<|turn>user\n{SAY}<turn|>\n") + turn("tool", f"<|response>f({SAY})<response|>")
        + turn("assistant", "{{ '<|turn>model\n' if loop.previtem.role == 'user' }}" + f"{CALLS}{SAY}"
               "{{ '<turn|>\n' if not m.tool_calls }}") + END + prompt("<|turn>model\n<|channel>thought\n<channel|>"),
        [ONE, TWO, "A<turn|>\n", "B<turn|>\n"],
    ),
    "the prompt says how to begin, and the last answer has no end": (
        LOOP + turn("user", f"<|begin_user|>\n{SAY}\n") + turn("tool", f"<|begin_tool_result|>\n{SAY}\n")
        + turn("assistant", f"<|begin_assistant|>\n{SAY}{CALLS}" + "{{ '\n<|end|>\n' if not loop.last }}") + END
        + prompt("<|begin_assistant|>\nHere are my reasoning steps:\n"),
        [f"{ONE}\n<|end|>", f"{TWO}\n<|end|>", "A\n<|end|>", "B"],
    ),
    "answers have a wrapping that the prompt lacks, and calls another one": (
        LOOP + turn("user", f"<|turn|><|user|><|text|>{SAY}<|/text|><|end|>")
        + turn("tool", f"<|turn|><|system|><|result|>{SAY}<|/result|><|end|>")
        + turn("assistant", "<|turn|><|bot|>{% if m.tool_calls %}<|think|><|/think|><|action|>" + CALLS
               + f"<|/action|>{{% else %}}<|text|>{SAY}<|/text|>{{% endif %}}<|end|>") + END
        + prompt("<|turn|><|bot|><|think|>"),
        [*(f"<|think|><|/think|><|action|>{call}<|/action|><|end|>" for call in (ONE, TWO)),
         "<|text|>A<|/text|><|end|>", "<|text|>B<|/text|><|end|>"],
    ),
    "a prompt that closes thinking stands behind users only": (
        LOOP + turn("user", f"<|User|>{SAY}") + turn("tool", f"<|output|>{SAY}<|/output|>")
        + turn("assistant", "{{ '<|Assistant|></think>' if loop.previtem.role == 'user' }}" + f"{SAY}{CALLS}<|stop|>")
        + END + prompt("{{ '<|Assistant|></think>' if messages[-1].role == 'user' }}"),
        [f"{ONE}<|stop|>", f"{TWO}<|stop|>", "A<|stop|>", "B<|stop|>"],
    ),
    "a prompt for the next round stands behind the last user": (
        LOOP + turn("user", f"<|User|>{SAY}" + "{{ '<|Assistant|>' if not loop.last or add_generation_prompt }}")
        + turn("tool", f"<|outputs|><|output|>{SAY}<|/output|><|/outputs|>")
        + turn("assistant", f"{SAY}{CALLS}<|stop|>") + END,
        [f"{ONE}<|stop|>", f"{TWO}<|stop|>", "A<|stop|>", "B<|stop|>"],
    ),
    "calls have no end": (
        LOOP + turn("user", f"<|turn|><|user|>{SAY}<|end|>") + turn("tool", f"\n<|turn|><|system|>{SAY}<|end|>")
        + turn("assistant", f"<|turn|><|bot|>{SAY}{CALLS}" + "{{ '<|end|>' if not m.tool_calls }}") + END
        + prompt("<|turn|><|bot|>"),
        [ONE, TWO, "A<|end|>", "B<|end|>"],
    ),
    "calls end with another token in the middle": (
        LOOP + turn("user", f"<|h|>user<|/h|>\n\n{SAY}<|eot|>") + turn("tool", f"<|h|>ipython<|/h|>\n\n{SAY}<|eot|>")
        + turn("assistant", f"<|h|>assistant<|/h|>\n\n{SAY}{CALLS}"
               + "{{ '<|eom|>' if m.tool_calls else '<|eot|>' }}") + END + prompt("<|h|>assistant<|/h|>\n\n"),
        [f"{ONE}<|eom|>", f"{TWO}<|eom|>", "A<|eot|>", "B<|eot|>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_answers_of_unusual_templates(bos: Any, name: str) -> None:
    template, expected = UNUSUAL[name]
    assert bos.eos_token == "<|im_end|>"
    call = call_of(bos, template)
    answers, text = Answers(call, "assistant"), call.render(CONVERSATION)
    spans = answers.of_text(CONVERSATION, text)
    assert "".join(shown(text, spans)) == "".join(expected)
    assert check_marks(call, name, 60)[0] > 30


@pytest.mark.parametrize("name", UNUSUAL)
def test_plain_conversations_of_unusual_templates(qwen: Any, name: str) -> None:
    """By the compiled template, and by the rows that transformers renders."""
    rows = [{"messages": [user("Q"), answer("A")]}, {"messages": [user("Q"), answer("A"), user("P"), answer("B")]}]
    found = gpuload.load_chats(pa.Table.from_pylist(rows), qwen, chat_template=UNUSUAL[name][0], verify="full")
    assert len(found) == 2
    assert found.report.check.mismatches == []
    kept = [qwen.decode([token for token in found[k]["labels"] if token != -100]) for k in range(2)]
    assert [set("QPAB") & set(text) for text in kept] == [{"A"}, {"A", "B"}]


SILENT = LOOP + turn("user", f"<|user|>{SAY}<|end|>") + turn("assistant", f"<|me|>{SAY}{CALLS}<|end|>") + turn(
    "tool", f" {SAY} "
) + END + prompt("<|me|>")  # fmt: skip
"""Between results and the text behind them is a header; but calls and results are not separated by any literal."""


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
SUMMARY = "<|im_start|>summary\n{{ %s }}<|im_end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        LOOP.replace("messages", "messages | reverse") + TURN + END + prompt("<|im_start|>assistant\n"),
        LOOP + TURN + END + SUMMARY % "messages[-1].content" + prompt("<|im_start|>assistant\n"),
        LOOP + TURN + END + SUMMARY % "messages[-1].content | trim" + prompt("<|im_start|>assistant\n"),
    ],
)
def test_answers_that_are_printed_twice_or_in_another_order_are_unknown(bos: Any, template: str) -> None:
    assert Answers(call_of(bos, LOOP + TURN + END + prompt("<|im_start|>assistant\n")), "assistant").turns
    with pytest.raises(TokenizerError, match="it prints an answer twice, or behind a later message: pass a chat_temp"):
        Answers(call_of(bos, template), "assistant")


def test_rows_with_unknown_answers_are_dropped_and_counted(qwen: Any, tmp_path: Path) -> None:
    template = SILENT.replace(f"<|me|>{SAY}", AFTER_USER + SAY)
    unknown = [user("Q"), calling({"x": "V"}), result("R"), answer("A")]
    rows = [{"messages": messages} for messages in ([user("Q"), answer("A")], unknown, [user("P"), answer("B")])]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    found = gpuload.load_chats(str(path), qwen, chat_template=template)
    assert len(found) == 2
    (reason,) = found.report.rejected
    assert reason.startswith("its answers are unknown: the template does not show where an answer begins next to a")
    path.write_text(json.dumps(rows[1:2]))
    with pytest.raises(
        TokenizerError, match="does not show where an answer begins .* pass a chat_template with such blocks"
    ):
        gpuload.load_chats(str(path), qwen, chat_template=template)
    # Rows without messages say nothing about the template; a row that it does not render does.
    path.write_text(json.dumps([rows[1], {"messages": None}, {"messages": []}]))
    with pytest.raises(TokenizerError, match="does not show where an answer begins"):
        gpuload.load_chats(str(path), qwen, chat_template=template)
    path.write_text(json.dumps([rows[1], {"messages": None}, {"messages": [{"role": 5, "content": "x"}]}]))
    with pytest.raises(NoRowsError, match="all 3 rows were dropped"):
        gpuload.load_chats(str(path), qwen, chat_template=template)


def test_results_of_tools_without_calls(qwen: Any) -> None:
    """Messages without lists are rendered by the compiled template."""
    template = re.sub(r"\[/\w+\]", "<|im_start|>", UNUSUAL["no header behind results"][0]).replace("</s>", "<|im_end|>")
    messages = [user("Q"), answer("call"), {"role": "tool", "content": "R"}, answer("A")]
    found = gpuload.load_chats(pa.table({"messages": [messages]}), qwen, chat_template=template, verify="full")
    assert found.report.rows_compiled == 1
    assert qwen.decode([token for token in found[0]["labels"] if token != -100]) == "call<|im_end|>A<|im_end|>"
    assert found.report.check.mismatches == []


def test_literals_in_the_names_of_functions_are_not_trusted(bos: Any) -> None:
    call = call_of(bos, PLAIN["qwen3"])
    messages = [user("Q"), calling({"x": "V"}), result("R"), answer("A")]
    messages[1]["tool_calls"][0]["function"]["name"] = "f<|im_end|>\n"
    with pytest.raises(UnknownAnswersError, match="contains the beginning or the end of a turn"):
        Answers(call, "assistant").of_text(messages, call.render(messages))


def test_other_names_of_the_assistant(bos: Any) -> None:
    """Gemma's templates take `model` too."""
    call = call_of(bos, PLAIN["gemma"])
    messages = [user("Q"), {"role": "model", "content": "A"}, {"role": "user", "content": "P"}, answer("B")]
    text = call.render(messages)
    assert shown(text, Answers(call, "assistant").of_text(messages, text)) == ["A<end_of_turn>\n", "B<end_of_turn>\n"]
