"""The documentation: examples of pages run, every error is on the troubleshooting page, and what pages name exists."""

import ast
import doctest
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import gpuload
from gpuload.core import errors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = [name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__]

spec = importlib.util.spec_from_file_location("build", DOCS / "build.py")
assert spec is not None
assert spec.loader is not None
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

PLACEHOLDER = r"<[\w -]+>"  # on the page, for a value in a message; unlike `<role, content>`
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("page", [page for page in sorted(DOCS.rglob("*.md")) if ">>> " in page.read_text()], ids=str)
def test_examples_on_pages_run(page: Path) -> None:
    assert doctest.testfile(str(page), module_relative=False, optionflags=FLAGS).failed == 0


# -- troubleshooting -------------------------------------------------------------------------------------------------


def literals(node: ast.AST) -> list[str]:
    """The literal parts of a string or an f-string."""
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "gpuload").rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def plain(text: str) -> str:
    """Without white space and quotes at the ends, which depend on how a message is put together."""
    return " ".join(text.split()).strip(" '\"`.,:;()?")


def all_literals() -> str:
    strings: list[str] = []
    for _, module in sources():
        for node in ast.walk(module):
            strings += map(plain, literals(node))
    return "\0".join(strings)


def quoted() -> list[str]:
    """The messages on the page: code spans at the start of an entry, and the first column of tables."""
    entries = re.findall(r"^(`.+`.*)\n:   ", PAGE, re.MULTILINE)
    rows = re.findall(r"^\| (`.+?) \| ", PAGE, re.MULTILINE)
    messages = [span for line in entries + rows for span in re.findall(r"`([^`]+)`", line)]
    return [
        message for message in messages if message not in ("IndexError", "ValueError", "AttributeError", "TypeError")
    ]


def test_every_exception_has_a_section() -> None:
    assert set(CLASSES) >= {"GpuloadError", "OptionError", "DataError"}
    assert set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)) >= set(CLASSES)


def test_quoted_messages_are_those_of_the_code() -> None:
    """Every part of a message between two `<placeholders>` is in some string of the source."""
    known, messages = all_literals(), quoted()
    assert len(messages) > 80
    missing = {
        message: part
        for message in messages
        for part in map(plain, re.split(PLACEHOLDER, message))
        if part and part not in known
    }
    assert not missing, f"on docs/troubleshooting.md, not in gpuload/: {missing}"


def test_raised_messages_are_on_the_page() -> None:
    """One literal part of each message is quoted, so that a search for the message finds its entry."""
    page, missing = "\0".join(map(plain, re.split(PLACEHOLDER + r"|`|\n", PAGE))), []
    for path, module in sources():
        for node in ast.walk(module):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            kind = node.exc.func
            if not (isinstance(kind, ast.Name) and kind.id in CLASSES and node.exc.args):
                continue
            parts = [plain(part) for part in literals(node.exc.args[0])]
            parts = [part for part in parts if len(part) > 7]
            if parts and not any(part in page for part in parts):
                missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {kind.id}: {parts}")
    assert not missing, "raised, and not on docs/troubleshooting.md:\n" + "\n".join(missing)


# -- names -----------------------------------------------------------------------------------------------------------


def test_the_navigation_has_every_page() -> None:
    def pages(item: object) -> Iterator[str]:
        if isinstance(item, str):
            yield item
        for part in item.values() if isinstance(item, dict) else item if isinstance(item, list) else []:
            yield from pages(part)

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages(navigation)) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("file", ["CONTRIBUTING.md", "README.md"])
def test_named_files_exist(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    named = re.findall(r"`((?:gpuload|tests|docs|bench|docker)/[^\s`*]*)`", text)
    linked = [link for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text) if "headline" not in link]
    assert named + linked
    assert [name for name in named + linked if not (ROOT / name).exists()] == []


def test_every_message_has_an_anchor_of_its_own() -> None:
    anchors = re.findall(r'<a class="headerlink" id="([\w-]+)" href="#\1">', build.anchored(PAGE))
    assert len(anchors) == len(set(anchors)) == len(re.findall(r"^`.+`.*\n:   ", PAGE, re.MULTILINE)) > 80


def test_the_site_and_the_package_have_the_same_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == gpuload.__version__
    assert f"copyright: gpuload {version} " in (ROOT / "mkdocs.yml").read_text()
    assert re.search(
        rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d|unreleased)\)$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )


def test_the_site_loads_nothing_from_other_servers() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in configuration
    assert not re.search(r"https?://", "".join((DOCS / "site.css").read_text() + configuration))
