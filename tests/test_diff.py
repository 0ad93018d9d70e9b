"""`gpuload diff`: the tokens of two tokenizers and templates compared, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import MESSAGES, user
from test_check import BLOCKS, GOOD, chat, lines
from tiers import SHARED, shared
from tokenizer_cases import small_tokenizer

from gpuload.cli.diff import difference_as_text
from gpuload.cli.main import main
from gpuload.core.errors import OptionError
from gpuload.inspect.data import open_data
from gpuload.inspect.diff import Difference, difference

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def compared(rows: Any, one: Any, other: Any, most: int = 10, **options: Any) -> Difference:
    table = rows if isinstance(rows, (str, pa.Table)) else pa.table({"messages": pa.array(rows, MESSAGES)})
    return difference(open_data(table, one, **options), open_data(table, other, **options), most)


def in_words(found: Difference) -> list[list[tuple[str, str]]]:
    """Of each shown row, its pieces: side and text."""
    return [
        [(piece.side, b"".join(piece.tokens).decode()) for _, pieces in row.sequences for piece in pieces]
        for row in found.shown
    ]


def test_equal_rows(qwen: Any) -> None:
    found = compared(GOOD, qwen, qwen)
    assert (found.rows, found.changed, found.shown) == (40, [], [])
    assert found.tokens[0] == found.tokens[1] > 0


def test_templates_that_differ_in_few_rows() -> None:
    one = small_tokenizer(PLAIN)
    changed = "{{ m.content | replace('Is it seven', 'Is it 7') }}"  # which is in no text that gpuload renders to learn
    changes = f"{{% if m.role == 'user' %}}{changed}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    other = small_tokenizer(PLAIN.replace("{{ m.content }}", changes))
    rows = [chat("Is it seven?" if n == 7 else f"Is it {n}?", "Yes, " + "surely " * 9) for n in range(10)]
    found = compared(rows, one, other)
    assert found.changed == [7]
    assert (found.loss_only, found.dropped, found.renumbered) == (0, [0, 0], 0)
    less = len(one.encode("seven", add_special_tokens=False)) - 1
    assert found.tokens[1] == found.tokens[0] - less
    (pieces,) = in_words(found)
    assert [each for each in pieces if each[0] != "same"] == [("removed", "seven"), ("added", "7")]
    assert found.shown[0].place.endswith(" row 7")
    # All tokens are shown but the omitted ones, and these are counted.
    (((_, shown),),) = [row.sequences for row in found.shown]
    count = sum(len(piece.tokens) * (piece.side != "added") + piece.omitted for piece in shown)
    assert count == found.shown[0].lengths[0]


def test_tokens_are_compared_by_their_bytes() -> None:
    one, other = small_tokenizer(PLAIN, ["one", "three"]), small_tokenizer(PLAIN, ["x yz", "one"])
    assert one.get_vocab() != other.get_vocab()
    found = compared([chat("one"), chat("two")], one, other)
    expected = [
        [one.convert_ids_to_tokens(one.apply_chat_template(row, return_dict=False)) for one in (one, other)]
        for row in ([*chat("one")], [*chat("two")])
    ]
    assert found.changed == [n for n, (ours, theirs) in enumerate(expected) if ours != theirs]
    assert found.renumbered > 0


def test_an_added_token_is_not_its_text() -> None:
    one, other = small_tokenizer(PLAIN), small_tokenizer(PLAIN)
    other.add_tokens(["Is"])
    found = compared([chat("Is it?"), chat("What?")], one, other)
    assert found.changed == [0]
    assert [each for each in in_words(found)[0] if each[0] != "same"] == [("removed", "Is"), ("added", "Is")]


def test_loss(qwen: Any) -> None:
    with_end = BLOCKS.replace("{% endgeneration %}<|im_end|>\n", "<|im_end|>{% endgeneration %}{{ '\n' }}")
    table = pa.table({"messages": pa.array(GOOD[:3], MESSAGES)})
    jobs = [open_data(table, qwen, chat_template=template) for template in (BLOCKS, with_end)]
    found = difference(*jobs, 1)
    assert (found.changed, found.loss_only) == ([0, 1, 2], 3)
    changed = [(p.side, p.tokens, p.loss) for _, some in found.shown[0].sequences for p in some if p.side != "same"]
    assert changed == [("removed", [b"<|im_end|>"], False), ("added", [b"<|im_end|>"], True)]


def test_rows_that_one_drops() -> None:
    strict = small_tokenizer("{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}" + PLAIN)
    found = compared([chat("yes"), chat("no")], small_tokenizer(PLAIN), strict)
    assert (found.changed, found.dropped) == ([1], [0, 1])
    assert found.shown[0].reasons == (None, "never")
    text = difference_as_text(found, 80)
    assert "\n- kept\n+ dropped: never" in text


def test_pairs(qwen: Any) -> None:
    rows = [
        {"prompt": user("q"), **{name: [{"role": "assistant", "content": text}] for name, text in answers.items()}}
        for answers in ({"chosen": "a", "rejected": "7"}, {"chosen": "b", "rejected": "c"})
    ]
    other = small_tokenizer(PLAIN.replace("{{ m.content }}", "{{ m.content | replace('7', 'seven') }}"))
    found = compared(pa.Table.from_pylist(rows), small_tokenizer(PLAIN), other)
    assert found.changed == [0]
    assert [name for name, _ in found.shown[0].sequences] == ["rejected"]


@shared
@pytest.mark.parametrize("pair", [("qwen2.5-instruct", "qwen3"), ("qwen2.5-instruct", "llama3.1-instruct")])
def test_real_tokenizers(pair: tuple[str, str]) -> None:
    from transformers import AutoTokenizer

    names = [SHARED / "tokenizers" / name for name in pair]
    texts = ["12345 and 678", "你好 world", "naïve café  \n\n x", "plain words only", "<|im_end|>"]
    table = pa.table({"prompt": texts})
    found = difference(*(open_data(table, name, chat_template=None) for name in names), 0)
    one, other = (AutoTokenizer.from_pretrained(name) for name in names)

    def pieces(tokenizer: Any, text: str) -> list[Any]:
        added = tokenizer.get_added_vocab()
        tokens = tokenizer.tokenize(text)
        return [(token, token in added) for token in tokens]

    assert found.changed == [n for n, text in enumerate(texts) if pieces(one, text) != pieces(other, text)]
    assert found.rows == len(texts)


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command(qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file, template = lines(tmp_path / "a.jsonl", GOOD), tmp_path / "other.jinja"
    template.write_text(BLOCKS)
    usual = ["diff", file, "--tokenizer", qwen_folder]
    assert main([*usual, "--against-tokenizer", qwen_folder]) == 0
    assert capsys.readouterr().out.startswith("0 of 40 rows change, 40 do not\n")
    assert main([*usual, "--against-template", str(template), "--rows", "2"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("40 of 40 rows change, 0 do not\n")
    assert text.count("→") == 3  # tokens of all rows, and of two
    assert "\n38 more rows change: --rows shows more of them" in text
    assert all(len(line) <= 80 for line in text.splitlines() if line[:1] in "-+ ")
    assert main([*usual, "--against-template", str(template), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["changed"] == list(range(40))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass --against-tokenizer, --against-template or --against-template-kwargs"),
        (["--no-template", "--against-template", "x"], "--no-template excludes"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        main(["diff", "a.jsonl", "--tokenizer", "t", *arguments])
    assert message in capsys.readouterr().err


def test_kinds_that_differ(qwen: Any) -> None:
    table = pa.table({"messages": pa.array(GOOD, MESSAGES)})
    jobs = open_data(table, qwen), open_data(table, qwen, kind="prompts", prompt_key="messages")
    with pytest.raises(OptionError, match="the files have chats for one tokenizer and prompts for the other"):
        difference(*jobs, 0)
