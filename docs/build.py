"""Build the documentation site into `site/`, with warnings as errors.

    python docs/build.py

1. Copy the pages to `build/docs`. A line `<!-- generated: NAME -->` is replaced with what the function NAME below
   returns, so that tables of options and the help of commands cannot be out of date.
2. Run `zensical build --strict`, which fails on broken links, anchors and cross-references.
3. Fail also on what Griffe and mkdocstrings log about docstrings: Zensical prints it and goes on.
"""

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin
from unittest import mock

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
STAGING = ROOT / "build" / "docs"
GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


# -- tables of options -----------------------------------------------------------------------------------------------


GROUPS = {
    "Data": "prompt_key max_samples shuffle seed return_raw_chat return_full_prompt",
    "Length": "max_prompt_length filter_overlong_prompts truncation",
    "Template and tokenizer": "chat_template apply_chat_template_kwargs pad_token_id trust_remote_code",
    "Cache and memory": "cache_dir token_cache token_cache_bytes store remote_timeout",
    "Device and ranks": "device tokens_on gpu_memory_limit distributed",
    "Checks and progress": "verify strict progress",
}
"""What an option of a load is about → the options."""


def options() -> str:
    """The options of `gpuload.load`, by what they are about."""
    from gpuload import Options
    from gpuload.core.keywords import PromptKeywords, described

    grouped = [name for names in GROUPS.values() for name in names.split()]
    assert sorted(grouped) == sorted(field.name for field in dataclasses.fields(Options)), "GROUPS lacks options"
    meanings = described(PromptKeywords)
    parts = [f"## {title}\n\n{_entries(Options, meanings, names.split())}" for title, names in GROUPS.items()]
    return "\n\n".join(parts)


def image_options() -> str:
    """Those of `gpuload.load` with a processor."""
    from gpuload.core.keywords import ImageKeywords, described
    from gpuload.kinds.images.options import ImageOptions

    return _entries(ImageOptions, described(ImageKeywords), [field.name for field in dataclasses.fields(ImageOptions)])


def verl_settings() -> str:
    """The keys of `data.gpuload` in verl's configuration."""
    from gpuload.core.keywords import PromptKeywords, described
    from gpuload.integrations.verl.settings import Settings

    meanings = {**attributes(Settings), **described(PromptKeywords)}
    return _entries(Settings, meanings, [field.name for field in dataclasses.fields(Settings)])


def _entries(options: type[Any], meanings: Mapping[str, str], names: Sequence[str]) -> str:
    """Fields of a dataclass as a list of definitions, which a narrow screen can show: type, default, meaning."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    return "\n\n".join(
        f"**`{name}`** · {_type(fields[name].type)} · default `{_default(fields[name])}`\n:   {meanings[name]}"
        for name in names
    )


def attributes(documented: type[Any]) -> dict[str, str]:
    """The entries of a docstring's Attributes section; `a, b: text` is an entry for each of the two names."""
    section = re.search(r"^Attributes:\n((?:[ ]+.*\n?|\n)+)", inspect.cleandoc(documented.__doc__ or ""), re.MULTILINE)
    assert section, f"{documented.__name__} has no Attributes section"
    entries = re.findall(r"^ {4}(\w[\w, ]*):\s*((?:.*\n?)(?:^ {5,}.*\n?)*)", section[1], re.MULTILINE)
    return {name.strip(): " ".join(text.split()) for names, text in entries for name in names.split(",")}


def _type(kind: Any) -> str:
    """A type as readers write it: `bool`, `"left"` or `"right"`, `int` or `None`."""
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{value}"`' for value in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_type, get_args(kind)))
    if kind is NoneType:
        return "`None`"
    return f"`{kind.__name__ if isinstance(kind, type) and not get_args(kind) else _short(kind)}`"


def _short(kind: Any) -> str:
    return re.sub(r"\b(?:\w+\.)+(\w)", r"\1", str(kind))


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default).replace("'", '"')
    assert field.default_factory is not dataclasses.MISSING
    return repr(field.default_factory())


# -- the command line ------------------------------------------------------------------------------------------------


def commands() -> str:
    """The help of each command, from the parser itself."""
    from gpuload.cli.main import build_parser

    with mock.patch.dict(os.environ, {"COLUMNS": "84", "NO_COLOR": "1"}):
        (choices,) = (action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
        sections = [f"## gpuload {name}\n\n```text\n{command.format_help()}```\n" for name, command in choices.items()]
    return "\n".join(sections)


def checks() -> str:
    """The checks of `gpuload check`, with their thresholds, as a table."""
    from gpuload.inspect.checks.findings import RULES

    lines = ["| check | finds | error | warning | remedy |", "|---|---|---|---|---|"]
    for name, rule in RULES.items():
        shares = [_share(rule.error), "" if rule.error == 0.0 else _share(rule.warning)]
        cells = [f"`{name}`", rule.about, *shares, rule.remedy]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def _share(share: float | None) -> str:
    if share is None:
        return ""
    return f"from {share:.0%}" if share else "one row"


# -- pages from elsewhere --------------------------------------------------------------------------------------------


def contributing() -> str:
    """`CONTRIBUTING.md`."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")


def containers() -> str:
    """The page about containers, next to the Dockerfiles."""
    return (ROOT / "docker" / "README.md").read_text(encoding="utf-8")


GENERATORS: dict[str, Callable[[], str]] = {
    made.__name__: made for made in (options, image_options, verl_settings, commands, checks, contributing, containers)
}


# -- the build -------------------------------------------------------------------------------------------------------


def stage(pages: Path = PAGES, staging: Path = STAGING) -> None:
    """Copies all pages, with their generated parts."""
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(pages, staging, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page in staging.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        text = GENERATED.sub(lambda found: GENERATORS[found[1]](), text)
        page.write_text(anchored(text) if page.name == "troubleshooting.md" else text, encoding="utf-8")


def anchored(page: str) -> str:
    """The page of troubleshooting with an anchor for each message, made of its first words."""
    seen: set[str] = set()

    def with_anchor(found: re.Match[str]) -> str:
        words = re.findall(r"[a-z]+", re.sub(r"<[^>]*>", " ", found[1].partition("`, `")[0]).lower())
        name = "-".join(words[:8])
        while name in seen:
            name += "-2"
        seen.add(name)
        return f'<a class="headerlink" id="{name}" href="#{name}">¶</a> {found[0]}'

    return re.sub(r"^(`.+`.*)\n(?=:   )", with_anchor, page, flags=re.MULTILINE)


def build() -> int:
    """Builds the site; returns 0, or 1 where there was a warning."""
    stage()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "mkdocs.yml"]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    warnings = re.findall(r"^(?:griffe|mkdocstrings|mkdocs_autorefs|WARNING|ERROR)\b.*", done.stdout, re.MULTILINE)
    if done.returncode or warnings:
        print(f"{done.stdout}\nthe site has errors; {len(warnings)} of them in docstrings", file=sys.stderr)
        return 1
    print(f"{sum(1 for _ in (ROOT / 'site').rglob('*.html'))} pages in {ROOT / 'site'}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(build())
