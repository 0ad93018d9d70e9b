"""The page of `gpuload inspect --html`, as a parser reads it. `test_page_browser.py` opens it in a browser."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import page_cases
import pytest
from page_cases import HOSTILE

from gpuload.cli.main import main
from gpuload.inspect.page import page_of
from gpuload.inspect.plots import DASHES, FEW
from gpuload.inspect.statistics import LengthGroup, Statistics
from gpuload.inspect.tokens import SampleRow, Token, TokenSequence, shown, visible_text

VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """Reads a page: all tags, whether they are balanced, and the text of each class of element."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tokens: list[tuple[set[str], str, str]] = []  # classes, title, text
        self.cells: list[str] = []
        self.depth = 0
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.unbalanced: list[str] = []
        self.feed(page)
        self.close()
        self.unbalanced += [tag for tag, _ in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "td":
            self.cells.append("")
        about = dict(attrs)
        if tag == "span" and "title" in about:
            self.tokens.append((set(str(about["class"]).split()), str(about["title"]), ""))
        if tag not in VOID:
            self._open.append((tag, about))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop()[0] != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if any(tag == "td" for tag, _ in self._open):
            self.cells[-1] += data
        if any(tag == "span" and "title" in about for tag, about in self._open):
            classes, title, text = self.tokens[-1]
            self.tokens[-1] = classes, title, text + data


@pytest.fixture(scope="module")
def found(qwen: Any, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    return page_cases.statistics(qwen, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def page(found: Statistics) -> str:
    return page_of(found, HOSTILE[3])


def test_nothing_in_the_data_becomes_markup(page: str, found: Statistics) -> None:
    reader = Reader(page)
    assert reader.unbalanced == []
    assert reader.tags["script"] == reader.tags["style"] == reader.tags["h1"] == 1
    assert not set(reader.tags) & {"img", "link", "iframe", "object", "b", "base", "form"}
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    assert "document.title" not in page[page.index("<script>") :]


def test_the_page_loads_nothing(page: str) -> None:
    reader = Reader(page)
    assert "default-src 'none'" in page
    for _, name, value in reader.attributes:
        if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
            assert str(value).startswith("#"), (name, value)
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_no_hidden_character_is_in_the_page(page: str) -> None:
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]", page) == []


def test_boxes_are_the_tokens(page: str, found: Statistics) -> None:
    tokens = [token for row in found.samples for sequence in row.sequences for token in sequence.tokens]
    boxes = Reader(page).tokens
    assert len(boxes) == len(tokens) > 500
    for (classes, title, text), token in zip(boxes, tokens, strict=True):
        assert text == visible_text(token.piece)
        assert ("l" in classes) == token.loss
        assert ("s" in classes) == token.special
        words = title.split(" · ")
        assert words[0] == f"id {token.id}"
        assert token.role in words
        assert ("loss" in words) == token.loss
        assert title.startswith(f"id {token.id} · {text} · ")
    assert any("⟨" in text for _, _, text in boxes)
    # Loss is an underline, and a special token a dashed line: neither is a color alone.
    assert re.search(r"\.l \{ border-bottom-color", page)
    assert re.search(r"\.s \{ outline: 1px dashed", page)


def test_tables_can_be_sorted(page: str, found: Statistics) -> None:
    reader = Reader(page)
    buttons = [1 for tag, name, value in reader.attributes if (tag, name, value) == ("th", "scope", "col")]
    assert len(buttons) == page.count('<button type="button">')
    values = [value for tag, name, value in reader.attributes if (tag, name) == ("td", "data-sort")]
    assert len(values) > 50
    assert [float(str(value)) for value in values if float(str(value)) < 0] == []
    for group in found.groups:
        assert shown(group.name) in reader.cells
        assert f"{len(group.lengths):,}" in reader.cells
    for reason, count in found.report.rejected.items():
        assert shown(reason) in reader.cells
        assert f"{count:,}" in reader.cells
        assert ", ".join(found.report.examples[reason]) in reader.cells
    assert {role.role for role in found.roles} <= set(reader.cells)


def test_a_page_is_bounded(found: Statistics) -> None:
    """Long rows are cut in the middle, long names at their end, and only some groups are plotted."""
    token = Token(7, b"<&>", "user", True, True)
    long = TokenSequence("conversation", 10**6, [(0, [token] * 300), (10**6 - 300, [token] * 300)])
    groups = [LengthGroup("x" * 10_000, np.arange(1, 50), 3) for _ in range(20)]
    rows = [SampleRow("longest", "f" * 10_000, k, [long]) for k in range(12)]
    reasons = {f"{k} {'r' * 9000}": 1 for k in range(1000)}
    report = replace(found.report, rejected=reasons, examples={why: ["f" * 9000] for why in reasons})
    page = page_of(
        replace(found, groups=groups, samples=rows, report=report, columns=[("c" * 9000, "t" * 9000)] * 5000),
        "t" * 9000,
    )
    assert "… 999,400 tokens are not shown …" in page
    assert len(page) < 2_500_000
    assert page.count("<figcaption>") == FEW
    assert "12 more in the table." in page


def test_pairs_are_next_to_each_other(found: Statistics) -> None:
    tokens = [Token(k, str(k).encode(), "user", None, False) for k in range(4)]
    chosen, rejected = (
        TokenSequence(name, 3, [(0, [*tokens[:2], tokens[last]])]) for name, last in (("chosen", 2), ("rejected", 3))
    )
    page = page_of(replace(found, samples=[SampleRow("random", "file", 1, [chosen, rejected])]), "t")
    reader = Reader(page)
    assert [text for classes, _, text in reader.tokens if "d" in classes] == ["2", "3"]
    assert [title for _, title, _ in reader.tokens if "first difference" in title] == [
        "id 2 · 2 · user · first difference",
        "id 3 · 3 · user · first difference",
    ]
    assert page.index("chosen, 3 tokens") < page.index("rejected, 3 tokens")


def test_lines_of_plots_differ_without_color() -> None:
    assert len(set(DASHES)) == len(DASHES) == FEW


def test_plots_have_the_colors_of_the_theme(page: str) -> None:
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert not re.findall(r"#[0-9a-f]{6}\b|font-family", svg)
    assert page.count("var(--series-0)") >= 2


def test_findings_come_first_and_the_slider_is_exact(page: str, found: Statistics) -> None:
    assert page.index('class="findings"') < page.index('id="limit"') < page.index("<article")
    assert page.index("<article") < page.index("Lengths in tokens")
    assert "keeps all rows" in page[page.index('class="findings"') :][:2000]
    (points,) = [json.loads(str(value)) for _, name, value in Reader(page).attributes if name == "data-points"]
    lengths = found.groups[0].lengths
    for limit, rows, tokens in points:
        assert (rows, tokens) == ((lengths <= limit).sum(), lengths[lengths <= limit].sum())
    assert {limit for limit, *_ in points} >= set(found.limits())


def test_what_pairs_share_is_shown_once(found: Statistics) -> None:
    tokens = [Token(k, str(k).encode(), "user", None, False) for k in range(22)]
    ends = (("chosen", 20), ("rejected", 21))
    pair = [TokenSequence(name, 21, [(0, [*tokens[:20], tokens[last]])]) for name, last in ends]
    page = page_of(replace(found, samples=[SampleRow("random", "file", 1, pair)]), "t")
    assert [text for _, _, text in Reader(page).tokens] == [*map(str, range(20)), "20", "21"]
    assert "Both begin with the same 20 tokens" in page
    assert "not shown" not in page


def test_pages_of_prompts(gsm8k: str, qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    command = ["inspect", gsm8k, "--tokenizer", qwen_folder, "--max-samples", "300", "--html", str(file)]
    assert main(command) == 0
    assert capsys.readouterr().out.endswith(f"\nwrote {file}\n")
    first = file.read_text(encoding="utf-8")
    reader = Reader(first)
    assert reader.unbalanced == []
    assert {"r0", "r2"} <= {name for classes, _, _ in reader.tokens for name in classes}
    assert not [1 for classes, _, _ in reader.tokens if "l" in classes]
    assert "with loss" not in first
    assert "Tokens per role" not in first
    assert main(command) == 0
    # The seconds of the report differ; rows and plots do not.
    second = file.read_text(encoding="utf-8")
    assert first.partition("<h2>Report</h2>")[0] == second.partition("<h2>Report</h2>")[0]


def test_dropped_rows_are_shown_as_the_file_has_them(
    qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "hi <b>there\u202e"}, {"role": "assistant", "content": "yes"}]
    rows = [{"messages": turns}, {"messages": None}, {"messages": turns[:1]}, {"messages": turns[:1]}]
    (file := tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["inspect", str(file), "--tokenizer", qwen_folder, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    first, second = re.findall(r"<h3>Dropped</h3>.*?</article>", page, re.DOTALL)
    assert all(part in first for part in ("row 2<", "no token has loss", "hi &lt;b&gt;there⟨U+202E⟩&#34;"))
    assert all(part in second for part in ("row 1<", "&#34;messages&#34;: null"))
    assert "and one for each reason to drop rows" in page
