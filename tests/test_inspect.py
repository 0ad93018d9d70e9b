"""What `gpuload inspect` counts: roles of tokens, loss, packs; and what `gpuload show` prints of a row."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import MESSAGES, user
from hypothesis import given
from hypothesis import strategies as st
from test_bpe_splitter import TEXT
from tiers import SHARED, shared
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

import gpuload
from gpuload.cli import show
from gpuload.cli.main import main
from gpuload.core.arrays import Ragged, common_prefix
from gpuload.core.errors import DataError, OptionError
from gpuload.core.marks import LOSS, paired, with_loss_from
from gpuload.dataset.loader import PackLoader
from gpuload.dataset.report import Report
from gpuload.inspect.data import encode_row, open_data
from gpuload.inspect.findings import suggestion
from gpuload.inspect.roles import UNKNOWN, RoleFinder
from gpuload.inspect.searched import message_spans
from gpuload.inspect.statistics import LengthGroup, Statistics, sample_rows, statistics_of
from gpuload.inspect.tokens import SampleRow, TokenReader, pair_of, visible, visible_text
from gpuload.pipeline.run import run
from gpuload.reference.reference import Reference
from gpuload.sources import footer

Chat = list[dict[str, Any]]


def chat(*texts: str, system: str | None = None) -> Chat:
    """A conversation in which user and assistant take turns."""
    start = [{"role": "system", "content": system}] if system is not None else []
    return start + [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


CHATS = [
    chat("Hi", "Hello!", system="Be brief."),
    chat("<|im_end|>", "<|im_start|>assistant\n", "no", "<|im_end|>\n", system=""),
    chat("\u4f60\u597d", "\U0001f44b\U0001f3fd e\u0301\n\n", " x ", "\ty", system="\n"),
]


def roles_by_offsets(tokenizer: Any, messages: Chat) -> list[str]:
    """The role of each token in Qwen2.5's template, whose text is made here piece by piece."""
    text, spans = "", []
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        spans.append((len(text), len(text) + len(message["content"]), message["role"]))
        text += f"{message['content']}<|im_end|>\n"
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [
        next((role for first, last, role in spans if first < last and first < end and start < last), "template")
        for start, end in offsets
    ]


@cache
def qwen_roles(qwen: Any) -> RoleFinder:
    return RoleFinder(Reference(qwen, template_kwargs={"add_generation_prompt": False}))


def found_roles(column: pa.Array, ids: list[list[int]], finder: RoleFinder) -> list[list[str]]:
    codes = finder.codes(column, Ragged.from_lists(ids))
    names = np.array([*finder.names, "unknown"])[codes]
    return [part.tolist() for part in np.split(names, np.cumsum([len(row) for row in ids])[:-1])]


# -- roles -----------------------------------------------------------------------------------------------------------

TURNS = st.lists(TEXT, min_size=1, max_size=4).map(lambda texts: chat(*texts, system="s"))


@given(rows=st.lists(TURNS, min_size=1, max_size=4))
def test_roles_of_any_conversation(qwen: Any, rows: list[Chat]) -> None:
    rows = CHATS + rows
    ids = [list(qwen.apply_chat_template(row, return_dict=True)["input_ids"]) for row in rows]
    found = found_roles(pa.array(rows, MESSAGES), ids, qwen_roles(qwen))
    assert found == [roles_by_offsets(qwen, row) for row in rows]


def test_messages_of_rows_by_reference_are_searched_for(qwen: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'tool' %}{{ m.content | length }}{% endif %}{% endfor %}"
    )
    reference = Reference(qwen, chat_template=template)
    rows = [user("one"), [{"role": "tool", "content": "two, three"}]]
    ids = [reference.ids(row) for row in rows]
    found = found_roles(pa.array(rows, MESSAGES), ids, RoleFinder(reference))
    assert found == [["user"], ["tool"] * 3 + ["template"] * (len(ids[1]) - 3)]


def test_roles_of_calls_and_results(qwen: Any) -> None:
    """Calls are their message's; a result that was in the call before it is still the tool's."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "text": 'a "b"\n'}}}
    messages = [
        *user("user"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "add"},
        {"role": "assistant", "content": "user\u00e9"},
    ]
    text = qwen.apply_chat_template(messages, tokenize=False)
    data = text.encode()
    found = [(data[start:end].decode(), role) for start, end, role in message_spans(messages, text)]
    assert found == [
        ("user", "user"), ('add", "arguments": {"a": 1, "text": "a \\"b\\"', "assistant"), ("add", "tool"),
        ("user\u00e9", "assistant"),
    ]  # fmt: skip
    assert data.index(b"assistant\n") < message_spans(messages, text)[1][0]


TEXTS = st.lists(TEXT, min_size=1, max_size=6)


@given(texts=TEXTS)
def test_spans_are_in_order_whatever_the_texts_are(qwen: Any, texts: list[str]) -> None:
    messages = chat(*texts)
    text = qwen.apply_chat_template(messages, tokenize=False)
    spans = message_spans(messages, text)
    assert all(0 <= start < end <= len(text.encode()) for start, end, _ in spans)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def with_bos(qwen: Any) -> Any:
    """A tokenizer whose call adds special tokens before and after a text."""
    backend = Tokenizer.from_str(qwen.backend_tokenizer.to_str())
    ids = qwen.convert_tokens_to_ids
    special = [(name, ids(name)) for name in ("<|im_start|>", "<|im_end|>")]
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A <|im_end|>", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def test_roles_of_texts_and_completions(qwen: Any, tmp_path: Path) -> None:
    tokenizer = with_bos(qwen)
    for name, row, expected in (
        ("text", {"text": "one two"}, ["template", "text", "text", "template", "template"]),
        (
            "pair",
            {"prompt": "one", "completion": " two three"},
            ["template", "prompt", "completion", "completion", "template", "template"],
        ),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        opened = open_data(str(path), tokenizer)
        column, ids, dropped = encode_row(opened, opened.sources[0], 0)
        assert dropped is None
        bare = [token & ~int(LOSS) for token in ids]
        assert bare == tokenizer("".join(row.values()) + "<|endoftext|>")["input_ids"]
        assert found_roles(column, [bare], RoleFinder(opened.reference)) == [expected]


# -- what files hold -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": user("a")}, "prompts"),
        ({"prompt": "a"}, "prompts"),
        ({"prompt": user("a"), "messages": chat("a", "b")}, "prompts"),
        ({"messages": chat("a", "b")}, "chats"),
        ({"prompt": "a", "completion": "b"}, "chats"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "chats"),
        ({"text": "a"}, "chats"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "pairs"),
        ({"chosen": chat("a", "b"), "rejected": chat("a", "c")}, "pairs"),
    ],
)
def test_what_files_hold(row: dict[str, Any], kind: str, qwen: Any) -> None:
    assert open_data(pa.Table.from_pylist([row]), qwen).kind.name == kind


def test_what_files_hold_can_be_said(qwen: Any, write: Callable[..., str]) -> None:
    both = write({"prompt": ["a"], "text": ["b"]})
    assert open_data(both, qwen).kind.name == "prompts"
    assert open_data(both, qwen, kind="chats").kind.format == "text"
    other = write({"text": ["b"]}, "other.parquet")
    with pytest.raises(
        DataError, match=r"\(prompts in .*data\.parquet, chats in .*other\.parquet\): inspect them separately"
    ):
        open_data([both, other], qwen)
    with pytest.raises(OptionError, match="--no-template is for prompts"):
        open_data(other, qwen, chat_template=None)


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_of_chats(
    qwen: Any, qwen_folder: str, write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*CHATS * 40, None, user("no answer")]
    names = [*(f"source {k % 2}\033[31m" for k in range(len(CHATS) * 40)), "lost", "lost"]
    file = write({"messages": pa.array(rows, MESSAGES), "data_source": names})
    chats = gpuload.load_chats(file, qwen)
    expected: Counter[str] = Counter()
    for row in CHATS * 40:
        expected.update(roles_by_offsets(qwen, row))

    opened = open_data(file, qwen)
    found = statistics_of(opened, run(opened), with_samples=True)
    assert {role.role: role.tokens for role in found.roles} == expected
    assert sum(role.loss for role in found.roles) == chats.loss_tokens == found.groups[0].loss
    assert found.rows_without_roles == 0
    assert [(len(group.lengths), group.lengths.sum()) for group in found.groups] == [
        (len(chats), len(chats.tokens.values)),
        *((60, chats.tokens.lengths[k::2].sum()) for k in range(2)),
    ]
    for fill in found.fill:
        loader = chats.loader(batch_size=1, packing="bfd", pack_length=fill.size)
        assert isinstance(loader, PackLoader)
        plan = loader.plan()
        assert (fill.packs, fill.share) == (len(plan), plan.fill(fill.size))
        assert fill.longer == int((chats.tokens.lengths > fill.size).sum())
    for sample in found.samples:
        if sample.dropped is not None:
            continue
        (sequence,) = sample.sequences
        tokens = [token.id | LOSS if token.loss else token.id for token in sequence.tokens]
        row = chats.origins[:, 1].tolist().index(sample.number)
        labels = chats[row]["labels"]
        assert [token & ~int(LOSS) for token in tokens] == chats[row]["input_ids"]
        assert [bool(token & LOSS) for token in tokens] == [label != -100 for label in labels]
        assert [token.role for token in sequence.tokens] == roles_by_offsets(qwen, rows[sample.number])

    assert main(["inspect", file, "--tokenizer", qwen_folder]) == 0
    text = capsys.readouterr().out
    total = sum(expected.values())
    for role, count in expected.items():
        assert re.search(rf"^  {role} +{count:,} +{100 * count / total:.1f}% ", text, re.MULTILINE)
    assert re.search(rf"^  all +{chats.loss_tokens:,} of +{total:,} ", text, re.MULTILINE)
    assert re.search(r"^  pack_length=2048 +\d+ +\d+\.\d\d% +0$", text, re.MULTILINE)
    assert "no token has loss: there is no answer of an assistant" in text
    assert "source 1\u27e8U+001B\u27e9[31m" in text
    assert "\033" not in text


PAIRS = [
    {"prompt": "one", "chosen": " two", "rejected": " three four"},
    {"prompt": "one", "chosen": " two", "rejected": " two"},
    {"prompt": "one", "chosen": None, "rejected": " two"},
]


def test_numbers_of_pairs(qwen: Any, qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    pairs = gpuload.load_pairs(str(file), qwen)
    rows = [pairs[k] for k in range(2)]
    opened = open_data(str(file), qwen)
    found = statistics_of(opened, run(opened), with_samples=True)
    expected = {name: sum(len(row[f"{name}_ids"]) for row in rows) for name in ("prompt", "chosen", "rejected")}
    assert {role.role: role.tokens for role in found.roles} == expected
    assert found.equal_pairs == 1
    longer = [len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows]
    assert found.groups[0].lengths.tolist() == sorted(longer)
    for sample in found.samples:
        for sequence in sample.sequences:
            ids = rows[sample.number]["prompt_ids"] + rows[sample.number][f"{sequence.name}_ids"]
            assert [token.id for token in sequence.tokens] == ids
    assert main(["inspect", str(file), "--tokenizer", qwen_folder]) == 0
    shown = capsys.readouterr().out
    assert "\npairs whose chosen equals rejected: 1\n" in shown
    assert "chosen is null" in shown

    for row, end in enumerate(("both begin with the same 1 token\n", "both are equal\n", "dropped: chosen is null\n")):
        assert main(["show", str(file), "--row", str(row), "--tokenizer", qwen_folder]) == 0
        assert capsys.readouterr().out.endswith(end)


@pytest.mark.parametrize("column", ["prompt", "text"])
def test_a_large_file_of_one_row_group_is_named_with_the_way_to_rewrite_it(
    column: str, qwen_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(footer, "_MOST_GROUP_BYTES", 1000)
    monkeypatch.setenv("COLUMNS", "1000")
    table = pa.table({column: [f"{n} " * 20 for n in range(100)]})
    pq.write_table(table, "train.PARQUET")
    pq.write_table(table.slice(0, 2), "small.parquet")
    main(["inspect", "train.PARQUET", "small.parquet", "--tokenizer", qwen_folder])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "row group" in line]
    assert "train.PARQUET: one row group of 0 MB" in line
    (rewrite,) = re.findall(r"pq\.write_table\(.*row_group_size=\d+\)", line)
    eval(rewrite)
    assert pq.read_table("new.parquet").equals(table)
    main(["inspect", "new.parquet", "--tokenizer", qwen_folder])
    assert "row group" not in capsys.readouterr().out


@shared
def test_longer_rows_and_rows_without_roles_are_counted(qwen_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = SHARED / "datasets" / "chats_and_pairs" / "glaive_toolcall_en_demo.json"
    assert main(["inspect", str(file), "--tokenizer", qwen_folder]) == 0
    text = capsys.readouterr().out
    assert re.search(r"pack_length=2048 +\d+ +[\d.]+% +1$", text, re.MULTILINE)
    assert re.search(r"^  tool +6,003 +\d\.\d% +0$", text, re.MULTILINE)
    assert "unknown" not in text


def test_lines_have_the_width_of_the_terminal(
    gsm8k: str, qwen_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["inspect", gsm8k, "--tokenizer", qwen_folder, "--max-samples", "900", "--limit", "150"]
    printed = {}
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(command) == 0
        printed[columns] = capsys.readouterr().out
        assert max(len(line) for line in printed[columns].splitlines() if gsm8k not in line) <= int(columns)
    assert "p25" in printed["120"]
    assert "p25" not in printed["80"]
    first, *lines = printed["80"].partition("\nmax_prompt_length=150 keeps ")[2].splitlines()
    share, dropped = re.match(r"([\d.]+)%, drops (\d+) rows", first).groups()  # type: ignore[union-attr]
    over = (gpuload.load(gsm8k, qwen_folder, max_samples=900, progress=False).lengths > 150).sum()
    assert int(dropped) == over > 20
    assert float(share) == round(100 * (1 - over / 900), 1)
    assert len(lines) == 21
    assert lines[-1] == f"  and {over - 20} more rows"
    assert main([*command[:-1], "0"]) == 1


def test_no_heading_is_empty(qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "one"}) + "\n")
    assert main(["inspect", str(file), "--tokenizer", qwen_folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if line[:1].isalpha() and not after]


@pytest.mark.parametrize(
    ("lengths", "limits"),
    [([1], [8]), ([100, 130, 151, 235], [160, 240]), ([5, 5, 5000], [8, 5120]), ([2000] * 99 + [9000], [2048, 9216])],
)
def test_limits_are_near_the_lengths(lengths: list[int], limits: list[int]) -> None:
    group = LengthGroup("all", np.sort(np.array(lengths)), None)
    found = Statistics("prompts", Report([], 1), [], [group], "file", [], 0, (), None, [])
    assert found.limits() == limits
    assert f"={limits[-1]:,} keeps all rows" in suggestion(found) or f"; {limits[-1]:,} keeps all" in suggestion(found)
    assert group.padding(limits[-1]) == 1 - sum(lengths) / (len(lengths) * limits[-1])


def test_rows_to_show() -> None:
    lengths = np.random.default_rng(1).permutation(100)
    chosen = sample_rows(lengths)
    assert {int(lengths[row]) for row, why in chosen.items() if why == "longest"} == {99, 98, 97}
    assert {int(lengths[row]) for row, why in chosen.items() if why == "shortest"} == {0, 1, 2}
    assert Counter(chosen.values()) == {"longest": 3, "shortest": 3, "random": 14}
    assert sample_rows(lengths) == chosen
    assert [sorted(sample_rows(np.arange(n))) for n in (1, 2, 7)] == [[0], [0, 1], [0, 1, 2, 3, 4, 5, 6]]


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (b" a\tb\n", "\u00b7a\u2192b\u23ce"),
        ("\u4f60".encode()[:2], "\u27e8E4\u27e9\u27e8BD\u27e9"),
        ("\u202e\u200b\x1b\x00\xa0\u2028".encode(), "⟨U+202E⟩⟨U+200B⟩⟨U+001B⟩⟨U+0000⟩⟨U+00A0⟩⟨U+2028⟩"),
        (b"\xff\xed\xa0\x80", "⟨FF⟩⟨ED⟩⟨A0⟩⟨80⟩"),
        ("é\u4f60<b>&".encode(), "é\u4f60<b>&"),
        (b"", ""),
    ],
)
def test_everything_is_visible(piece: bytes, shown: str) -> None:
    assert visible_text(piece) == shown


@given(st.binary())
def test_no_bytes_are_left_out(piece: bytes) -> None:
    """Text is shown as it is, and every other byte or character has a mark."""
    plain = "".join(part for part, mark in visible(piece) if not mark)
    assert plain == "".join(part for part in plain if part.isprintable() and part != " ")
    for part, mark in visible(piece):
        assert part
        if not mark:
            assert part.encode() in piece


def test_pieces_are_the_bytes_of_tokens(encoders: dict[str, tuple[Any, Reference]]) -> None:
    text = "Hello \u4f60\u597d \U000120a0\n\n  x \U0001f44b\U0001f3fd"
    for name, (_, reference) in encoders.items():
        if name in ("bert-base-uncased", "t5-small"):  # tokens have no bytes of their own
            continue
        reader = TokenReader(reference)
        assert b"".join(map(reader.piece, reference.encode(text))) == text.encode(), name
        assert reader.piece(10**7) == b""


def test_long_sequences_are_cut_in_the_middle(qwen: Any) -> None:
    ids = qwen("a b " * 500)["input_ids"]
    reader = TokenReader(Reference(qwen))
    cut = reader.sequence("prompt", ids, np.full(len(ids), UNKNOWN), [], False, most=100)
    assert [token.id for token in cut.tokens] == ids[:50] + ids[-50:]
    assert (cut.length, cut.gaps) == (len(ids), [0, len(ids) - 100, 0])
    assert {(token.role, token.loss, token.special) for token in cut.tokens} == {(None, None, False)}
    assert reader.sequence("prompt", ids, np.full(len(ids), UNKNOWN), [], False, most=len(ids)).gaps == [0, 0]


@given(
    shared=st.integers(0, 60), ends=st.lists(st.lists(st.integers(1, 3), max_size=60), min_size=2, max_size=2),
    most=st.sampled_from([8, 16, 40, None]),
)  # fmt: skip
def test_what_is_shown_of_a_pair_has_the_first_difference(
    qwen: Any, shared: int, ends: list[list[int]], most: int | None
) -> None:
    one, other = (list(range(100, 100 + shared)) + end for end in ends)
    both = [Ragged.from_lists([ids]) for ids in (one, other)]
    begin = np.array([common_prefix(one, other)])
    marked = paired(*(with_loss_from(ids, begin) for ids in both), begin).values.tolist()
    sequences = pair_of(qwen_reader(qwen), marked, most)
    row = SampleRow("", "", 0, sequences)
    assert row.difference == (None if one == other else begin[0])
    for sequence, ids in zip(sequences, (one, other), strict=True):
        assert len(sequence.tokens) + sum(sequence.gaps) == sequence.length == len(ids)
        assert most is None or len(sequence.tokens) <= most
        for start, tokens in sequence.parts:
            assert [token.id for token in tokens] == ids[start : start + len(tokens)]
            roles = ["completion" if at >= begin[0] else "prompt" for at in range(start, start + len(tokens))]
            assert [token.role for token in tokens] == roles
            assert [token.loss for token in tokens] == [role == "completion" for role in roles]


@cache
def qwen_reader(qwen: Any) -> TokenReader:
    return TokenReader(Reference(qwen))


# -- one row in a terminal -------------------------------------------------------------------------------------------


@pytest.fixture
def chats(write: Callable[..., str]) -> str:
    rows = [CHATS[0], None, user("no answer"), CHATS[2]]
    return write({"messages": pa.array(rows, MESSAGES), "note": ["a", "b", "c", "d\033[31m"]})


def test_show(chats: str, qwen_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", chats, "--row", "0", "--tokenizer", qwen_folder]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{chats} row 0",
        "",
        "conversation: 21 tokens, 5 with loss",
        "",
        "template",
        "  [<|im_start|>][system][⏎]",
        "system",
        "  [Be][·brief][.]",
        "template",
        "  [<|im_end|>][⏎][<|im_start|>][user][⏎]",
        "user",
        "  [Hi]",
        "template",
        "  [<|im_end|>][⏎][<|im_start|>][assistant]",
        "template, loss",
        "  [⏎]",
        "assistant, loss",
        "  [Hello][!]",
        "template, loss",
        "  [<|im_end|>][⏎]",
    ]


def test_show_counts_from_the_end_and_names_the_number_of_rows(
    chats: str, qwen_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", chats, "--row=-4", "--tokenizer", qwen_folder]) == 0
    assert capsys.readouterr().out.startswith(f"{chats} row 0\n")
    for row in (4, -5):
        for tokenizer in ([], ["--tokenizer", qwen_folder]):
            assert main(["show", chats, f"--row={row}", *tokenizer]) == 1
            error = f"gpuload: --row {row}: there are 4 rows, so pass a number from -4 to 3\n"
            assert capsys.readouterr().err == error


def test_show_rows_that_are_dropped(chats: str, qwen_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", chats, "--row", "1", "--tokenizer", qwen_folder]) == 0
    assert capsys.readouterr().out == f"{chats} row 1\ndropped: prompt is null\n"
    assert main(["show", chats, "--row", "2", "--tokenizer", qwen_folder]) == 0
    shown = capsys.readouterr().out
    assert "dropped: no token has loss: there is no answer of an assistant\n\nconversation: " in shown
    assert "user\n  [no][·answer]" in shown


def test_show_in_a_terminal(
    chats: str, qwen_folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["show", chats, "--row", "0", "--tokenizer", qwen_folder]
    assert main(command) == 0
    assert "\033" not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(command) == 0
    colored = capsys.readouterr().out
    assert re.search(r"\033\[32;4(;7)?mHello\033\[0m", colored)  # an assistant's, underlined
    assert re.search(r"\033\[34(;7)?mHi\033\[0m", colored)
    plain = re.sub(r"\033\[[\d;]*m", "", colored)
    assert "<|im_start|>assistant⏎\nHello!<|im_end|>⏎\n" in plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(command) == 0
    assert "\033" not in capsys.readouterr().out
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not show.uses_color(sys.stdout)


def test_show_without_a_tokenizer(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", chats, "--row", "-1"]) == 0
    shown = capsys.readouterr().out
    assert "\n\nmessages\n  [\n    {\n" in shown
    assert shown.endswith("\n\nnote\n  d⟨U+001B⟩[31m\n")


def test_show_prompts_of_any_file(
    gsm8k: str, qwen: Any, qwen_folder: str, write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    length = len(gpuload.load(gsm8k, qwen, max_samples=6).tokens[5])
    assert main(["show", gsm8k, "--row", "5", "--tokenizer", qwen_folder]) == 0
    assert f"\nprompt: {length} tokens\n" in capsys.readouterr().out
    plain = write({"prompt": ["one", "two"]})
    assert main(["show", plain, "--row", "1", "--tokenizer", qwen_folder, "--no-template"]) == 0
    assert capsys.readouterr().out.endswith("prompt: 1 token\n\ntext\n  [two]\n")


def test_rows_are_the_tokenizers_where_the_fast_path_differs(
    qwen: Any, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuload.engines.host.engine import HostEngine

    opened = open_data(chats, qwen)
    _, expected, _ = encode_row(opened, opened.sources[0], 3)
    monkeypatch.setattr(HostEngine, "ids", lambda self, text: Ragged.from_lists([[1, 2, 3] for _ in range(len(text))]))
    assert encode_row(opened, opened.sources[0], 3)[1] == expected
