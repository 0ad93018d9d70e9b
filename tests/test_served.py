"""Rows as served: each answer behind the prompt that inference would have. Compared with a naive explosion."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from template_cases import TEMPLATES
from tiers import PART, exhaustive, shared

import gpuload
from gpuload.cli.main import main
from gpuload.core.errors import DataError, NoRowsError, OptionError, TokenizerError
from gpuload.kinds.served import rewrites
from gpuload.kinds.served.columns import ColumnFinder
from gpuload.kinds.served.reference import ServedReference
from gpuload.kinds.served.rewrites import RewriteFinder
from gpuload.template.answers import has_blocks

# Like Qwen3: reasoning of earlier turns is not written, and the last answer has a thinking block.
STRIPPING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 > ns.last -%}
<think>
{{ m.reasoning_content or '' }}
</think>

{% endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""

OPENING = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}
"""

BLOCKS = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' -%}
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>
{% endif -%}
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

# Neither the beginning of an answer nor its end is in the block.
INSIDE = BLOCKS.replace(
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}",
    "{{ 'so: ' }}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>",
)

NOT_WRITTEN = "turns not learned: the prompt is not what the template writes before the answer"

PLAIN = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if loop.last and m.reasoning_content %}<think>
{{ m.reasoning_content }}</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor -%}
"""

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4.", "reasoning_content": "two and two"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "check"},
]


def load(tokenizer: Any, rows: Sequence[Any], **options: Any) -> Any:
    """Rows of a frame, with `messages` if they are lists."""
    rows = [row if isinstance(row, dict) else {"messages": row} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    path = options.pop("path", None)
    if path is None:
        from gpuload.sources.types import as_json

        nested = any(isinstance(row.get(name), list) for row in rows for name in names)
        table = pa.table(
            {
                name: as_json([row.get(name) for row in rows])
                if any(isinstance(row.get(name), list | dict) for row in rows)
                else [row.get(name) for row in rows]
                for name in names
            }
        )
        assert nested or names == ["text"]
        return gpuload.load_chats(table, tokenizer, turns="served", progress=False, **options)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return gpuload.load_chats(str(path), tokenizer, turns="served", progress=False, **options)


def shown(tokenizer: Any, data: Any) -> list[tuple[int, int, str, str]]:
    """Conversation, turn, text and learned text of each row."""
    found = []
    for row in data[:]:
        learned = [label for label in row["labels"] if label != -100]
        found.append((row["conversation"], row["turn"], tokenizer.decode(row["input_ids"]), tokenizer.decode(learned)))
    return found


def test_reasoning_is_learned_in_the_turn_that_has_it(qwen: Any) -> None:
    data = load(qwen, [MESSAGES], chat_template=STRIPPING)
    user = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    first = "<think>\ntwo and two\n</think>\n\n4.<|im_end|>"
    more = "4.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    second = "<think>\ncheck\n</think>\n\nYes.<|im_end|>"
    assert shown(qwen, data) == [(0, 1, user + first, first), (0, 3, user + more + second, second)]


def test_a_template_that_keeps_the_history_gives_one_row(qwen: Any) -> None:
    messages = [{k: m[k] for k in ("role", "content")} for m in MESSAGES]
    data = load(qwen, [messages])
    text = qwen.apply_chat_template(messages, tokenize=False)
    assert shown(qwen, data) == [(0, 3, text.removesuffix("\n"), "4.<|im_end|>Yes.<|im_end|>")]
    assert data.report.counts["answers learned"] == 2
    assert "tokens of rows that only forks need" not in data.report.counts


def test_without_reasoning_the_prompt_is_that_without_thinking(qwen: Any) -> None:
    messages = [{k: m[k] for k in ("role", "content")} for m in MESSAGES[:2]]
    empty, answer = "<think>\n\n</think>\n\n", "4.<|im_end|>"
    learned = {
        choice: shown(qwen, load(qwen, [messages], chat_template=STRIPPING, missing_reasoning=choice))[0][3]
        for choice in ("prompt", "learn")
    }
    assert learned == {"prompt": answer, "learn": empty + answer}
    with pytest.raises(NoRowsError, match="missing_reasoning='skip'"):
        load(qwen, [messages], chat_template=STRIPPING, missing_reasoning="skip")
    no_switch = STRIPPING.replace("enable_thinking", "other")
    with pytest.raises(NoRowsError, match="no prompt without thinking"):
        load(qwen, [messages], chat_template=no_switch)


ABOUT_THINKING = ("<think>", "It opens a <think> block.", "<think>\nIt was cut", "It is <think>\n\n</think> then.")


@pytest.mark.parametrize("text", ABOUT_THINKING)
def test_a_text_that_mentions_thinking_has_no_reasoning(qwen: Any, text: str) -> None:
    """Nor has it an empty block: the one before it is the template's."""
    messages = [MESSAGES[0], {"role": "assistant", "content": text}]
    data = load(qwen, [messages], chat_template=STRIPPING)
    assert [row[3] for row in shown(qwen, data)] == [text + "<|im_end|>"]
    with pytest.raises(NoRowsError, match="missing_reasoning='skip'"):
        load(qwen, [messages], chat_template=STRIPPING, missing_reasoning="skip")


def test_an_empty_block_of_the_text_behind_that_of_the_template(qwen: Any) -> None:
    """It is the data's own, and learned with the one before it."""
    text, empty = "<think>\n\n</think>\n\n4.", "<think>\n\n</think>\n\n"
    data = load(qwen, [[MESSAGES[0], {"role": "assistant", "content": text}]], chat_template=STRIPPING)
    assert [row[3] for row in shown(qwen, data)] == [empty + text + "<|im_end|>"]


def test_a_prompt_that_opens_a_thinking_block(qwen: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\na"}]
    with pytest.raises(NoRowsError, match="pass thinking="):
        load(qwen, [messages], chat_template=OPENING)
    data = load(qwen, [messages], chat_template=OPENING, thinking=("<think>\n", "\n</think>\n\n"))
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert shown(qwen, data) == [(0, 1, prompt + "why\n</think>\n\na<|im_end|>", "why\n</think>\n\na<|im_end|>")]


@pytest.mark.parametrize("close", ["</think>", "\n\n</think>\n\n", "</think>\n"])
def test_a_prompt_with_an_empty_block_that_answers_do_not_have(qwen: Any, close: str) -> None:
    """As that of Gemma 4, which asks its larger models not to think: answers stand behind the block."""
    prompting = "{% if add_generation_prompt %}<|im_start|>assistant\n"
    template = PLAIN + prompting + "{% if not enable_thinking %}<think>" + close + "{% endif %}{% endif %}"
    messages = [MESSAGES[0], {"role": "assistant", "content": "4."}, *MESSAGES[2:]]
    data = load(qwen, [messages], chat_template=template)
    assert check_by_explosion(qwen, template, messages, data[:]) == 1  # the last answer is rendered with its reasoning
    assert [what for what in data.report.counts if "not learned" in what] == [NOT_WRITTEN]
    prompt = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>" + close
    assert shown(qwen, data) == [(0, 1, prompt + "4.<|im_end|>", "4.<|im_end|>")]
    # The prompt with thinking stands before answers with reasoning and without.
    data = load(qwen, [messages], chat_template=template, apply_chat_template_kwargs={"enable_thinking": True})
    assert [row[3] for row in shown(qwen, data)] == ["4.<|im_end|><think>\ncheck</think>\n\nYes.<|im_end|>"]


def test_the_text_of_an_answer_does_not_stop_it(qwen: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    assert shown(qwen, load(qwen, [messages]))[0][3] == "a<|im_end|>b<|im_end|>"


def test_an_answer_that_merges_with_the_prompt(qwen: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\n\na"}]
    data = load(qwen, [messages])
    prompt = qwen.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = qwen("\n\na<|im_end|>", add_special_tokens=False)["input_ids"]
    assert data[0]["input_ids"] == prompt + answer
    assert data[0]["labels"] == [-100] * len(prompt) + answer
    assert any("merge with the prompt" in what for what in data.report.counts)


def test_blocks_narrow_what_is_learned(qwen: Any) -> None:
    template = BLOCKS.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    for text, learned in ((BLOCKS, "4.<|im_end|>Yes.<|im_end|>"), (template, "4.Yes.")):
        assert shown(qwen, load(qwen, [MESSAGES], chat_template=text))[0][3] == learned


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("texts", [("ok 👩",), ("ok Ⅷ", "\u0301ﬁ"), ("",), ("a", "", "b")])
@pytest.mark.parametrize("behind", ["", "<|im_end|>"])
def test_blocks_have_the_tokens_that_they_have_in_conversations(
    qwen: Any, texts: tuple[str, ...], behind: str, verify: Any
) -> None:
    """Also where a block begins or ends inside of a token, or of the tokens of a character."""
    block = "{% generation %}{{ part }}{% endgeneration %}"
    template = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{%- if m.role == 'assistant' %}"
        f"{{%- for part in m.content.split('|') %}}{block}{{%- endfor %}}{behind}<|im_end|>"
        "{%- else %}{{ m.content }}<|im_end|>{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
    )
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "|".join((*texts, "x"))}]
    found = load(qwen, [row], chat_template=template, verify=verify)
    given = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = qwen.apply_chat_template(row, chat_template=template, **given)
    assert found[0]["input_ids"] == expected["input_ids"][: len(found[0]["input_ids"])]
    masks = [label != -100 for label in found[0]["labels"]]
    assert masks == list(map(bool, expected["assistant_masks"]))[: len(masks)]


def test_what_stands_behind_each_of_two_calls_stops_no_answer(qwen: Any) -> None:
    template = (
        "{%- for m in messages %}{{ '### ' + m.role + ':\n' }}{{ m.content }}"
        "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor %}"
        "{{ '\n\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '### assistant:\n' }}{%- endif %}"
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": k}}} for k in (1, 2)]
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    ((_, _, _, learned),) = shown(qwen, load(qwen, [row], chat_template=template, verify="full"))
    assert learned.count("</tool_call>") == 2


def test_prompts_of_another_template(qwen: Any) -> None:
    plain = STRIPPING.replace("loop.index0 > ns.last", "true")  # keeps all reasoning, as templates for training do
    assert len(load(qwen, [MESSAGES], chat_template=plain)) == 1
    data = load(qwen, [MESSAGES], chat_template=plain, serving_template=STRIPPING)
    assert [row[1] for row in shown(qwen, data)] == [1]
    assert [what for what in data.report.counts if what.startswith("turns not learned")]


@pytest.mark.parametrize(
    ("loss_on", "turns"),
    [("assistant", [1, 3, 5]), ("last", [5]), ("last_turn", [3, 5]), ("marked", [1, 5])],
)
def test_which_answers_have_loss(qwen: Any, loss_on: Any, turns: list[int]) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "1", "train": True},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "3", "train": False},
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "5", "train": True},
    ]
    (row,) = shown(qwen, load(qwen, [messages], loss_on=loss_on))
    assert row[3] == "".join(f"{turn}<|im_end|>" for turn in turns)
    assert row[1] == turns[-1]


def test_completions_have_loss(qwen: Any) -> None:
    row = {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
    (found,) = shown(qwen, load(qwen, [row]))
    assert found[3] == "Yes.<|im_end|>"


def test_weights_of_answers(qwen: Any) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "1", "weight": 0.25},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "3"},
    ]
    weights = [w for w in load(qwen, [messages])[0]["loss_weight"] if w]
    assert weights == [0.25, 0.25, 1.0, 1.0]


def test_long_rows_end_behind_their_last_answer(qwen: Any) -> None:
    messages = [{k: m[k] for k in ("role", "content")} for m in MESSAGES]
    whole = load(qwen, [messages])
    size = len(whole[0]["input_ids"])
    with pytest.raises(NoRowsError, match="max_length"):
        load(qwen, [messages], max_length=size - 1)
    (row,) = shown(qwen, load(qwen, [messages], max_length=size - 1, overlong="keep_start"))
    assert row[2].endswith("4.<|im_end|>")
    assert row[3] == "4.<|im_end|>"
    turns = [
        load(qwen, [messages], **cut)[0]["turn"] for cut in ({}, {"max_length": size - 1, "overlong": "keep_start"})
    ]
    ends = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    assert turns == [ends[-1], ends[-2]]
    with pytest.raises(NoRowsError, match="no answer ends within max_length=8"):
        load(qwen, [messages], max_length=8, overlong="keep_start")


def test_a_long_row_does_not_take_the_others_with_it(qwen: Any) -> None:
    data = load(qwen, [MESSAGES], chat_template=STRIPPING)
    first, second = data.lengths
    assert first < second
    kept = load(qwen, [MESSAGES], chat_template=STRIPPING, max_length=int(first))
    assert kept.lengths.tolist() == [first]
    assert kept.report.counts["rows as served over the limit"] == 1
    assert (
        kept.report.counts["answers learned"] == kept.report.counts["answers not learned, in rows over the limit"] == 1
    )


def test_answers_that_are_learned_in_rows_over_the_limit(qwen: Any) -> None:
    """They are counted. The last row here begins with the first answer, which is learned in the second row."""
    ask, answers = {"role": "user", "content": "q"}, ["one", "two", "three"]
    messages = [each for text in answers for each in (ask, {"role": "assistant", "content": text})]
    messages[3]["reasoning_content"] = "why " * 60
    thought = "loop.index0 > ns.last and m.reasoning_content"
    options = {"chat_template": STRIPPING.replace("loop.index0 > ns.last", thought)}
    whole = load(qwen, [messages], **options)
    for overlong, learned in (("drop", ["three"]), ("keep_start", ["one", "three"])):
        data = load(qwen, [messages], max_length=60, overlong=overlong, **options)
        assert [row[3].removesuffix("<|im_end|>") for row in shown(qwen, data)] == learned
        counts = data.report.counts
        assert counts["answers learned"] == len(learned)
        assert counts["answers not learned, in rows over the limit"] == 3 - len(learned)
    assert whole.report.counts["answers learned"] == 3


def test_columns_with_the_names_of_those_that_are_made(qwen: Any) -> None:
    table = pa.table({"messages": [[{k: m[k] for k in ("role", "content")} for m in MESSAGES]], "turn": ["mine"]})
    data = gpuload.load_chats(table, qwen, turns="served", progress=False)
    assert data[-1]["turn"] == 3
    assert "the column turn is that of rows as served, not of the files" in data.report.notes


def test_rows_of_text_among_conversations(qwen: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": MESSAGES[:1], "completion": MESSAGES[1:2]})
        + "\n"
        + json.dumps({"prompt": "q", "completion": "a"})
    )
    data = gpuload.load_chats(str(tmp_path / "rows.jsonl"), qwen, turns="served", progress=False)
    assert data.report.rejected == {"the row is text, not a conversation": 1}


def test_wrong_options(qwen: Any) -> None:
    for options, why in (
        ({"loss_on": "all"}, "no such part"),
        ({"overlong": "keep_end"}, "keep_start"),
        ({"device": "cuda"}, "made on the CPU"),
        ({"thinking": "<think>"}, "open and close"),
        ({"missing_reasoning": "x"}, "missing_reasoning"),
        ({"chat_template": None}, "chat_template=None is for texts"),
    ):
        with pytest.raises(OptionError, match=why):
            load(qwen, [MESSAGES], **options)
    with pytest.raises(OptionError, match="turns='served'"):
        load(qwen, [{"text": "x"}])
    for options in ({"missing_reasoning": "learn"}, {"serving_template": "{{ x }}"}, {"loss_on": "last_turn"}):
        with pytest.raises(OptionError, match="is for turns='served': pass that too"):
            gpuload.load_chats(pa.table({"messages": [[{"role": "user", "content": "q"}]]}), qwen, **options)


def test_lost_reasoning_is_an_error_with_strict(qwen: Any) -> None:
    data = load(qwen, [MESSAGES])
    assert data.report.counts["answers whose reasoning the template does not write"] == 2
    with pytest.raises(DataError, match="reasoning the template does not write"):
        load(qwen, [MESSAGES], strict=True)


def test_rows_of_which_nothing_can_be_made_take_no_others(qwen: Any) -> None:
    rows = [MESSAGES, [], None, [{"role": "user", "content": "q"}], [{"role": "assistant"}], MESSAGES]
    data = load(qwen, rows, chat_template=STRIPPING)
    assert [row[:2] for row in shown(qwen, data)] == [(0, 1), (0, 3), (5, 1), (5, 3)]
    assert data.report.rows_rejected == 4
    why = "no turn is learned: there is no answer of an assistant, or none that loss_on selects"
    assert why in data.report.rejected
    after = load(qwen, [[*MESSAGES, {"role": "user", "content": "and?"}], MESSAGES], loss_on="last_turn")
    assert after.report.rejected == {why: 1}


def test_columns_batches_packs_and_arrow(qwen: Any, tmp_path: Path) -> None:
    rows = [{"messages": MESSAGES, "id": k, "turn": "own"} for k in range(5)]
    data = load(qwen, rows, chat_template=STRIPPING)
    assert data.take(["id"])["id"] == [k for k in range(5) for _ in range(2)]
    assert data.columns["turn"].to_pylist() == [1, 3] * 5  # the name is that of rows as served
    batch = data.batch([3, 0])
    assert batch["conversation"].tolist() == [1, 0]
    assert batch["labels"][0][batch["labels"][0] != -100].tolist() == [t for t in data[3]["labels"] if t != -100]
    table = data.to_arrow().read_all()
    assert table["labels"].to_pylist() == [row["labels"] for row in data[:]]
    assert table["conversation"].to_pylist() == [k for k in range(5) for _ in range(2)]
    packs = [pack["input_ids"] for pack in data.loader(1, packing="bfd", pack_length=256)]
    assert sum(pack.numel() for pack in packs) == int(data.lengths.sum())
    assert data.origin(3) == (data.report.files[0], 1)
    gpuload.save_to_disk({"train": data}, str(tmp_path / "store"))


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_from_the_cache(qwen_folder: str, warm_cache: Path, tmp_path: Path, store: Any) -> None:
    rows = [{"messages": MESSAGES, "id": k} for k in range(5)]
    options: dict[str, Any] = {"path": tmp_path / "x.jsonl", "chat_template": STRIPPING, "store": store}
    made, again = (load(qwen_folder, rows, **options) for _ in range(2))
    assert again.report.from_cache
    assert made[:] == again[:]
    assert len(made) == 10
    assert made.report.counts == again.report.counts
    other = load(qwen_folder, rows, **options, missing_reasoning="learn")
    assert not other.report.from_cache


def test_the_command_exports_rows_as_served(qwen_folder: str, tmp_path: Path) -> None:
    file, store = tmp_path / "x.jsonl", tmp_path / "store"
    file.write_text(json.dumps({"messages": MESSAGES}) + "\n")
    (tmp_path / "t.jinja").write_text(STRIPPING)
    arguments = ["prepare", str(file), "--tokenizer", qwen_folder, "--chat-template", str(tmp_path / "t.jinja")]
    assert main([*arguments, "--turns", "served", "--export", "sft", str(store), "--for", "llamafactory"]) == 0
    made = datasets.load_from_disk(str(store))["train"]
    assert made["labels"] == [row["labels"] for row in load(qwen_folder, [MESSAGES], chat_template=STRIPPING)[:]]
    with pytest.raises(SystemExit):
        main([*arguments, "--turns", "served", "--export", "dpo", str(store)])


def test_samples_are_of_conversations(qwen: Any) -> None:
    data = load(qwen, [MESSAGES] * 5, chat_template=STRIPPING, max_samples=2)
    assert data.take(["conversation"])["conversation"] == [0, 0, 1, 1]
    drawn = load(qwen, [MESSAGES] * 5, chat_template=STRIPPING, max_samples=3, shuffle=True, seed=1)
    numbers = drawn.take(["conversation"])["conversation"]
    assert len(set(numbers)) == 3
    assert numbers[::2] == numbers[1::2]


@pytest.mark.parametrize(
    ("template", "answers", "options", "said"),
    [
        (STRIPPING, 2, {}, "9 of 9 conversations in a sample"),
        (STRIPPING, 1, {}, ""),  # there is no history
        (STRIPPING, 2, {"loss_on": "last"}, ""),
        (STRIPPING, 2, {"verify": "off"}, ""),
        (STRIPPING, 2, {"turns": "served"}, ""),
        (BLOCKS, 2, {}, ""),
        (OPENING, 1, {}, "9 of 9 conversations in a sample"),  # the opened block is not there
    ],
)
def test_the_report_says_that_history_is_rewritten(
    qwen: Any, template: str, answers: int, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrites, "_SECONDS", 60)
    table = pa.table({"messages": [[{k: m[k] for k in ("role", "content")} for m in MESSAGES[: 2 * answers]]] * 9})
    data = gpuload.load_chats(table, qwen, chat_template=template, progress=False, **options)
    notes = [note for note in data.report.notes if "turns='served'" in note]
    assert [note.partition(" have answers")[0] for note in notes] == [said] * bool(said)


def test_conversations_are_looked_at_where_the_template_may_rewrite_history(qwen: Any, monkeypatch: Any) -> None:
    looked: list[bool | None] = []
    differs = RewriteFinder._differs

    def counted(*given: Any, **more: Any) -> bool | None:
        looked.append(differs(*given, **more))
        return looked[-1]

    monkeypatch.setattr(RewriteFinder, "_differs", counted)
    table = pa.table({"messages": [MESSAGES] * 500})
    for template, least, most in ((STRIPPING, 5, 35), (None, 3, 3)):  # otherwise, only the probes
        looked.clear()
        gpuload.load_chats(table, qwen, chat_template=template or qwen.chat_template, progress=False)
        assert least <= len(looked) <= most


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": "b"}, {"messages": "a"}])
def test_texts_among_conversations_have_no_answers_to_look_at(row: Any, qwen: Any, tmp_path: Path) -> None:
    messages = [{key: m[key] for key in ("role", "content")} for m in MESSAGES]
    values = (messages[:1], messages[1:]) if len(row) == 2 else (messages,)
    other = dict(zip(row, values, strict=True))
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, (row, other, row))))
    options: dict[str, Any] = {"chat_template": STRIPPING, "progress": False, "token_cache": False}
    found = gpuload.load_chats(str(path), qwen, **options)
    path.write_text(json.dumps(other))
    assert found[len(found) // 2]["input_ids"] == gpuload.load_chats(str(path), qwen, **options)[0]["input_ids"]


@pytest.mark.parametrize("as_json", [False, True])
def test_prompts_of_all_turns(qwen: Any, as_json: bool, tmp_path: Path) -> None:
    messages = [{key: m[key] for key in ("role", "content")} for m in MESSAGES]
    rows: list[Any] = [[*messages, messages[0]], None, [], messages[1:2], messages, [*messages[1:2], *messages[:2]]]
    if as_json:
        data: Any = str(tmp_path / "x.jsonl")
        lines = (json.dumps({"prompt": row, "id": k, "turn": "own"}) for k, row in enumerate(rows))
        Path(data).write_text("\n".join(lines))
    else:
        data = pa.table({"prompt": rows, "id": range(len(rows)), "turn": ["own"] * len(rows)})
    options: dict[str, Any] = {"chat_template": STRIPPING, "max_prompt_length": 500, "progress": False}
    prompts = gpuload.load(data, qwen, turns="served", **options)

    def ids_of(prompt: Any) -> Any:
        return qwen.apply_chat_template(prompt, add_generation_prompt=True, chat_template=STRIPPING, return_dict=True)[
            "input_ids"
        ]

    expected = [
        (k, number, ids_of(row[:number]))
        for k, row in enumerate(rows)
        for number in range(1, len(row or ()) + 1)
        if (row[number]["role"] == "assistant" if number < len(row) else row[-1]["role"] == "user")
    ]
    columns = [prompts.columns[name].to_pylist() for name in ("conversation", "turn")]
    assert list(zip(*columns, prompts.tokens.to_lists(), strict=True)) == expected
    assert prompts.columns["id"].to_pylist() == columns[0]
    assert prompts.report.rejected == {"prompt is null": 1, "prompt is an empty list": 2}
    for given, why in (({"prompt": ["text"]}, "has texts"), ({"prompt": [messages]}, "use one of")):
        with pytest.raises(OptionError, match=why):
            gpuload.load(pa.table(given), qwen, turns="served" if "texts" in why else "all")


def test_conversations_of_several_files_have_numbers_of_their_own(qwen: Any, tmp_path: Path) -> None:
    for name in "ac":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": MESSAGES}) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in "ac"]
    prompts = gpuload.load(files, qwen, turns="served", progress=False)
    assert prompts.take(["conversation", "turn"]) == {"conversation": [0, 0, 1, 1], "turn": [1, 3, 1, 3]}


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_turns_of_dropped_conversations_are_counted(qwen: Any, store: str) -> None:
    """By reason, like those of conversations that are kept."""
    silent = [MESSAGES[0], {"role": "assistant", "content": "4."}]
    data = load(
        qwen, [MESSAGES, silent, silent * 2, [*MESSAGES, *silent]], chat_template=STRIPPING,
        missing_reasoning="skip", store=store, token_cache=False,
    )  # fmt: skip
    assert data.report.rows_kept == 2
    assert data.report.counts["turns not learned: the answer has no reasoning (missing_reasoning='skip')"] == 4
    assert data.report.counts["answers learned"] == 4


def test_prompts_of_some_conversations(qwen: Any) -> None:
    """`max_samples` counts conversations, not prompts."""
    table = pa.table({"messages": [MESSAGES[: 2 + 2 * (k % 2)] for k in range(6)], "k": list(range(6))})
    options: dict[str, Any] = {"prompt_key": "messages", "turns": "served", "progress": False}
    whole = gpuload.load(table, qwen, **options)[:]
    some = gpuload.load(table, qwen, max_samples=2, **options)[:]
    assert [(row["conversation"], row["turn"]) for row in some] == [(0, 1), (1, 1), (1, 3)]
    drawn = gpuload.load(table, qwen, max_samples=3, shuffle=True, seed=1, **options)[:]
    chosen = np.random.default_rng(1).choice(6, 3, replace=False)
    assert [row["k"] for row in drawn] == [row["k"] for row in whole if row["conversation"] in chosen]
    assert [row["raw_prompt_ids"] for row in drawn] == [
        row["raw_prompt_ids"] for row in whole if row["conversation"] in chosen
    ]


def test_prompts_of_some_conversations_in_several_json_files(qwen: Any, tmp_path: Path) -> None:
    """Also where none of them is in some of the files."""
    rows = [{"messages": MESSAGES[: 2 + 2 * (k % 2)]} for k in range(6)] + [{"messages": []}]
    files = [tmp_path / f"{k}.jsonl" for k in range(3)]
    for file in files:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"prompt_key": "messages", "turns": "served", "progress": False}
    found = gpuload.load(files, qwen, max_samples=9, **options)
    assert list(zip(*found.take(["conversation", "turn"]).values(), strict=True)) == [
        *((k, turn) for k in range(6) for turn in ([1, 3] if k % 2 else [1])), (7, 1), (8, 1), (8, 3),
    ]  # fmt: skip
    assert found.report.rejected == {"prompt is an empty list": 1}
    drawn = gpuload.load(files, qwen, max_samples=1, shuffle=True, seed=0, **options)
    assert len(set(drawn.take(["conversation"])["conversation"])) == 1


def test_prompts_of_all_turns_for_trl(qwen: Any) -> None:
    pytest.importorskip("trl")
    from gpuload.integrations.trl import prompts

    messages = [{key: m[key] for key in ("role", "content")} for m in MESSAGES]
    table = pa.table({"prompt": [messages] * 2})
    plain, made = prompts(table, qwen, 200), prompts(table, qwen, 200, turns="served")
    assert made["prompt"][:2] == [messages[:1], messages[:3]]
    assert made.features["prompt"] == plain.features["prompt"]
    assert made["turn"][:] == [1, 3] * 2


# -- compared with a naive explosion ---------------------------------------------------------------------------------


def random_conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Some turns, with reasoning, calls of tools, and contents that are empty or begin with white space."""
    texts = ("yes", "", "\n\nno", " a b ", "<think>\nwell\n</think>\n\nso", "中文", "x<|im_end|>", "12 + 3", "it's\n")
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}] if rng.random() < 0.2 else []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": rng.choice(texts[:1] + texts[2:])})
        for _ in range(rng.choice((1, 1, 1, 2))):
            answer: dict[str, Any] = {"role": "assistant", "content": rng.choice(texts)}
            if rng.random() < 0.5:
                answer["reasoning_content"] = rng.choice(("why not", "hm\n\nok", ""))
            if rng.random() < 0.3:
                function = {"name": "f", "arguments": {"x": rng.choice(texts)}}
                answer["tool_calls"] = [{"type": "function", "id": "call00001", "function": function}]
                messages += [answer, {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "r"}]
            else:
                messages.append(answer)
    return messages


def conversation_of_few_shapes(rng: random.Random) -> list[dict[str, Any]]:
    """Some turns with texts only: many of such conversations take few paths through a template."""
    texts = ("yes", "", " a b ", "\n\nno", "中文", "x<|im_end|>y", "12 + 3", "é\n", "<think>\nr\n</think>\n\nz")
    roles = ["system"] * rng.randint(0, 1) + ["user", "assistant"] * rng.randint(1, 4)
    return [{"role": role, "content": rng.choice(texts)} for role in roles]


def check_by_explosion(tokenizer: Any, template: str | None, messages: list[Any], rows: list[Any]) -> int:
    """Compares the rows of a conversation with prompts and answers that are made turn by turn.

    Returns:
        How many answers have loss.
    """
    call = {"chat_template": template} if template else {}
    prompts = set()
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for switch in ({}, {"enable_thinking": False}, {"thinking": False}):
            try:
                more = {**call, **switch}
                text = tokenizer.apply_chat_template(
                    messages[:number], add_generation_prompt=True, tokenize=False, **more
                )
                prompts.add(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
            except Exception:
                continue
    blocks = has_blocks(template or "")  # they may leave out the beginning and the end of an answer, and parts of it
    learned: dict[tuple[int, ...], list[int]] = {}  # prompt → tokens with loss
    sequences = []
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
        sequences.append(tuple(ids))
        own: dict[tuple[int, ...], list[int]] = {}
        for start in (k for k, label in enumerate(labels) if label != -100 and (not k or labels[k - 1] == -100)):
            end = next((k for k in range(start, len(ids)) if labels[k] == -100), len(ids))
            before = tuple(ids[:start])
            if blocks:
                before = max((each for each in prompts if before[: len(each)] == each), key=len)
            assert blocks or before not in own
            own[before] = [*own.get(before, []), *ids[start:end]]
        assert not set(own) & set(learned)  # an answer is learned once
        learned |= own
    assert set(learned) <= prompts  # nothing is learned behind anything but a prompt of inference
    assert len(set(sequences)) == len(sequences)
    for one in sequences:  # the fewest rows: none is the beginning of another one
        assert not any(other != one and other[: len(one)] == one for other in sequences)
        ends = [len(prompt) + len(answer) for prompt, answer in learned.items() if one[: len(prompt)] == prompt]
        assert blocks or len(one) in ends  # and none goes on behind its last answer
    return len(learned)


def reference_rows(tokenizer: Any, template: str | None, messages: list[Any], **options: Any) -> list[Any]:
    """The rows of one conversation by the plain reference."""
    own = {"chat_template": template} if template else {}
    made = ServedReference(tokenizer, "assistant", **own, **options).rows_of(messages)
    split = [(ids & ((1 << 21) - 1), ids & (1 << 30)) for ids, _ in made.rows]
    return [{"input_ids": ids.tolist(), "labels": np.where(loss, ids, -100).tolist()} for ids, loss in split]


@pytest.mark.parametrize("template", [None, STRIPPING, BLOCKS, INSIDE])
def test_random_conversations(qwen: Any, template: str | None) -> None:
    rng = random.Random(7)
    conversations = [random_conversation(rng) for _ in range(60)]
    options = {"chat_template": template} if template else {}
    data = load(qwen, conversations, verify="full", **options)
    assert not data.report.check.mismatches
    rows = data[:]
    found = 0
    for number, messages in enumerate(conversations):
        own = [row for row in rows if row["conversation"] == number]
        assert [{k: row[k] for k in ("input_ids", "labels")} for row in own] == reference_rows(qwen, template, messages)
        if own:
            found += check_by_explosion(qwen, template, messages, own)
    assert found > 100


@pytest.mark.parametrize("loss_on", ["assistant", "last", "last_turn"])
@pytest.mark.parametrize("as_json", [False, True])
def test_conversations_of_few_shapes_are_made_by_columns(
    qwen: Any, loss_on: Any, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    conversations = [conversation_of_few_shapes(rng) for _ in range(200)]
    made: list[int] = []
    monkeypatch.setattr(ColumnFinder, "find", _counting(ColumnFinder.find, made))
    if as_json:
        data = load(qwen, conversations, loss_on=loss_on, verify="full")
    else:
        table = pa.table({"messages": conversations})
        data = gpuload.load_chats(table, qwen, turns="served", loss_on=loss_on, verify="full", progress=False)
    assert not data.report.check.mismatches
    assert sum(made) == sum(not any("<|im_end|>" in m["content"] for m in each) for each in conversations)
    assert set(data.take(["conversation"])["conversation"]) == set(range(200))
    assert any("merge with the prompt" in what for what in data.report.counts)


def _counting(find: Any, made: list[int]) -> Any:
    def counted(self: Any, column: Any) -> Any:
        found = find(self, column)
        made.append(0 if found is None else len(found.numbers))
        return found

    return counted


@shared
@exhaustive
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_random_conversations_of_all_templates(name: str, qwen: Any) -> None:
    tokenizer, template = TEMPLATES[name]
    tokenizer = qwen if name.startswith("trl/") else tokenizer
    rng = random.Random(name)
    count = 2000 if PART == "all" else 30
    plain = [conversation_of_few_shapes(rng) for _ in range(max(count // 10, 30))]
    conversations = [random_conversation(rng) for _ in range(count)] + plain
    expected, learned = [], 0
    for number, messages in enumerate(conversations):
        own = reference_rows(tokenizer, template, messages)
        if own:
            learned += check_by_explosion(tokenizer, template, messages, own)
            expected += [(number, row) for row in own]
    print(f"{name}: {len(conversations):,} conversations, {learned:,} answers learned in {len(expected):,} rows")
    if not expected:
        with pytest.raises((NoRowsError, TokenizerError)):
            load(tokenizer, conversations, chat_template=template)
        return
    data = load(tokenizer, conversations, chat_template=template, max_length=100_000, verify="off")
    found = [(row["conversation"], {key: row[key] for key in ("input_ids", "labels")}) for row in data[:]]
    assert found == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{% for m in messages %}{{ m.content }", r"^serving_template=\.\.\.: line 1: .*: correct the template"),
        ("nope", "^serving_template='nope': tokenizer .* has no template of this name"),
    ],
)
def test_a_serving_template_that_is_none(qwen: Any, given: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        load(qwen, [MESSAGES], serving_template=given)
