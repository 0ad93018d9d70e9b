"""`gpuload inspect`: what a dataset contains, and how long its rows are in tokens."""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from gpuload.cli.arguments import data_of, served_of
from gpuload.cli.output import printable
from gpuload.core.errors import OptionError
from gpuload.core.files import replacing
from gpuload.core.options import Options
from gpuload.core.words import counted
from gpuload.engines.host.prompts import render_column
from gpuload.inspect.data import open_data, single_groups
from gpuload.inspect.page import page_of
from gpuload.inspect.statistics import statistics_of
from gpuload.inspect.text import as_text
from gpuload.pipeline.run import run as run_job
from gpuload.reference.reference import Reference
from gpuload.sources.open import open_sources
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import TEXT

_COMMON_ROLES = (("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant"))


def run(given: argparse.Namespace) -> int:
    """Prints rows, columns and types, lengths, and how many rows each limit keeps; of chats also tokens per role and
    with loss, and how they fill packs. Or the compiled template; or tokens of images.

    With --html, also writes a page with plots and some rows; with --limit, lists the rows that it would drop.
    """
    files, error = given.files, given.parser.error
    if given.template:
        if given.no_template:
            error("--template and --no-template exclude each other")
        _print_template(files, given.tokenizer, given.prompt_key, given.chat_template or "default")
        return 0
    if not files:
        error("no files given")
    if given.images and served_of(given):
        error("--images looks at prompts: without the options for rows as served")
    if given.images and (given.html or given.no_template):
        error("--html and --no-template are not for --images")
    options = {"max_samples": given.max_samples, **data_of(given)}
    if given.limit is not None and given.limit < 1:
        raise OptionError(f"--limit {given.limit}: expected an integer > 0")
    if given.images:
        from gpuload.inspect.images import images_text, load_with_images  # only for processors

        found = load_with_images(files, given.tokenizer, given.images, options.pop("kind"), **options)
        print(printable(images_text(found, given.limit)))
        return 0
    if given.html:  # errors come before the work
        check_page(Path(given.html))
    job = open_data(files, given.tokenizer, **options, **served_of(given))
    dataset = run_job(job)
    dataset.report.notes += single_groups(job.sources)
    statistics = statistics_of(job, dataset, given.html is not None, given.limit)
    print(printable(as_text(statistics, given.limit)))
    if given.html:
        write_page(given.html, page_of(statistics, job.reference.name))
        print(printable(f"\nwrote {given.html}"))
    return 0


def check_page(page: Path) -> None:
    """Checks that a page can be written to a file, before the work; an `OptionError` if it cannot."""
    try:
        os.stat(page)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long, a closed directory; a null byte
        raise OptionError(f"--html {page}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    if not page.parent.is_dir():
        raise OptionError(f"--html {page}: no such directory: {page.parent}")
    if page.is_dir():
        raise OptionError(f"--html {page}: a directory: name a file in it")
    if not os.access(page if _is_device(page) else page.resolve().parent, os.W_OK):
        raise OptionError(f"--html {page}: cannot be written: no permission, or a read-only file system")


def _is_device(place: Path) -> bool:
    """Whether it is a terminal or a pipe, for example, which cannot be replaced by a file."""
    return place.exists() and not place.is_file()


def write_page(html: str, page: str) -> None:
    """Writes a page as a whole, or leaves the file as it was; an `OptionError` if it cannot be written."""
    place = Path(html)
    try:
        # Where it is a link, the file that it names is replaced.
        with nullcontext(place) if _is_device(place) else replacing(place.resolve()) as file:
            file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--html {html}: cannot be written: {error.strerror or error}") from error


def _print_template(files: Sequence[str], tokenizer: str, prompt_key: str, chat_template: str) -> None:
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
    for source in open_sources(files, Options(prompt_key=prompt_key)):
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
