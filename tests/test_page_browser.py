"""The page of `gpuload inspect --html` in headless Chromium: `make browser-test`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, open_browser
from page_cases import HOSTILE, write_page, write_pairs

pytestmark = pytest.mark.browser

TABLE = "document.querySelector('[aria-label=\"Lengths in tokens\"] table')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with open_browser() as page:
        yield page


@pytest.fixture(scope="module")
def file(qwen: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(qwen, tmp_path_factory.mktemp("page"))


@pytest.fixture
def page(browser: Page, file: Path) -> Iterator[Page]:
    browser.load(file)
    yield browser
    assert browser.problems == []  # nothing was logged, thrown, requested or opened


def test_browser_data_stays_text(page: Page) -> None:
    assert page.evaluate("document.scripts.length") == 1
    assert page.evaluate("document.images.length") == 0
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    assert HOSTILE[3] in page.evaluate("[...document.querySelectorAll('figcaption')].map(e => e.textContent)")
    assert page.evaluate("document.title") != "broken"


@pytest.mark.parametrize("how", ["click", "keyboard"])
def test_browser_sorts_tables(page: Page, how: str) -> None:
    def press(column: int) -> None:
        button = f"{TABLE}.tHead.rows[0].cells[{column}].querySelector('button')"
        if how == "click":
            page.evaluate(f"{button}.click()")
        else:
            page.evaluate(f"{button}.focus()")
            page.press("Enter")

    def cells(column: int) -> list[Any]:
        value = "Number(cell.dataset.sort)" if column else "cell.textContent"
        rows: list[Any] = page.evaluate(
            f"[...{TABLE}.tBodies[0].rows].map(row => {{ const cell = row.cells[{column}]; return {value}; }})"
        )
        return rows

    def sorting() -> list[Any]:
        headers: list[Any] = page.evaluate(
            f"[...{TABLE}.tHead.rows[0].cells].map(cell => cell.getAttribute('aria-sort'))"
        )
        return headers

    tokens, before = cells(2), sorting()
    assert set(before) == {None}
    assert len(set(tokens)) > 3
    assert tokens != sorted(tokens)
    press(2)
    assert cells(2) == sorted(tokens, reverse=True)
    assert sorting()[2] == "descending"
    press(2)
    assert cells(2) == sorted(tokens)
    assert sorting()[2] == "ascending"
    press(0)
    assert sorting() == ["ascending", *[None] * (len(before) - 1)]
    ascending = cells(0)
    press(0)
    assert cells(0) == ascending[::-1]


@pytest.mark.parametrize("dark", [False, True])
def test_browser_has_both_themes(browser: Page, file: Path, dark: bool) -> None:
    def lightness(property: str, element: str) -> float:
        color: str = browser.evaluate(f"getComputedStyle({element}).{property}")
        red, green, blue = (int(part) for part in color[color.index("(") + 1 : -1].split(",")[:3])
        return (red + green + blue) / 3 / 255

    def check(is_dark: bool) -> None:
        background = lightness("backgroundColor", "document.body")
        assert background < 0.2 if is_dark else background > 0.8
        contrast = [
            ("color", "document.body"),
            ("fill", "document.querySelector('figure svg text')"),
            ("color", "document.querySelector('.tokens .t')"),
        ]
        for property, element in contrast:
            assert abs(lightness(property, element) - background) > 0.35, element
        tint = lightness("backgroundColor", "document.querySelector('.tokens .r3')")
        assert abs(lightness("color", "document.querySelector('.tokens .r3')") - tint) > 0.5

    browser.load(file, dark=dark)
    check(dark)
    browser.evaluate("document.getElementById('theme').click()")
    check(not dark)
    browser.evaluate("document.getElementById('theme').click()")
    check(dark)
    assert browser.problems == []


@pytest.mark.parametrize("width", [320, 390, 1200, 1920])
def test_browser_shows_no_more_than_the_width(browser: Page, file: Path, width: int) -> None:
    browser.load(file, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.problems == []


def test_browser_shows_pairs_next_to_each_other(browser: Page, qwen: Any, tmp_path: Path) -> None:
    file = write_pairs(qwen, tmp_path)

    def places() -> list[list[float]]:
        """Left and top of the two sequences of the first pair."""
        sequences = "[...document.querySelectorAll('.sequences')[0].children]"
        found: list[list[float]] = browser.evaluate(
            f"{sequences}.map(e => e.getBoundingClientRect()).map(r => [r.left, r.top])"
        )
        return found

    browser.load(file)
    (left, top), (other_left, other_top) = places()
    assert top == other_top
    assert left < other_left
    browser.load(file, width=390)
    (left, top), (other_left, other_top) = places()
    assert left == other_left
    assert top < other_top
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    # One pair has equal sequences. Every other one has a mark in both, or in the longer one if the other ends there.
    marked = "[...document.querySelectorAll('.row')].map(row => row.querySelectorAll('.d').length)"
    counts = browser.evaluate(marked)
    assert counts.count(0) == 1
    assert set(counts) <= {0, 1, 2}
    assert browser.problems == []


def test_browser_tries_a_limit(page: Page) -> None:
    def read(name: str) -> str:
        return str(page.evaluate(f"document.getElementById('at-{name}').textContent"))

    assert not page.evaluate("document.getElementById('limit').hidden")
    before, place = read("limit"), page.evaluate("document.getElementById('at').getAttribute('d')")
    assert int(read("dropped").replace(",", "")) <= 1
    page.evaluate("document.getElementById('slider').focus()")
    page.press("Home")
    assert page.evaluate("document.getElementById('at').getAttribute('d')") != place
    assert int(read("limit").replace(",", "")) < int(before.replace(",", ""))
    kept, dropped = int(read("rows").split()[0]), int(read("dropped"))
    assert 0 < kept < dropped
    page.press("End")
    assert (int(read("rows").split()[0]), read("dropped")) == (kept + dropped, "0")
    assert read("padding").endswith("%")


def test_browser_searches_rows(page: Page) -> None:
    shown = "[...document.querySelectorAll('article.row')].filter(row => row.offsetHeight).length"

    def search(text: str) -> None:
        page.evaluate(
            f"(() => {{ const box = document.getElementById('search'); box.value = {text!r}; "
            "box.dispatchEvent(new Event('input')); })()"
        )

    every = page.evaluate(shown)
    search("RIGHT to left")
    some = page.evaluate(shown)
    assert 0 < some < every
    assert page.evaluate("document.getElementById('found').textContent") == f"{some} of {every} rows"
    search("nowhere in the data")
    assert page.evaluate(shown) == 0
    search("")
    assert page.evaluate(shown) == every


def test_browser_opens_long_rows(browser: Page, file: Path) -> None:
    browser.load(file, width=320)
    page = browser
    button = "[...document.querySelectorAll('.more')].find(button => !button.hidden)"
    height = f"{button}.closest('article').querySelector('.tokens').clientHeight"
    before = page.evaluate(height)
    page.evaluate(f"{button}.click()")
    assert page.evaluate(height) > before
    assert page.evaluate(f"{button}.getAttribute('aria-expanded')") == "true"
    page.evaluate(f"{button}.click()")
    assert page.evaluate(height) == before


def test_browser_uses_wide_screens(browser: Page, file: Path) -> None:
    browser.load(file, width=1920)
    right = "Math.max(...[...document.querySelectorAll('article.row')].map(row => row.getBoundingClientRect().right))"
    assert browser.evaluate(right) > 1600
    assert browser.problems == []


def test_browser_shows_a_token_when_it_is_tapped(page: Page) -> None:
    assert page.evaluate("document.getElementById('tip').hidden")
    page.evaluate("document.querySelector('.tokens .t').click()")
    assert page.evaluate("document.getElementById('tip').textContent").startswith("id ")
    assert not page.evaluate("document.getElementById('tip').hidden")
    page.evaluate("document.body.click()")
    assert page.evaluate("document.getElementById('tip').hidden")
