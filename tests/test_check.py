"""`gpuload check`: each defect that is put into data is found, and nothing is found in good data."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user
from tiers import SHARED, shared

import gpuload
from gpuload.cli.main import main
from gpuload.core.errors import DataError, OptionError
from gpuload.inspect.checks.findings import RULES, CheckRule, Finding
from gpuload.inspect.checks.lines import kept_by, lines_for, suggested_limit
from gpuload.inspect.checks.run import Checked, checked
from gpuload.sources import footer

QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}<|im_end|>\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


def chat(question: str, answer: Any = "Yes.", **more: Any) -> list[dict[str, Any]]:
    return [*user(question), {"role": "assistant", "content": answer, **more}]


def found(rows: Any, tokenizer: Any, **options: Any) -> dict[str, Finding]:
    """Check → what it has found.

    Args:
        rows: conversations, or the columns of a table.
    """
    data = rows if isinstance(rows, (pa.Table, str, list)) else pa.table(rows)
    return {each.check: each for each in gpuload.check(data, tokenizer, token_cache=False, **options)}


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row if isinstance(row, dict) else {"messages": row}) + "\n" for row in rows))
    return str(path)


GOOD = [chat(f"Is {n} a prime number?", f"Let me see: {n}.") for n in range(40)]


@pytest.fixture
def good(tmp_path: Path) -> list[Any]:
    return [*GOOD]


def in_file(tmp_path: Path, rows: list[Any], form: str) -> str:
    if form == "json":
        return lines(tmp_path / "rows.jsonl", rows)
    file = str(tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist([row if isinstance(row, dict) else {"messages": row} for row in rows]), file)
    return file


def test_good_data_has_no_findings(qwen: Any, tmp_path: Path) -> None:
    for form in ("json", "parquet"):
        assert found(in_file(tmp_path, GOOD, form), qwen) == {}


BOS = "{{ bos_token }}{{ bos_token }}" + BLOCKS
WHOLE = "{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
CUT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% if m.content != 'stop' %}<|im_end|>{% endif %}{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "\n{% endfor %}"
)
PRINTS_NONE = BLOCKS.replace("{{ m.content }}{% end", "{{ m.content if m.content is string else 'None' }}{% end")
# As DeepSeek's, which prints calls without a content only.
LEAVES_OUT_CALLS = BLOCKS.replace(
    "{{ m.content }}{% end", "{{ m.content if m.content is string else m.tool_calls }}{% end"
)
CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "no loss": ("error", [user("Nobody answers"), user("Nor here")], {}),
    "all loss": ("error", [chat("q")], {"chat_template": WHOLE}),
    "answer cut": ("warning", [chat("q", "stop")], {"chat_template": CUT}),
    "end not learned": ("error", [chat("q")], {"chat_template": BLOCKS}),
    "inserted text learned": ("warning", [chat("q")], {"chat_template": QWEN3}),
    "reasoning dropped": ("warning", [chat("q", "a", reasoning_content="Because it is so.")], {}),
    "text dropped": (
        "warning", [chat("q", "Not shown.", tool_calls=[])],
        {"chat_template": BLOCKS.replace("{{ m.content }}{% end", "{{ m.content if m.tool_calls is none }}{% end")},
    ),
    "control tokens": ("warning", [chat("What is <|im_start|>?")], {}),
    "arguments as text": (
        "error",
        [[*chat("q", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}])]],
        {},
    ),
    "calls dropped": (
        "error",
        [chat("q", text, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}])
         for text in ("", "Calling.")],
        {"chat_template": LEAVES_OUT_CALLS},
    ),
    "null printed": (
        "error",
        [chat("q", None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}])],
        {"chat_template": PRINTS_NONE},
    ),
    "unknown roles": ("warning", [[{"role": "narrator", "content": "Once."}, *chat("q")]], {}),
    "rows dropped": ("warning", [[*user("q"), {"role": "assistant", "content": None}]], {}),
    "empty prompts": ("warning", [chat(" \n"), [{"role": "assistant", "content": "Who asks?"}]], {}),
    "duplicate rows": ("warning", [GOOD[3], GOOD[4]], {}),
    "duplicate prompts": ("info", [chat(GOOD[3][0]["content"], "Another answer.")], {}),
}  # fmt: skip


def test_a_template_that_rewrites_history(qwen: Any) -> None:
    template = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}<|im_end|>
{% else %}<|im_start|>user
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    rows = [[*chat(f"{n}?", f"No, {n}.", reasoning_content="Well. "), *chat("Sure?", "Yes.")] for n in range(8)]
    hit = found({"messages": rows}, qwen, chat_template=template)["answers rewritten"]
    assert (hit.level, hit.count) == ("info", 8)
    assert hit.example.startswith("8 of 8 conversations in a sample")
    assert "answers rewritten" not in found({"messages": rows}, qwen)


@pytest.mark.parametrize("form", ["json", "parquet"])
@pytest.mark.parametrize("name", CASES)
def test_a_defect_is_found(qwen: Any, tmp_path: Path, name: str, form: str) -> None:
    level, rows, options = CASES[name]
    file = in_file(tmp_path, [*GOOD, *rows], form)
    hits = found(file, qwen, **options)
    hit = hits[name]
    assert hit.level == level
    assert set(range(len(GOOD), len(GOOD) + len(rows))) <= set(hit.rows)
    assert hit.count == len(hit.rows)
    assert hit.example.startswith(f"row {hit.rows[0]}")
    assert hit.remedy == RULES[name].remedy
    if "chat_template" not in options:  # nothing else is found, and only in these rows
        assert hit.rows == list(range(len(GOOD), len(GOOD) + len(rows)))
        assert list(hits) == [name]


def test_double_bos(tmp_path: Path) -> None:
    from tokenizer_cases import small_tokenizer

    tokenizer = small_tokenizer("{{ bos_token }}{{ bos_token }}" + BLOCKS)
    tokenizer.bos_token = "<|im_start|>"
    assert found(lines(tmp_path / "a.jsonl", GOOD), tokenizer)["double BOS"].count == len(GOOD)
    tokenizer.chat_template = "{{ bos_token }}" + BLOCKS.replace("<|im_start|>", "")
    assert "double BOS" not in found(lines(tmp_path / "b.jsonl", GOOD), tokenizer)


def test_arguments_as_objects_where_the_template_takes_text(qwen: Any, tmp_path: Path) -> None:
    template = BLOCKS.replace("{{ m.content }}{% end", "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
                              "{{ c.function.arguments }}{% endfor %}{% end")  # fmt: skip
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}]
    file = lines(tmp_path / "a.jsonl", [chat("q", "", tool_calls=calls)])
    assert found(file, qwen, chat_template=template)["arguments as objects"].rows == [0]
    calls[0]["function"]["arguments"] = '{"x": "y"}'  # type: ignore[index]
    file = lines(tmp_path / "b.jsonl", [chat("q", "", tool_calls=calls)])
    hits = found(file, qwen, chat_template=template)
    assert not {"arguments as objects", "arguments as text"} & set(hits)


def test_reasoning_of_earlier_turns_is_an_info(qwen: Any) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}{{ m.reasoning_content }}{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    rows = [[*chat("a", "b", reasoning_content="One."), *chat("c", "d", reasoning_content="Two.")]]
    hit = found({"messages": rows}, qwen, chat_template=template)["reasoning dropped"]
    assert (hit.level, hit.rows) == ("info", [0])


def test_reasoning_in_a_content(qwen: Any) -> None:
    template = BLOCKS.replace("{{ m.content }}{% end", "{{ m.content.split('</think>')[-1] }}<|im_end|>{% end")
    rows = [chat("q", "<think>\nWhy not?\n</think>\n\nYes."), chat("q2", "<think>\n\n</think>\n\nNo."), chat("q3")]
    assert found({"messages": rows}, qwen, chat_template=template)["reasoning dropped"].rows == [0]
    assert "reasoning dropped" not in found({"messages": rows}, qwen)


def test_text_that_a_template_inserts_is_told_from_its_syntax(qwen: Any) -> None:
    base = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}INSERTED"
    base += "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    for text, count in (("Sure! ", 2), ("<think></think>", 2), ("<|im_start|>final", 0), ("\n", 0), ("", 0)):
        hits = found({"messages": GOOD[:2]}, qwen, chat_template=base.replace("INSERTED", text))
        assert len(hits["inserted text learned"].rows if "inserted text learned" in hits else []) == count, text


def test_empty_thinking_next_to_tool_calls(qwen: Any, tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    more = [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "One."}]
    file = lines(tmp_path / "a.jsonl", [[*chat("q", "", tool_calls=calls), *more]])
    assert found(file, qwen, chat_template=QWEN3)["inserted text learned"].rows == [0]
    assert "inserted text learned" not in found(file, qwen)


def test_labels_of_kto(qwen: Any, tmp_path: Path) -> None:
    rows = [{"messages": row, "label": n % 4 > 0} for n, row in enumerate(GOOD)]
    for form in ("json", "parquet"):
        hit = found(in_file(tmp_path, rows, form), qwen)["KTO labels"]
        assert (hit.level, hit.rows) == ("error", list(range(0, 40, 4)))
    only_good = [row | {"label": True} for row in rows]
    assert found(in_file(tmp_path, only_good, "json"), qwen) == {}


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_placeholders_and_images(qwen: Any, tmp_path: Path, form: str) -> None:
    texts = ["<image>one", "<image><image>two", "none", "<image>lost"]
    images = [["a"], ["a", "b"], [], ["a", "b"]]
    rows = [{"prompt": user(text), "images": some} for text, some in zip(texts, images, strict=True)]
    hits = found(in_file(tmp_path, rows, form), qwen)
    assert (hits["media"].level, hits["media"].rows) == ("error", [3])
    assert "1 placeholder, and 2 values in column 'images'" in hits["media"].example
    rows[3]["prompt"] = user("TRL writes them")
    assert found(in_file(tmp_path, rows, form), qwen)["media"].rows == [3]
    assert "media" not in found(in_file(tmp_path, rows, form), qwen, trainer="trl")


def test_pairs(qwen: Any) -> None:
    def pair(n: int, chosen: str, rejected: str) -> dict[str, Any]:
        made = {"chosen": chosen, "rejected": rejected}
        return {"prompt": user(f"q{n}"), **{k: [{"role": "assistant", "content": v}] for k, v in made.items()}}

    rows = [pair(n, "good", "bad") for n in range(30)]
    assert found(pa.Table.from_pylist(rows), qwen) == {}
    rows += [pair(30, "same", "same"), pair(31, "<|im_end|>", "x")]
    hits = found(pa.Table.from_pylist(rows), qwen)
    assert {name: hit.rows for name, hit in hits.items()} == {"control tokens": [31], "equal pairs": [30]}
    hits = found(pa.Table.from_pylist(rows), qwen, chat_template=BLOCKS.replace("<|im_end|>\n{% else", "\n{% else"))
    assert hits["answer cut"].count == len(rows)
    assert hits["answer cut"].example.endswith("in chosen")


# -- the limit -------------------------------------------------------------------------------------------------------


def test_the_limit(qwen: Any) -> None:
    rows = {"messages": [*GOOD, chat("long", "word " * 500), chat("word " * 500)]}
    hits = found(rows, qwen, limit=100)
    assert {name: hit.rows for name, hit in hits.items()} == {"over the limit": [40, 41]}
    assert "and the limit is 100" in hits["over the limit"].example
    hits = found(rows, qwen, limit=100, overlong="keep_start")
    assert {name: hit.rows for name, hit in hits.items()} == {
        "over the limit": [40, 41], "no loss": [41], "answer cut": [40]
    }  # fmt: skip
    assert set(found(rows, qwen, limit=100, overlong="keep_end")) == {"over the limit"}
    assert found(rows, qwen, limit=20)["over the limit"].level == "error"


# -- other files -----------------------------------------------------------------------------------------------------

WORDS = "".join(chr(c) for c in range(97, 123))


def question(seed: int, words: int = 40) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices(WORDS, k=5)) for _ in range(words))


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_prompts_of_another_file(qwen: Any, tmp_path: Path, form: str) -> None:
    questions = [question(n) for n in range(100)]
    (tmp_path / "train").mkdir()
    train = in_file(tmp_path / "train", [chat(text, "Answer.") for text in questions], form)
    changed = questions[7].upper().replace(" ", ",  ")  # the same words
    half = " ".join(questions[8].split()[:26]) + question(1000, 14)
    less = " ".join(questions[9].split()[:20]) + question(1001, 30)
    asked = [question(500), questions[5], changed, half, less, f"  {questions[6]}\n"]
    test = in_file(tmp_path, [{"prompt": user(text)} for text in asked], form)
    hits = found(test, qwen, against=train)
    assert {name: hit.rows for name, hit in hits.items()} == {"also elsewhere": [1, 5], "overlap elsewhere": [2, 3]}
    assert hits["also elsewhere"].example == f"row 1: as {train} row 5"
    assert hits["overlap elsewhere"].example == f"row 2: 100% of its 8-grams are in {train} row 7"
    assert found(test, qwen) == {}


def test_files_are_compared_with_each_other(qwen: Any, tmp_path: Path) -> None:
    questions = [question(n) for n in range(200)]
    files = [
        lines(tmp_path / name, [{"prompt": user(text)} for text in some])
        for name, some in (("a.jsonl", questions[:100]), ("b.jsonl", [*questions[100:], questions[3]]))
    ]
    hits = found(files, qwen)
    assert hits["also elsewhere"].rows == [200]
    assert hits["also elsewhere"].example == f"{files[1]} row 100: as {files[0]} row 3"


@pytest.mark.parametrize("words", [1, 8, 16, 23, 24, 40])
def test_files_with_few_words(qwen: Any, tmp_path: Path, words: int) -> None:
    files = [str(tmp_path / f"{number}.json") for number in range(2)]
    for file, text in zip(files, (" ".join(f"a{k}" for k in range(words)), "zz yy xx"), strict=True):
        Path(file).write_text(json.dumps([{"prompt": text}]))
    assert not [hit for hit in gpuload.check(files, qwen, token_cache=False) if "overlap" in hit.check]


def test_instructions_that_all_prompts_have_are_no_overlap(qwen: Any, tmp_path: Path) -> None:
    rule = question(1, 60)
    rows = [[{"prompt": user(f"{question(n, 10)} {rule}")} for n in range(start, start + 50)] for start in (10, 100)]
    files = [lines(tmp_path / f"{n}.jsonl", some) for n, some in enumerate(rows)]
    assert found(files, qwen) == {}


# -- what is compared ------------------------------------------------------------------------------------------------


def calling(value: int) -> dict[str, Any]:
    return {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": value}}}]}


def named(name: str) -> list[Any]:
    return [{"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}]


DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "reasoning": [{"messages": chat("q", "a", reasoning_content=text)} for text in ("One way.", "Another.")],
    "calls": [{"messages": chat("q", "", **calling(n))} for n in (1, 2)],
    "tools": [{"messages": chat("q"), "tools": named(name)} for name in ("f", "g")],
    "tools as text": [{"messages": chat("q"), "tools": json.dumps(named(name))} for name in ("f", "g")],
    "names": [{"messages": [{"role": "user", "content": "q", "name": n}, *chat("q")[1:]]} for n in ("Ann", "Bob")],
    "marks": [{"messages": chat("q", "a", train=value)} for value in (True, False)],
    "calls before": [{"messages": [*chat("q", "", **calling(n)), {"role": "tool", "content": "1"},
                                   {"role": "assistant", "content": "So."}]} for n in (1, 2)],
}  # fmt: skip
SAME_PROMPT = {"reasoning", "calls", "marks"}


@pytest.mark.parametrize("form", ["json", "parquet"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_rows_that_differ_in_more_than_their_texts(qwen: Any, tmp_path: Path, name: str, form: str) -> None:
    rows = DIFFERENT[name] + [{"messages": each} for each in GOOD[:20]]
    hits = found(in_file(tmp_path, rows, form), qwen)
    assert "duplicate rows" not in hits
    assert ("duplicate prompts" in hits) == (name in SAME_PROMPT)
    hits = found(in_file(tmp_path, [*rows, rows[1]], form), qwen)
    assert hits["duplicate rows"].rows == [22]


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_a_column_of_no_images_hides_nothing(qwen: Any, tmp_path: Path, form: str) -> None:
    rows: list[Any] = [{"messages": chat(question(n)), "images": []} for n in range(30)]
    rows[29] = rows[3]
    assert found(in_file(tmp_path, rows, form), qwen)["duplicate rows"].rows == [29]
    (tmp_path / "train").mkdir()
    train = in_file(tmp_path / "train", rows[:5], form)
    assert found(in_file(tmp_path, rows[3:4] + rows[10:29], form), qwen, against=train)["also elsewhere"].rows == [0]


def test_rows_with_images_are_not_compared_by_8_grams(qwen: Any, tmp_path: Path) -> None:
    def written(name: str, start: str, images: list[str]) -> str:
        return lines(tmp_path / name, [{"messages": chat(f"<image>{start} {question(1)}"), "images": images}])

    train, test = written("a.jsonl", "one", ["a.png"]), written("b.jsonl", "other", ["b.png"])
    assert set(found(test, qwen, against=train)) == {"images not counted"}
    assert set(found([test, train], qwen)) == {"images not counted"}
    no_image = lines(tmp_path / "c.jsonl", [{"messages": chat(f"third {question(1)}")}])
    assert found(no_image, qwen, against=train) == {}
    assert set(found(no_image, qwen, against=no_image)) == {"also elsewhere"}


def test_dropped_rows_are_no_empty_prompts(qwen: Any, tmp_path: Path) -> None:
    rows = [*GOOD, [{"role": "user", "content": None}, {"role": "assistant", "content": "a"}], chat("")]
    hits = found(lines(tmp_path / "a.jsonl", rows), qwen)
    assert {name: hit.rows for name, hit in hits.items()} == {"rows dropped": [40], "empty prompts": [41]}


def test_a_single_row_group(qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = in_file(tmp_path, GOOD, "parquet")
    assert found(file, qwen) == {}
    monkeypatch.setattr(footer, "_MOST_GROUP_BYTES", 100)
    hit = found(file, qwen)["one row group"]
    assert (hit.level, hit.rows, hit.count) == ("info", [], 1)
    assert hit.remedy.startswith("rewrite the file with several, pq.write_table(")


def test_images_are_not_counted(qwen: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "a.parquet")
    table = pa.Table.from_pylist([{"prompt": [{"role": "user", "content": "q <image>"}]}] * 4)
    for column, seen in ((pa.nulls(4), False), (pa.array([[b"x"]] * 4), True)):
        pq.write_table(table.append_column("images", column), file)
        checked_file = checked(file, qwen)
        assert (lines_for(checked_file, "verl", None) == []) == seen
        hits = {each.check: each for each in checked_file.findings}
        assert ("images not counted" in hits) == seen
    hit = hits["images not counted"]
    assert (hit.level, hit.counted, hit.example) == ("warning", "1 file", f"{file}: column 'images'")
    assert "no limit is suggested" in kept_by(checked_file, "verl", None)
    assert "data.max_prompt_length=99" in lines_for(checked_file, "verl", 99)


# -- clean files -----------------------------------------------------------------------------------------------------

CLEAN = ["gsm8k.parquet", "chats_and_pairs/alpaca_en_demo.json", "chats_and_pairs/dpo_en_demo.json",
         "xquad_12lang.parquet"]  # fmt: skip


@shared
@pytest.mark.parametrize("name", CLEAN)
def test_clean_files_give_no_warning(name: str) -> None:
    hits = gpuload.check(SHARED / "datasets" / name, SHARED / "tokenizers" / "qwen2.5-instruct")
    assert [each for each in hits if each.level != "info"] == []


def test_the_shipped_file_gives_no_warning(gsm8k: str, qwen: Any) -> None:
    assert found(gsm8k, qwen) == {}


# -- the command -----------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    status = main(["check", *map(str, arguments)])
    return status, capsys.readouterr().out


def test_the_text(
    qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "a.jsonl", [*GOOD, user("\x1b[2J no answer " + "x" * 300), chat("<|im_end|>")])
    status, text = run(capsys, "a.jsonl", "--tokenizer", qwen_folder)
    assert status == 1
    assert text.startswith(
        "a.jsonl: 42 rows of chats, 1 error and 1 warning\n\nerror  no loss: 1 row\n  row 40: no token"
    )
    assert "\nwarning  control tokens: 1 row\n  row 41: <|im_end|> in a message of user\n" in text
    body, _, paste = text.partition("\nfor Python; ")
    assert all(len(line) <= 80 for line in body.splitlines())
    assert '    "a.jsonl",\n' in paste
    lines(tmp_path / "b.jsonl", GOOD)
    status, text = run(capsys, "b.jsonl", "--tokenizer", qwen_folder)
    assert (status, text.split("\n")[0]) == (0, "b.jsonl: 40 rows of chats, nothing to worry about")


def test_json(qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = lines(tmp_path / "a.jsonl", [*GOOD, user("no answer")])
    status, text = run(capsys, file, "--tokenizer", qwen_folder, "--json")
    (only,) = json.loads(text)
    assert (status, list(only)) == (1, ["check", "level", "rows", "count", "example", "remedy"])
    assert (only["check"], only["level"], only["rows"], only["count"]) == ("no loss", "error", [40], 1)


def test_the_page(qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "</code><script>alert(1)</script>\u202e"
    file = lines(tmp_path / "a.jsonl", [*GOOD, [{"role": hostile, "content": "x"}, *chat("q")]])
    page = tmp_path / "a.html"
    status, _ = run(capsys, file, "--tokenizer", qwen_folder, "--html", page, "--for", "verl")
    text = page.read_text()
    assert status == 0
    assert '<article class="warning">' in text
    assert "<script" not in text
    assert "\u202e" not in text
    assert "data.custom_cls.name=SFTDataset\n" in text
    assert main(["check", file, "--tokenizer", qwen_folder, "--html", str(tmp_path / "no" / "a.html")]) == 1


@pytest.mark.parametrize("trainer", [None, "verl", "trl", "slime", "nemo-rl"])
@pytest.mark.parametrize("kind", ["prompts", "chats", "pairs"])
def test_lines_to_paste(trainer: Any, kind: Any) -> None:
    lengths = np.arange(1, 301)
    made = Checked([], ["my data.jsonl"], 300, kind, "assistant", lengths, "tokenizer", "prompt")
    paste = lines_for(made, trainer, None)
    if kind == "pairs" and trainer in ("verl", "slime", "nemo-rl"):
        assert [line[:2] for line in paste] == ["# "]
        return
    text = "\n".join(paste)
    assert "my data.jsonl" in text
    if trainer is None or trainer == "trl":
        compile(text, "paste", "exec")
    else:
        assert "'" in text  # the name has a space
    if trainer is not None:
        assert f"gpuload.integrations.{trainer.replace('-', '_')}" in text
    if trainer != "slime" or kind == "prompts":
        assert "320" in text
        assert "512" in "\n".join(lines_for(made, trainer, 512))


def test_a_suggested_limit() -> None:
    def limit(*lengths: int) -> tuple[int, str]:
        made = Checked([], ["a"], 9, "chats", "assistant", np.sort(np.array(lengths, np.int64)), "t", "messages")
        return suggested_limit(made), kept_by(made, None, None)

    assert limit(*range(1, 101)) == (128, "a limit of 128 tokens keeps all rows")
    assert limit(*[100] * 1000, 100_000) == (128, "a limit of 128 tokens drops 1 row")
    assert limit() == (64, "no row can be loaded, so there is nothing to paste")


# -- levels, and what is wrong ---------------------------------------------------------------------------------------


def test_levels() -> None:
    rule = CheckRule("", "", error=0.2, warning=0.01)
    assert [rule.level(count, 1000) for count in (1, 9, 10, 199, 200)] == [
        "info",
        "info",
        "warning",
        "warning",
        "error",
    ]
    assert CheckRule("", "").level(1, 10**6) == "warning"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainer": "nemo"}, "trainer='nemo': expected one of 'verl', 'trl', 'slime', 'nemo-rl'"),
        ({"limit": 0}, "limit=0: expected an integer > 0, or None"),
        ({"limit": 5, "overlong": "cut"}, "overlong='cut': expected one of"),
        ({"overlong": "keep_end"}, "overlong='keep_end': pass limit=..., too"),
        ({"loss_on": "user"}, "loss_on"),
        ({"nonsense": 1}, "unknown option nonsense"),
    ],
)
def test_wrong_options(qwen: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"^{message}"):
        gpuload.check(pa.table({"messages": GOOD}), qwen, **options)


def test_files_that_cannot_be_checked(qwen: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        gpuload.check(pa.table({"messages": pa.array([], pa.list_(pa.struct([("role", pa.string())])))}), qwen)
    with pytest.raises(DataError, match="no column 'prompt'"):
        gpuload.check(pa.table({"x": [1]}), qwen)


def test_rows_of_any_form_are_checked(qwen: Any, tmp_path: Path) -> None:
    rows = [{"messages": each} for each in (
        None, [], [None], "text", [1], [{"role": 3, "content": {}}], [{"content": "x"}], [{"role": "user"}],
        chat("\ud800"), [*user([{"type": "text", "text": "q"}]), {"role": "assistant", "content": "a"}], chat("fine"),
    )]  # fmt: skip
    hits = found(lines(tmp_path / "a.jsonl", rows), qwen)
    assert hits["rows dropped"].level == "error"
    assert 10 not in hits["rows dropped"].rows
    assert {0, 1, 2, 3, 4, 5, 7, 8} <= set(hits["rows dropped"].rows)
