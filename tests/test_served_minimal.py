"""Rows as served of short conversations against brute force: which turns are learned, behind which ids, with which ids,
and how few rows there can be. Only `apply_chat_template` and the tokenizer are asked."""

import itertools
import random
from typing import Any

import pytest
from template_cases import EVERY, TEMPLATES
from test_served import load, random_conversation
from tiers import PART

from gpuload.core.errors import NoRowsError, TokenizerError
from gpuload.kinds.served.reference import ServedReference
from gpuload.template.answers import has_blocks

IDS, LOSS = (1 << 21) - 1, 1 << 30
COUNT = 400 if PART == "all" else 25
THINKING = ("think", "THINK", "thought", "analysis")  # in the literals around reasoning


def short_conversation(rng: random.Random) -> list[dict[str, Any]]:
    """At most five answers: with reasoning, calls of tools and their results, empty texts, and answers in a row."""
    messages = random_conversation(rng)
    while sum(message["role"] == "assistant" for message in messages) > 5:
        messages = random_conversation(rng)
    return messages


def rendered(tokenizer: Any, template: str, messages: list[Any], **more: Any) -> str | None:
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **more)
    except Exception:
        return None
    return str(text)


def sequences_of(tokenizer: Any, template: str, messages: list[Any], number: int) -> set[tuple[int, ...]] | None:
    """What may be learned of a turn, by its definition: ids of prompt and answer, for each place where the answer may
    end. None if the turn may be learned or not: what thinking blocks and control tokens in texts mean is not repeated
    here."""
    prompt = rendered(tokenizer, template, messages[:number], add_generation_prompt=True)
    whole = rendered(tokenizer, template, messages[: number + 1])
    if prompt is None or whole is None:
        return set()
    opens = any(word in prompt[-40:] for word in THINKING)
    if not whole.startswith(prompt):
        return None if opens else set()
    if not messages[number].get("reasoning_content") and (
        opens or any(word in whole[len(prompt) :] for word in THINKING)
    ):
        return None
    added = [token for token in tokenizer.get_added_vocab() if token]
    if any(token in str(messages[number]) for token in added):
        return None
    if not whole[len(prompt) :].strip():
        return set()
    answer, before = whole[len(prompt) :], encoded(tokenizer, prompt)
    places = {at + len(each) for each in added for at in range(len(answer)) if answer.startswith(each, at)}
    ends = {len(answer), *places}
    first = answer.find(tokenizer.eos_token) if tokenizer.eos_token else -1
    if first >= 0:
        ends = {end for end in ends if end <= first + len(tokenizer.eos_token)}
    found = set()
    for end in ends:
        both = encoded(tokenizer, prompt + answer[:end])
        if both[: len(before)] != before:
            anchor = tokenizer.eos_token
            both = (*before, *encoded(tokenizer, anchor + answer[:end])[len(encoded(tokenizer, anchor)) :])
        found.add(both)
    return found


def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def fewest(sequences: list[tuple[int, ...]]) -> int:
    """The smallest number of sequences of which each one is the beginning of some, by trying all sets."""
    distinct = sorted(set(sequences), key=len)
    for size in range(len(distinct) + 1):
        for chosen in itertools.combinations(distinct, size):
            if all(any(other[: len(one)] == one for other in chosen) for one in distinct):
                return size
    raise AssertionError


def check(tokenizer: Any, template: str, messages: list[Any], made: Any) -> tuple[int, int]:
    """Checks the rows of one conversation.

    Returns:
        How many turns are learned, and of how many it is known that they must be.
    """
    learned: dict[int, tuple[int, ...]] = {}
    parts = {}
    for row, begin, end, number in made.answers:
        ids = made.rows[row][0]
        assert number not in learned  # once
        learned[number], parts[number] = tuple((ids[:end] & IDS).tolist()), (row, begin, end)
    blocks, sure = has_blocks(template), 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            assert number not in learned
            continue
        possible = sequences_of(tokenizer, template, messages, number)
        if possible is None:
            continue
        sure += bool(possible)
        assert blocks or bool(possible) == (number in learned), (number, messages)
        assert number not in learned or learned[number] in possible, (number, messages)
    rows = [tuple((ids & IDS).tolist()) for ids, _ in made.rows]
    assert len(rows) == len(set(rows)) == fewest(list(learned.values()))
    assert set(rows) <= set(learned.values())  # each ends with an answer
    expected: list[set[int]] = [set() for _ in rows]
    for number, (row, begin, end) in parts.items():
        prompts = [
            rendered(tokenizer, template, messages[:number], add_generation_prompt=True, **switch)
            for switch in ({}, {"enable_thinking": False}, {"thinking": False})
        ]
        assert rows[row][:begin] in {encoded(tokenizer, each) for each in prompts if each is not None}
        expected[row] |= set(range(begin, end))
    for (ids, _), places in zip(made.rows, expected, strict=True):
        loss = set(((ids & LOSS) != 0).nonzero()[0].tolist())
        assert loss <= places if blocks else loss == places  # nothing else has loss
    return len(learned), sure


@pytest.mark.parametrize("name", EVERY)
def test_short_conversations_of_all_templates(name: str, qwen: Any) -> None:
    tokenizer, template = TEMPLATES[name]
    tokenizer = qwen if name.startswith("trl/") else tokenizer
    rng = random.Random(f"short {name}")
    conversations = [short_conversation(rng) for _ in range(COUNT)]
    prompt = rendered(tokenizer, template, [{"role": "user", "content": "q"}], add_generation_prompt=True) or ""
    options: dict[str, Any] = {"chat_template": template}
    if prompt.endswith("<think>\n"):
        options["thinking"] = ("<think>\n", "\n</think>\n\n")
    reference = ServedReference(tokenizer, "assistant", **options)
    expected, learned, sure = [], 0, 0
    for number, messages in enumerate(conversations):
        made = reference.rows_of(messages)
        counts = check(tokenizer, template, messages, made)
        learned, sure = learned + counts[0], sure + counts[1]
        expected += [(number, (ids & IDS).tolist(), ((ids & LOSS) != 0).tolist()) for ids, _ in made.rows]
    print(f"{name}: {COUNT} conversations, {learned} turns learned, {sure} by brute force, {len(expected)} rows")
    if not expected:
        with pytest.raises((NoRowsError, TokenizerError)):
            load(tokenizer, conversations, **options)
        return
    data = load(tokenizer, conversations, **options, max_length=100_000, verify="off")
    found = [(row["conversation"], row["input_ids"], [label != -100 for label in row["labels"]]) for row in data[:]]
    assert found == expected
