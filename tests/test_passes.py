"""Conversations of many shapes, which go through the automaton of a template together, are those of transformers."""

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from template_cases import assert_same, column, compile, small_tokenizer
from test_template_automaton import TEMPLATES, TEXTS
from test_template_random import CONTENTS, MACROS, grown
from tiers import SHARED, core, shared, shared_tokenizers, with_shared

from gpuload.core.errors import TokenizerError
from gpuload.engines.host import passes
from gpuload.engines.host.passes import TogetherWalk
from gpuload.engines.host.prompts import render_messages
from gpuload.engines.host.render import render
from gpuload.engines.walk import Printed
from gpuload.reference.template_call import TemplateCall
from gpuload.template.answers import Answers, has_blocks
from gpuload.template.automaton.rows import RowRenderer, _pairs
from gpuload.template.compiler import ChatProgram
from gpuload.template.known import forget_templates

FIELDS = pa.struct([(name, pa.string()) for name in ("role", "content", "name", "reasoning_content")])


def text(draw: random.Random) -> str:
    return "".join(draw.choice(TEXTS) for _ in range(draw.randint(0, 3)))


def filled(draw: random.Random) -> str:
    """A text that is not empty, without reasoning: answers in others are found row by row."""
    return draw.choice(["hello", " a é漢 b\n", "</s>", "None", "<|im_end|>", "[INST] x"]) + text(draw).replace(
        "think>", ""
    )


def conversation(
    draw: random.Random, longest: int = 30, texts: Callable[[random.Random], str] = text
) -> list[dict[str, Any]]:
    """Roles in turn, and sometimes in any order; sometimes further fields."""
    count, messages = draw.randint(1, 30), []
    turns = ["user", "assistant"] * count
    if draw.random() < 0.3:
        turns.insert(0, "system")
    for role in turns[:count]:
        if draw.random() < 0.05:
            role = draw.choice(["user", "assistant", "system", "tool", "developer"])
        messages.append({"role": role, "content": texts(draw)})
        if draw.random() < 0.02:
            messages[-1][draw.choice(["name", "reasoning_content"])] = text(draw)
    return messages


def expected(call: TemplateCall, answers: Answers | None, messages: Any) -> Any:
    """Text and parts with loss; None if there are none."""
    try:
        text = call.render(messages)
        return text, [] if answers is None else answers.in_bytes(messages, text)
    except Exception:
        return None


def compared(call: TemplateCall, answers: Answers | None, rows: list[list[dict[str, Any]]]) -> int:
    """Compares rows, as a column and as objects of JSON, with transformers; returns how many of the column went through
    the automaton together."""
    wanted = [expected(call, answers, messages) for messages in rows]
    together = []
    for objects in (True, False):
        counts = Counted()
        with counts:
            program = ChatProgram(call, answers)
            made = render_messages(rows, {}, program) if objects else render(program, pa.array(rows, pa.list_(FIELDS)))
        together.append(counts.rows)
        spans: dict[int, list[Any]] = {row: [] for row in range(len(rows))}
        if made.answers is not None:
            for row, start, end, _ in zip(*(each.tolist() for each in made.answers), strict=True):
                spans[row].append((start, end))
        for row, messages in enumerate(rows):
            found = None if row in made.rejected else (made.text[row].as_py(), spans[row])
            assert found == wanted[row], messages
    return together[-1]


class Counted:
    """Counts the rows that go through together."""

    def __enter__(self) -> None:
        self.rows, self._original = 0, TogetherWalk.of
        original = self._original

        def of(passes: TogetherWalk, rows: Any) -> Printed:
            found = original(passes, rows)
            self.rows += int((found.count > 0).sum())
            return found

        TogetherWalk.of = of  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        TogetherWalk.of = self._original  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows go through together, too."""
    monkeypatch.setattr(passes, "FEWEST_TOGETHER", 1)


PLAIN = [name for name, template in TEMPLATES.items() if not has_blocks(template)]
BLOCKS = [name for name, template in TEMPLATES.items() if has_blocks(template)]
ROW_BY_ROW = ("gemma4", "diffusion_gemma", "muse_glimmer", "idefics3", "llava_next", "smolvlm", "llama3")
"""Templates that look at single characters or split texts; the last one rejects all rows, because the tokenizer has no
token for the beginning."""


@pytest.mark.parametrize("name", core(PLAIN, "qwen2_5", "qwen3", "deepseekv3"))
def test_rows_of_many_shapes(name: str, qwen: Any) -> None:
    draw = random.Random(name)
    rows = [conversation(draw) for _ in range(160)]
    together = compared(TemplateCall(qwen, TEMPLATES[name]), None, rows)
    assert together > 50 or name.startswith(ROW_BY_ROW)


@pytest.mark.parametrize("name", core(PLAIN, "qwen2_5", "qwen3", "llama3_1"))
def test_answers_of_rows_of_many_shapes(name: str, qwen: Any) -> None:
    draw = random.Random(name)
    call = TemplateCall(qwen, TEMPLATES[name], add_generation_prompt=False)
    try:
        answers = Answers(call, "assistant")
    except TokenizerError:
        return
    rows = [conversation(draw, texts=text if draw.random() < 0.1 else filled) for _ in range(160)]
    together = compared(call, answers, rows)
    assert together > 40 or name.startswith((*ROW_BY_ROW, "cohere2", "gemma"))


@pytest.mark.parametrize("name", core(BLOCKS, "qwen2_5_training"))
def test_blocks_of_rows_of_many_shapes(name: str, qwen: Any) -> None:
    draw = random.Random(name)
    call = TemplateCall(qwen, TEMPLATES[name], add_generation_prompt=False)
    rows = [conversation(draw) for _ in range(160)]
    together = compared(call, Answers(call, "assistant"), rows)
    assert together > 50 or name.startswith(ROW_BY_ROW)


@pytest.mark.parametrize("behind", ["", "{% generation %}{% endgeneration %}{{ '\n' }}"])
def test_empty_blocks_of_rows_of_many_shapes(behind: str, qwen: Any) -> None:
    """transformers 5.24 marks a token inside of which an empty block is."""
    template = (
        "{% for m in messages %}{{ '### ' + m.role + ':\\n' }}{% if m.role == 'assistant' %}{% generation %}"
        f"{{{{ m.content }}}}{{% endgeneration %}}{behind}"
        "{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    )
    draw = random.Random(behind)
    call = TemplateCall(qwen, template, add_generation_prompt=False)
    rows = [conversation(draw, texts=lambda draw: draw.choice(["", "", "x", "y\n"])) for _ in range(160)]
    assert compared(call, Answers(call, "assistant"), rows) > 50


@shared
@pytest.mark.parametrize("name", with_shared(shared_tokenizers))
def test_rows_of_many_shapes_of_real_tokenizers(name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    if tokenizer.chat_template is None:
        pytest.skip("there is no chat template")
    draw = random.Random(name)
    compared(TemplateCall(tokenizer), None, [conversation(draw) for _ in range(160)])


def test_rejected_rows_have_the_reasons_of_transformers(qwen: Any) -> None:
    draw = random.Random(0)
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.role }}: {{ m.content | trim }}{% if not loop.last %}, {% endif %}{% endfor %}"
    )
    call = TemplateCall(qwen, template)
    rows = [
        [{"role": draw.choice(["user", "assistant"]), "content": text(draw)} for _ in range(draw.randint(1, 12))]
        for _ in range(200)
    ]
    for row in rows[::3]:
        row.append({"role": "tool", "content": ""})
    assert compared(call, None, rows) > 50
    made = render_messages(rows, {}, ChatProgram(call))
    assert set(made.rejected) == set(range(0, 200, 3))
    assert set(made.rejected.values()) == {"no tools here"}


def test_what_was_not_compared_is_compared_first(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row goes through before a row with the same passes, one after the other, was compared with transformers."""
    compared_pairs: set[tuple[int, int]] = set()
    original = RowRenderer._verify

    def verify(self: RowRenderer, messages: Any, row: Any, made: Any, trail: list[int]) -> None:
        original(self, messages, row, made, trail)
        compared_pairs.update(_pairs(trail))

    through: list[tuple[int, int]] = []
    end = TogetherWalk._pass_to

    def pass_to(self: TogetherWalk, number: int, rows: Any) -> None:
        before = self._last[rows].tolist()
        end(self, number, rows)
        through.extend((one, number) for one, row in zip(before, rows, strict=True) if not self._fresh[row])

    monkeypatch.setattr(RowRenderer, "_verify", verify)
    monkeypatch.setattr(TogetherWalk, "_pass_to", pass_to)
    forget_templates()
    draw = random.Random(1)
    rows = [conversation(draw) for _ in range(200)]
    assert compared(TemplateCall(qwen, TEMPLATES["qwen3"]), None, rows) > 50
    assert through
    assert set(through) <= compared_pairs


@pytest.mark.parametrize("seed", range(4))
def test_random_templates(seed: int) -> None:
    draw = random.Random(seed)
    ends = ["message.role == 'user'", "loop.last", "'a' in message.content", "message.content | length > 2"]
    for _ in range(2):
        body = "".join(grown(draw, "B", draw.randint(1, 3)) for _ in range(2))
        body = body.replace("messages[-1]", draw.choice(["message", "messages[loop.index0 - 1]", "messages[-1]"]))
        body += f"{{% if {draw.choice(ends)} %}}{grown(draw, 'B', 2)}{{% endif %}}"
        template = f"{MACROS}{{% for message in messages %}}{body}{{% endfor %}}{grown(draw, 'B', 2)}"
        roles = ["user", "assistant", "system"]
        rows = column(
            [
                [{"role": draw.choice(roles), "content": draw.choice(CONTENTS)} for _ in range(draw.randint(1, 7))]
                for _ in range(100)
            ]
        )
        made = render(compile(small_tokenizer(), chat_template=template), rows)
        assert_same(made, rows, small_tokenizer(), chat_template=template, add_generation_prompt=True)


def test_rows_do_not_part_at_what_another_thread_adds(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not meet again behind it: each would walk alone through the rest of its messages."""
    draw = random.Random(0)
    program = ChatProgram(TemplateCall(qwen, TEMPLATES["qwen2_5"]))
    rows, others = (
        pa.array([conversation(draw, texts=filled) for _ in range(400)], pa.list_(FIELDS)) for _ in range(2)
    )
    begin, step = TogetherWalk.__init__, TogetherWalk._step
    walks: list[TogetherWalk] = []
    steps: list[TogetherWalk] = []

    def begun(walk: TogetherWalk, *arguments: Any) -> None:
        begin(walk, *arguments)
        walks.append(walk)
        if len(walks) == 1:
            render(program, others)  # as if by another thread

    def counted(walk: TogetherWalk, *arguments: Any) -> Any:
        steps.append(walk)
        return step(walk, *arguments)

    monkeypatch.setattr(TogetherWalk, "__init__", begun)
    monkeypatch.setattr(TogetherWalk, "_step", counted)
    made = render(program, rows)
    assert made.text.equals(render(ChatProgram(TemplateCall(qwen, TEMPLATES["qwen2_5"])), rows).text)
    assert sum(walk is walks[0] for walk in steps) < 50
