"""Rows as served of answers with the ids that were sampled."""

import copy
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_served import INSIDE, STRIPPING, load, random_conversation

import gpuload
from gpuload.core.errors import OptionError
from gpuload.kinds.served import engine
from gpuload.kinds.served.reference import ServedReference
from gpuload.sources.types import as_json

KEEPING = STRIPPING.replace("loop.index0 > ns.last", "true")

QUESTION, STOP = {"role": "user", "content": "Well?"}, "<|im_end|>"


def split_up(tokenizer: Any, text: str) -> list[int]:
    """The ids of the characters of a text, which are others than those of the text."""
    return [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]


def conversation(tokenizer: Any, *answers: str, stop: str = STOP) -> list[dict[str, Any]]:
    """Answers with ids that the tokenizer would not choose."""
    end = tokenizer.encode(stop, add_special_tokens=False) if stop else []
    ids = [split_up(tokenizer, answer) + end for answer in answers]
    pairs = zip(answers, ids, strict=True)
    return [m for text, own in pairs for m in (QUESTION, {"role": "assistant", "content": text, "token_ids": own})]


def made(tokenizer: Any, rows: list[Any], as_json: bool = True, **options: Any) -> Any:
    if as_json:
        return load(tokenizer, rows, verify="full", **options)
    return gpuload.load_chats(pa.table({"messages": rows}), tokenizer, turns="served", verify="full", **options)


def _template(text: str | None) -> dict[str, Any]:
    return {} if text is None else {"chat_template": text}


def learned(row: dict[str, Any]) -> list[int]:
    return [label for label in row["labels"] if label != -100]


@pytest.mark.parametrize("as_json", [False, True])
def test_sampled_ids_are_learned_and_are_in_later_prompts_if_asked_for(qwen: Any, as_json: bool) -> None:
    messages = conversation(qwen, "forty two", "certainly")
    first, second = messages[1]["token_ids"], messages[3]["token_ids"]
    plain = [{key: m[key] for key in ("role", "content")} for m in messages]
    prompts = [
        qwen.apply_chat_template(plain[:k], add_generation_prompt=True, return_dict=True)["input_ids"] for k in (1, 3)
    ]

    rendered = made(qwen, [messages] * 9, as_json)
    assert [row["input_ids"] for row in rendered[:2]] == [prompts[0] + first, prompts[1] + second]
    assert [learned(row) for row in rendered[:2]] == [first, second]
    assert rendered.report.counts["answers with token_ids that are not those of their text"] == 18

    sampled = made(qwen, [messages] * 9, as_json, history="sampled")
    text = qwen.apply_chat_template(plain[:3], add_generation_prompt=True, tokenize=False)
    rest = qwen.encode(text.rpartition("forty two" + STOP)[2], add_special_tokens=False)
    assert [row["input_ids"] for row in sampled[:]] == [prompts[0] + first + rest + second] * 9
    assert learned(sampled[0]) == first + second
    assert not rendered.report.check.mismatches + sampled.report.check.mismatches


@pytest.mark.parametrize("template", [None, STRIPPING])
def test_random_conversations_with_the_ids_of_their_texts(qwen: Any, template: str | None) -> None:
    rng, own, with_ids = random.Random(5), {"chat_template": template} if template else {}, 0
    plain = ServedReference(qwen, "assistant", **own)
    others = [ServedReference(qwen, "assistant", history=history, **own) for history in ("rendered", "sampled")]
    for _ in range(60):
        messages = random_conversation(rng)
        given = [*messages]
        for number, message in enumerate(messages):
            turn = plain.writer.turn(messages, number) if message["role"] == "assistant" else 0
            if not isinstance(turn, int) and turn.stopped and not turn.without_thinking and rng.random() < 0.7:
                answer, merged = plain.answer(turn, [(0, len(turn.answer))], 1)
                if not merged:  # with the prompt: no later prompt has these ids
                    given[number] = {**message, "token_ids": answer.ids[answer.begin :].tolist()}
                    with_ids += 1
        expected = [(ids.tolist(), number) for ids, number in plain.rows_of(messages).rows]
        for other in others:
            assert [(ids.tolist(), number) for ids, number in other.rows_of(given).rows] == expected
    assert with_ids > 20


@pytest.mark.parametrize("template", [None, STRIPPING])
@pytest.mark.parametrize("history", ["rendered", "sampled"])
@pytest.mark.parametrize("given", [1.0, 0.6], ids=["all", "some"])
def test_many_at_once_are_what_each_alone_is(qwen: Any, template: str | None, history: str, given: float) -> None:
    """The compiled template and one call of the encoder make what the tokenizer makes of each conversation: also with
    other prompts, cut answers, answers without text, and templates that reject a prompt."""
    if template is not None:
        qwen = copy.deepcopy(qwen)
        qwen.chat_template = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + template
    draw, rows = random.Random(1), []
    for _ in range(80):
        messages = random_conversation(draw)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                if draw.random() < 0.2:
                    prompt = qwen.apply_chat_template(messages[:at], add_generation_prompt=True, return_dict=True)[
                        "input_ids"
                    ]
                    message["prompt_token_ids"] = draw.choice((prompt, prompt, prompt[1:]))
                if draw.random() >= given:
                    continue
                text = str(message["content"]) + draw.choice((STOP, STOP, "", "\n"))
                message["token_ids"] = draw.choice((split_up(qwen, text), qwen.encode(text), []))
        rows.append(messages)
    rows.append([QUESTION | {"content": "no"}, *conversation(qwen, "a", "b")[1:]])
    fast = made(qwen, rows, history=history)
    assert not fast.report.check.mismatches
    assert not fast.report.by_reference
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "rows_of_given", lambda *given: None)
        alone = made(qwen, rows, history=history)
    assert fast[:] == alone[:]
    assert fast.report.counts == alone.report.counts
    assert fast.report.rejected == alone.report.rejected


@pytest.mark.parametrize("history", ["rendered", "sampled"])
def test_answers_with_and_without_ids_by_the_tokenizer_alone(qwen: Any, history: str) -> None:
    """What `apply_chat_template` returns for each prompt, and the ids as they are given; the template keeps history."""
    draw, rows, expected = random.Random(2), [], []
    end = qwen.encode(STOP, add_special_tokens=False)
    for number in range(60):
        messages: list[dict[str, Any]] = []
        known: list[tuple[str, list[int]]] = []  # texts up to sampled answers, and their ids
        sequences: list[tuple[list[int], list[int]]] = []
        for _ in range(draw.randint(1, 4)):
            messages.append({"role": "user", "content": draw.choice(("Well?", "中文", " so "))})
            text = qwen.apply_chat_template(plain(messages), add_generation_prompt=True, tokenize=False)
            prompt = qwen.encode(text, add_special_tokens=False)
            if history == "sampled" and known:
                before, ids = known[-1]
                assert text.startswith(before)
                prompt = ids + qwen.encode(text[len(before) :], add_special_tokens=False)
            answer: dict[str, Any] = {"role": "assistant", "content": draw.choice(("forty two", "12 + 3", "it's"))}
            messages.append(answer)
            own = qwen.encode(answer["content"], add_special_tokens=False) + end
            if draw.random() < 0.5:
                own = answer["token_ids"] = split_up(qwen, answer["content"]) + end
                whole = qwen.apply_chat_template(plain(messages), tokenize=False)
                known.append((whole.removesuffix("\n"), prompt + own))
            sequences.append((prompt, own))
        rows.append(messages)
        whole_ids = [prompt + own for prompt, own in sequences]
        for k, ids in enumerate(whole_ids):
            if not any(other[: len(ids)] == ids for other in whole_ids[k + 1 :]):
                parts = [part for part, each in zip(sequences, whole_ids, strict=True) if ids[: len(each)] == each]
                expected.append((number, ids, parts))
    data = made(qwen, rows, history=history)
    assert not data.report.by_reference
    assert [(row["conversation"], row["input_ids"]) for row in data[:]] == [each[:2] for each in expected]
    seen: set[tuple[int, int]] = set()
    for row, (number, _, parts) in zip(data[:], expected, strict=True):
        labels = [-100] * len(row["labels"])
        for prompt, own in parts:
            if (number, len(prompt)) not in seen:  # learned in the first row that has it
                labels[len(prompt) : len(prompt) + len(own)] = own
                seen.add((number, len(prompt)))
        assert row["labels"] == labels


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: message[key] for key in ("role", "content")} for message in messages]


def test_blocks_narrow_answers_without_ids_only(qwen: Any) -> None:
    messages = conversation(qwen, "forty two", "certainly")
    given = messages[1]["token_ids"]
    del messages[3]["token_ids"]
    data = made(qwen, [messages], history="sampled", chat_template=INSIDE)
    assert learned(data[0]) == given + qwen.encode(" certainly", add_special_tokens=False)  # behind "so:"


def test_verification_makes_them_in_another_way(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong row is found, and the tokenizer makes all rows then."""
    expected = made(qwen, [conversation(qwen, "a", "b")])[:]
    right = engine.rows_of_given

    def wrong(*given: Any) -> Any:
        rows = right(*given)
        rows.rows[0][0][0] += 1
        return rows

    monkeypatch.setattr(engine, "rows_of_given", wrong)
    with pytest.warns(UserWarning, match="differs"):
        found = made(qwen, [conversation(qwen, "a", "b")])
    assert "the tokenizer returns" in str(found.report)
    assert found[:] == expected


def test_ids_without_a_stop_token_get_none_with_loss(qwen: Any) -> None:
    messages = conversation(qwen, "forty two", "certainly", stop="")
    row = made(qwen, [messages], history="sampled")[0]
    assert learned(row) == messages[1]["token_ids"] + messages[3]["token_ids"]
    assert qwen.decode(row["input_ids"]).count("forty two" + STOP) == 1


def test_ids_that_are_those_of_the_text_change_nothing(qwen: Any) -> None:
    plain = [{key: m[key] for key in ("role", "content")} for m in conversation(qwen, "forty two", "certainly")]
    own = [
        {**m, "token_ids": qwen.encode(m["content"] + STOP, add_special_tokens=False)} if m["role"] != "user" else m
        for m in plain
    ]
    expected = made(qwen, [plain])[:]
    for history in ("rendered", "sampled"):
        data = made(qwen, [own], history=history)
        assert data[:] == expected
        assert not any("token_ids" in what for what in data.report.counts)


def test_history_that_the_template_rewrites_is_tokenized_again(qwen: Any) -> None:
    messages = conversation(qwen, "forty two", "certainly")
    for message in messages[1::2]:
        message["reasoning_content"] = "hm"
    data = made(qwen, [messages], history="sampled", chat_template=STRIPPING)
    assert [learned(row) for row in data[:]] == [messages[1]["token_ids"], messages[3]["token_ids"]]
    plain = [{key: m[key] for key in ("role", "content")} for m in messages]
    prompt = qwen.apply_chat_template(plain[:3], add_generation_prompt=True, chat_template=STRIPPING, return_dict=True)[
        "input_ids"
    ]
    assert data[1]["input_ids"][: len(prompt)] == prompt
    assert data.report.counts["prompts in which the template rewrites answers with token_ids: ids of their text"] == 1


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("template", [None, STRIPPING, KEEPING])
def test_missing_reasoning_does_not_concern_them(qwen: Any, template: str | None, count: int) -> None:
    """Neither what is learned, nor the prompts of later answers, nor the report."""
    end, empty = qwen.encode(STOP), split_up(qwen, "<think>\n\n</think>\n\n")
    messages = conversation(qwen, "forty two", "certainly")
    if template is not None:
        for message in messages[1::2]:
            message["token_ids"] = empty + message["token_ids"]
    found = [
        made(qwen, [messages] * count, history="sampled", missing_reasoning=how, **_template(template))
        for how in ("learn", "prompt", "skip")
    ]
    assert found[0][:] == found[1][:] == found[2][:]
    assert found[0].report.counts == found[1].report.counts == found[2].report.counts
    assert found[0].report.counts["answers with token_ids that are not those of their text"] == 2 * count
    if template is KEEPING:  # a loop's ids: those of both answers, and of what the template writes between them
        plain = [{key: m[key] for key in ("role", "content")} for m in messages]
        text = qwen.apply_chat_template(plain[:3], add_generation_prompt=True, tokenize=False, chat_template=template)
        first, _, rest = text.rpartition("<think>\n\n</think>\n\nforty two" + STOP)
        ids = [*qwen.encode(first), *messages[1]["token_ids"], *qwen.encode(rest), *messages[3]["token_ids"]]
        assert [row["input_ids"] for row in found[0][:]] == [ids] * count
        assert ids[-1:] == end


def test_prompts_with_some_answers_that_the_template_rewrites(qwen: Any) -> None:
    """The third prompt begins with the first answer as it was sampled, but not with the second one."""
    messages = conversation(qwen, "forty two", "certainly", "no")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 == 3 "
        "and not loop.last %}cut{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for count in (1, 20):
        data = made(qwen, [messages] * count, history="sampled", chat_template=template)
        what = "prompts in which the template rewrites answers with token_ids: ids of their text"
        assert data.report.counts[what] == count
        assert len(data) == 2 * count


def test_turns_of_sharegpt_data(qwen: Any) -> None:
    """Ids and reasoning, as messages have them."""
    messages = conversation(qwen, "forty two", "certainly")
    messages[3]["reasoning_content"] = "hm"
    names = {"user": "human", "assistant": "gpt"}
    turns = [
        {"from": names[m["role"]], "value": m["content"], **{k: m[k] for k in m if k not in ("role", "content")}}
        for m in messages
    ]
    options = {"history": "sampled", "chat_template": STRIPPING, "turns": "served"}
    expected = gpuload.load_chats(pa.table({"messages": as_json([messages])}), qwen, **options)
    found = gpuload.load_chats(pa.table({"conversations": as_json([turns])}), qwen, **options)
    assert found[:] == expected[:]
    assert learned(found[1]) == messages[3]["token_ids"]


def test_the_prompt_must_be_the_one_that_was_sampled_behind(qwen: Any) -> None:
    messages = conversation(qwen, "forty two", "certainly")
    prompt = qwen.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    messages[1]["prompt_token_ids"] = prompt
    assert len(made(qwen, [messages])) == 2
    messages[1]["prompt_token_ids"] = prompt[:-1]
    data = made(qwen, [messages])
    assert [learned(row) for row in data[:]] == [messages[3]["token_ids"]]
    assert data.report.counts["turns not learned: its prompt_token_ids are not those of the prompt"] == 1


def test_ids_that_are_none(qwen: Any) -> None:
    good, size = conversation(qwen, "forty two"), len(qwen)
    bad = [[QUESTION, {**good[1], "token_ids": ids}] for ids in ("12", [size], [-1], {})]
    bad += [[QUESTION, {**good[1], "token_ids": ids}] for ids in (["a"], [5, 6.0], [True, 5], [None])]
    data = made(qwen, [good, *bad, [{**QUESTION, "token_ids": [1]}, good[1]], [QUESTION, {**good[1], "token_ids": []}]])
    assert len(data) == 1
    assert data.report.rejected == {
        f"token_ids of message 1 is not a list of ids from 0 to {size - 1}": 4,
        **{
            f"token_ids of message 1 is not a list of ids from 0 to {size - 1}: it has values of type {kind}": 1
            for kind in ("str", "float", "bool", "NoneType")
        },
        "message 0 has token_ids, and its role is not assistant": 1,
        "no turn is learned: its token_ids are empty": 1,
    }


def test_lists_without_ids_are_no_ids(qwen: Any) -> None:
    """Where a file has one type for all messages, a message without ids may have an empty list."""
    messages = conversation(qwen, "forty two", "certainly")
    without = [{name: m[name] for name in m if name != "prompt_token_ids"} for m in messages]
    empty = [{"token_ids": [], "prompt_token_ids": [], **message} for message in without]
    assert made(qwen, [empty])[:] == made(qwen, [without])[:] != []


def test_loss_weights_caches_and_options(qwen: Any, qwen_folder: str, warm_cache: Path, tmp_path: Path) -> None:
    messages = conversation(qwen, "forty two", "certainly")
    messages[1]["weight"] = 0
    rows = [{"messages": messages}] * 3
    options: dict[str, Any] = {"path": tmp_path / "x.jsonl"}
    found = [load(qwen_folder, rows, **options, history="sampled") for _ in range(2)]
    assert [learned(row) for row in found[0][:]] == [messages[3]["token_ids"]] * 3
    assert found[1].report.from_cache
    assert found[0][:] == found[1][:] != load(qwen_folder, rows, **options)[:]
    with pytest.raises(OptionError, match="history"):
        load(qwen, [messages], history="x")
    with pytest.raises(OptionError, match="turns='served'"):
        gpuload.load_chats(pa.table({"messages": [messages]}), qwen, history="sampled")
