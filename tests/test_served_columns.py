"""Rows as served by columns: what is decided on paths holds for all texts, and forks that texts decide are found."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
from template_cases import TEMPLATES
from test_served import STRIPPING, load, reference_rows
from transformers import AutoTokenizer

from gpuload.kinds.served.columns import ColumnFinder
from gpuload.kinds.served.decisions import compared, decide, family_of, thinks_nothing, units_of
from gpuload.kinds.served.reference import ServedReference
from gpuload.kinds.served.stored import COUNTS, LOST
from gpuload.kinds.served.texts import maximal
from gpuload.kinds.served.turns import REASONS
from gpuload.template.program import Path, Ref
from gpuload.template.trace import Tracer

# The note of an answer is written while it is the last one, without any literal around it.
NOTING = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last -%}{{ m.note }}{%- endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

# As with R1, the prompt opens the block; what is in it is written while the answer is the last one.
OPENED = STRIPPING.replace("<|im_start|>assistant\n{% if", "<|im_start|>assistant\n<think>\n{% if").replace(
    "{% if enable_thinking is defined and not enable_thinking -%}\n<think>\n",
    "{% if enable_thinking is defined and not enable_thinking -%}",
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many conversations each call of `find` has made, all of whose rows were decided."""
    counts: list[int] = []
    find = ColumnFinder.find

    def counted(self: Any, column: Any) -> Any:
        found = find(self, column)
        counts.append(0 if found is None else int(found.decided.sum()))
        return found

    monkeypatch.setattr(ColumnFinder, "find", counted)
    return counts


def check(tokenizer: Any, template: str, conversations: list[Any], **options: Any) -> Any:
    """Compares the rows of conversations with those of the reference."""
    data = load(tokenizer, conversations, chat_template=template, verify="off", **options)
    found = [(row["conversation"], {key: row[key] for key in ("input_ids", "labels")}) for row in data[:]]
    whole = [reference_rows(tokenizer, template, messages, **options) for messages in conversations]
    assert found == [(number, row) for number, rows in enumerate(whole) for row in rows]
    reference = ServedReference(tokenizer, "assistant", chat_template=template, **options)
    counts = np.sum([reference.rows_of(messages).counts for messages in conversations], axis=0).tolist()
    assert [data.report.counts.get(name, 0) for name in COUNTS] == counts
    reasons = [reference.rows_of(messages).reasons for messages in conversations]
    for number, why in enumerate(REASONS):
        assert data.report.counts.get(f"turns not learned: {why}", 0) == sum(each.get(number, 0) for each in reasons)
    return data


def conversations_with(rng: random.Random, count: int, answers: dict[str, tuple[Any, ...]]) -> list[Any]:
    """Conversations of few shapes, in which all answers have the same fields."""
    made = []
    for _ in range(count):
        messages = []
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": rng.choice(("why?", "<think>", "é\n", " 1 + 1 "))})
            messages.append({"role": "assistant"} | {name: rng.choice(some) for name, some in answers.items()})
        made.append(messages)
    return made


@pytest.mark.parametrize("template", ["stripping", "trl/qwen3", "opened"])
@pytest.mark.parametrize("missing", ["prompt", "learn", "skip"])
@pytest.mark.parametrize("reasons", [("so", "<t", " \n", "x</think>", "</think>"), ("",), None], ids=str)
def test_templates_that_drop_reasoning(qwen: Any, template: str, missing: Any, reasons: Any, made: list[int]) -> None:
    source = {"stripping": STRIPPING, "opened": OPENED}.get(template) or TEMPLATES[template][1]
    texts = ("yes", "", " a b ", "<think>", "<think>\n\nyes", "</think>", "中文", "<think>\n\n</think>\n\nno", "so")
    answers: dict[str, Any] = {"content": texts} | ({"reasoning_content": reasons} if reasons else {})
    conversations = conversations_with(random.Random(f"{template} {missing}"), 60, answers)
    some = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]] * 3
    check(qwen, source, [*conversations, *some], missing_reasoning=missing)
    if template != "opened" and (missing != "skip" or (reasons and reasons[0])):
        assert sum(made) > 10


def test_reasoning_that_the_template_does_not_write_is_counted(qwen: Any, made: list[int]) -> None:
    """Unless it is in the answer all the same."""
    answers = {"content": ("a", "so b", ""), "reasoning": ("", " so", "é"), "reasoning_content": (" ", " so\n", "b")}
    conversations = conversations_with(random.Random(6), 100, answers)
    data = check(qwen, qwen.chat_template, conversations)
    assert sum(made) == 100
    assert 0 < data.report.counts[COUNTS[LOST]] < sum(len(each) // 2 for each in conversations)


@pytest.mark.parametrize("switch", ["enable_thinking", "other"])
@pytest.mark.parametrize("missing", ["prompt", "skip"])
def test_turns_without_reasoning_are_not_learned(qwen: Any, missing: Any, switch: str, made: list[int]) -> None:
    """With "skip", or without a prompt for them. Conversations of which nothing is learned are made row by row."""
    template = STRIPPING.replace("enable_thinking", switch)
    conversations = conversations_with(random.Random(7), 60, {"content": ("a", "b"), "reasoning_content": ("r", "")})
    check(qwen, template, conversations, missing_reasoning=missing)
    silent = [not any(m.get("reasoning_content") for m in each) for each in conversations]
    assert sum(made) == 60 - sum(silent) * (missing == "skip" or switch == "other")
    assert any(silent)


def test_texts_decide_whether_there_is_a_fork(qwen: Any, made: list[int]) -> None:
    """A note that is empty makes none. Others differ from the answer at once, later, or where it ends."""
    rng = random.Random(5)
    notes, texts = ("", "a", "x" * 20, "yes", "é"), ("yes", "a" * 40, "x" * 30, "x" * 20, "中文", "")
    conversations = conversations_with(rng, 300, {"note": notes, "content": texts})
    data = check(qwen, NOTING, conversations)
    empty = [[not m.get("note") for m in each[1:-1:2]] for each in conversations]
    assert sum(made) == sum(not any(each) for each in empty) > 50
    assert len(set(data.take(["conversation"])["conversation"])) == 300
    assert len(data) == sum(1 + len(each) - sum(each) for each in empty)


def test_later_loads_trace_nothing_again(qwen: Any, qwen_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where template and constants are the same."""
    traced: list[Any] = []
    trace = Tracer.trace
    monkeypatch.setattr(Tracer, "trace", lambda *given: traced.append(given) or trace(*given))
    conversations = conversations_with(random.Random(1), 40, {"content": ("a", "b")})
    first = check(qwen, STRIPPING, conversations)
    assert traced
    traced.clear()
    assert check(qwen, STRIPPING, conversations)[:] == first[:]
    assert not traced
    dated = STRIPPING.replace("{%- set ns", "{{ strftime_now('%H') * 0 }}{%- set ns", 1)
    for template in (dated, dated):
        check(qwen, template, conversations)
        assert traced
        traced.clear()
    other = AutoTokenizer.from_pretrained(qwen_folder, cls_token="<|im_end|>")
    assert check(other, STRIPPING, conversations)[:] == first[:]
    assert traced


# -- what is decided on literals -------------------------------------------------------------------------------------

TEXTS = ("", "a", "b", "ab", "ba", "<t>", "\n", " a", "</t>")


def random_units(rng: random.Random) -> tuple[Any, ...]:
    parts = [Ref(rng.randint(0, 2)) if rng.random() < 0.4 else rng.choice(TEXTS) for _ in range(rng.randint(1, 5))]
    return units_of(Path(tuple(parts)))


def text_of(units: tuple[Any, ...], texts: tuple[str, ...]) -> str:
    return "".join(unit if isinstance(unit, str) else texts[unit.message] for unit in units)


def test_comparisons_hold_for_all_texts() -> None:
    rng, seen = random.Random(1), set()
    for _ in range(1000):
        head = random_units(rng)
        units = random_units(rng) if rng.random() < 0.3 else units_of(Path((*head, *random_units(rng))))
        begins, (unit, at) = compared(head, units)
        seen.add(begins)
        for texts in itertools.product(TEXTS[:5], repeat=3):
            one, other = text_of(head, texts), text_of(units, texts)
            assert begins is None or other.startswith(one) == begins
            first = units[unit] if unit < len(units) else ""
            common = text_of(units[:unit], texts) + (first[:at] if isinstance(first, str) else "")
            assert other.startswith(common)
            assert one.startswith(common)
            assert begins is not True or one == common
    assert seen == {True, False, None}


def test_rows_are_those_that_no_other_one_begins_with() -> None:
    rng, compared_ones = random.Random(2), 0
    for _ in range(600):
        turns = [units_of(Path((*random_units(rng), "z")))]
        for _ in range(rng.randint(0, 3)):
            base = rng.choice(turns)
            turns.append(units_of(Path((*base[: rng.randint(0, len(base))], *random_units(rng), "z"))))
        family = family_of(turns)
        for texts in itertools.product(TEXTS[:4], repeat=3):
            whole = [text_of(each, texts) for each in turns]
            rows = [whole[k] for k in family.rows]
            forks = [(whole[fork.turn], rows[fork.row]) for fork in family.forks]
            if any(one.startswith(other) or other.startswith(one) for one, other in forks):
                continue  # then a conversation is made by the reference
            compared_ones += 1
            assert list(family.rows) == maximal(whole)
            for turn, row in enumerate(family.row_of):
                assert row == next(k for k, each in enumerate(rows) if each.startswith(whole[turn]))
    assert compared_ones > 1000


def test_thinking_is_decided_as_the_reference_sees_it(qwen: Any) -> None:
    reference = ServedReference(qwen, "assistant", thinking=("<t>", "</t>"))
    writer, rng, seen = reference.writer, random.Random(3), set()
    pairs = [("<t>", "</t>")]
    for _ in range(500):
        prompt = (*random_units(rng), rng.choice(("q", "<t>\n", "a\n")))
        prompt = units_of(Path(prompt))
        rendered = units_of(Path((*prompt, *random_units(rng), "z")))
        found = thinks_nothing(prompt, rendered, pairs)
        for texts in itertools.product(TEXTS, repeat=3):
            before, whole = text_of(prompt, texts), text_of(rendered, texts)
            real = writer._thinks_nothing(before, whole[len(before) :])
            if isinstance(found, bool):
                starts = text_of(units_of(Path(rendered)), texts)[len(before) :].lstrip().startswith("<t>")
                assert real == found or (starts and not found)  # a text that opens a block itself has one
            elif found is not None:
                ref, close = found
                text = texts[ref.message]
                if text == "":
                    inside = thinks_nothing(prompt, units_of(Path(rendered), ref), pairs)
                    assert inside is None or isinstance(inside, tuple) or inside == real
                elif text.strip() and not text.lstrip().startswith(close):
                    assert not real
        seen.add(type(found))
    assert seen == {bool, tuple, type(None)}


def test_an_answer_ends_behind_the_first_stop_token(qwen: Any) -> None:
    stops = ServedReference(qwen, "assistant").writer.stops
    made = decide(("é", Ref(0), "\n"), ("é", Ref(0), "\n", Ref(1), ".<|im_end|>\n<|im_end|>"), stops)
    assert made is not None
    assert (made.units[-1], made.begin, made.prompt_end) == (".<|im_end|>", (2, 1), "\n")
    assert decide(("b",), ("a", Ref(0), "<|im_end|>"), stops) is None
    assert decide(("a",), ("a", Ref(0)), stops) is None
