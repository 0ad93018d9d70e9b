"""`gpuload inspect`: what a dataset contains, and how long its rows are in tokens."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuload.cli.output import printable
from gpuload.core.errors import OptionError
from gpuload.core.options import Options
from gpuload.core.words import counted
from gpuload.engines.host.prompts import render_column
from gpuload.inspect.data import open_data, single_groups
from gpuload.inspect.page import page_of
from gpuload.inspect.statistics import statistics_of
from gpuload.inspect.text import as_text
from gpuload.pipeline.run import run
from gpuload.reference.reference import Reference
from gpuload.sources.open import open_sources
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import TEXT

_COMMON_ROLES = (("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant"))


def inspect_files(
    files: Sequence[str], tokenizer: Any, *, html: str | None = None, limit: int | None = None, **options: Any
) -> None:
    """Prints rows, columns and types, lengths, and how many rows each limit keeps; of chats also tokens per role and
    with loss, and how they fill packs.

    With `html`, also writes a page with plots and some rows to that file; with a limit, lists the rows that it would
    drop. Other options are those of `open_data`.

    Raises:
        OptionError: the page cannot be written there.
    """
    _check_limit(limit)
    if html:  # errors come before the work
        check_page(Path(html))
    job = open_data(list(files), tokenizer, **options)
    dataset = run(job)
    dataset.report.notes += single_groups(job.sources)
    found = statistics_of(job, dataset, html is not None, limit)
    print(printable(as_text(found, limit)))
    if html:
        write_page(html, page_of(found, job.reference.name))
        print(printable(f"\nwrote {html}"))


def inspect_images(
    files: Sequence[str], processor: Any, key: str, limit: int | None, max_samples: int = -1, **options: Any
) -> None:
    """Prints tokens of images, which are in column `key`, and of text, and how many rows each limit keeps with smaller
    images, also a limit of the caller. Options are those of `open_data`."""
    from gpuload.inspect.images import images_text, load_with_images  # only for processors

    _check_limit(limit)
    found = load_with_images(files, processor, key, options.pop("kind", None), max_samples=max_samples, **options)
    print(printable(images_text(found, limit)))


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise OptionError(f"--limit {limit}: expected an integer > 0")


def check_page(page: Path) -> None:
    if not page.parent.is_dir():
        raise OptionError(f"--html {page}: no such directory: {page.parent}")
    if page.is_dir():
        raise OptionError(f"--html {page}: a directory: name a file in it")
    if not os.access(page if page.exists() else page.parent, os.W_OK):
        raise OptionError(f"--html {page}: cannot be written: no permission")


def write_page(html: str, page: str) -> None:
    try:
        Path(html).write_text(page, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--html {html}: cannot be written: {error.strerror or error}") from error


def inspect_template(
    files: Sequence[str], tokenizer: Any, *, prompt_key: str = "prompt", chat_template: str = "default"
) -> None:
    """Prints the compiled chat template: what a prompt consists of, for each shape of conversation in the files;
    without files, for common shapes."""
    reference = Reference(tokenizer, chat_template=chat_template)
    program = ChatProgram(reference.call)
    if not files:
        for roles in _COMMON_ROLES:
            program.explore(tuple((("role", role), ("content", TEXT)) for role in roles))
        print(program)
        return
    rendered = []
    for source in open_sources(list(files), Options(prompt_key=prompt_key)):
        for table in source.batches():
            column = table.column(prompt_key).combine_chunks()
            rendered.append(render_column(column, reference, program))
    print(program)
    print(
        f"\n{counted(sum(r.compiled_rows for r in rendered), 'rows')} compiled, "
        f"{sum(r.reference_rows for r in rendered):,} rendered by transformers, "
        f"{sum(len(r.rejected) for r in rendered):,} rejected"
    )
    reasons: Counter[str] = sum((Counter(r.reasons) for r in rendered), Counter())
    reasons += sum((Counter(f"rejected: {why}" for why in r.rejected.values()) for r in rendered), Counter())
    for why, count in reasons.most_common(20):
        print(printable(f"  {count:>9,} {why}"))
