"""One answer of a conversation is enough to compare in a load, as long as each answer may be the one."""

import random
from typing import Any

import numpy as np
import pytest
from template_cases import TEMPLATES
from test_served import BLOCKS, INSIDE, STRIPPING, load, random_conversation

from gpuload.core.marks import LOSS
from gpuload.kinds.served.engine import ServedEngine
from gpuload.kinds.served.reference import ServedReference
from gpuload.kinds.served.stored import COUNTS

FIXED = 4 + len(COUNTS)


def agrees(reference: ServedReference, messages: Any, stored: list[int]) -> bool:
    """Whether a stored conversation is as it should be, whichever of its answers is made."""
    _, wanted = reference.wanted(messages)
    outcomes = [reference.compared_in_part(messages, stored, lambda _, k=k: k) for k in range(len(wanted))]
    return all(expected == found for expected, found in outcomes)


@pytest.mark.parametrize("template", ["qwen", "stripping", "blocks", "inside", "trl/qwen3", "trl/gptoss"])
def test_what_is_right_passes_and_each_changed_number_is_found(
    qwen: Any, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"qwen": qwen.chat_template, "stripping": STRIPPING, "blocks": BLOCKS, "inside": INSIDE}
    source = own.get(template) or TEMPLATES[template][1]
    reference = ServedReference(qwen, "assistant", chat_template=source)
    monkeypatch.setattr(ServedReference, "compared", lambda self, prompt, found: ([], found))  # it would make all
    rng, seen, rows = random.Random(template), 0, set()
    while seen < 3:
        messages = random_conversation(rng)
        made = reference.rows_of(messages)
        words = made.words().tolist()
        if len(reference.wanted(messages)[1]) < 2 or not made.rows or len(words) > 250:
            continue
        seen += 1
        rows.add(len(made.rows))
        assert agrees(reference, messages, words)
        some = rng.sample(range(words[0], len(words)), 20)
        for at in [*range(4), *range(FIXED, words[0]), *some]:
            for change in (1, -1, int(LOSS))[: 3 if at >= words[0] else 2]:
                other = list(words)
                other[at] = other[at] ^ change if change > 1 else max(other[at] + change, 0)
                try:
                    assert other == words or not agrees(reference, messages, other)
                except (IndexError, ValueError):  # what is stored makes no sense: then a load reports it as well
                    continue
        assert not agrees(reference, messages, words[:-1])
    assert template not in ("stripping", "trl/qwen3") or rows - {1}


@pytest.mark.parametrize("turns", [2, 6])
def test_a_load_finds_what_is_wrong_in_one_of_many_conversations(
    qwen: Any, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers begin one token late, in all conversations."""
    rng = random.Random(turns)
    some = [[f"{role} {rng.random()}" for role in ("ask", "answer") * turns] for _ in range(40)]
    conversations = [
        [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)] for texts in some
    ]
    right = load(qwen, conversations)
    assert right.report.check.rows > 10
    assert not right.report.check.mismatches
    of_columns = ServedEngine._of_columns

    def late(self: Any, found: Any) -> Any:
        stored = of_columns(self, found)
        begins = np.flatnonzero((stored.values[1:] & LOSS) > (stored.values[:-1] & LOSS)) + 1
        stored.values[begins] &= ~LOSS
        return stored

    monkeypatch.setattr(ServedEngine, "_of_columns", late)
    with pytest.warns(UserWarning, match="the fast path differs from the tokenizer in"):
        again = load(qwen, conversations)
    assert again[:] == right[:]


def test_long_conversations_are_compared_by_as_many_answers_as_there_is_time_for(qwen: Any) -> None:
    """A conversation of which one answer is made counts with the size of one of its rows."""
    turns = [
        {"role": role, "content": f"{role} {k}", "reasoning_content": "why " * 9} for k in range(30) for role in "ua"
    ]
    roles = {"u": "user", "a": "assistant"}
    messages = [turn | {"role": roles[turn["role"]]} for turn in turns]
    found = load(qwen, [messages] * 64, chat_template=TEMPLATES["trl/qwen3"][1])
    rows = len(found) / 64
    assert rows > 20
    text = found.report.text_bytes / 64
    assert 64 * text > 4 * (64 << 10)  # the bound of a sample in bytes, if all rows were compared
    assert found.report.check.rows > 4 * (64 << 10) / text
