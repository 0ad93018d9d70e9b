"""`gpuload inspect`: what a dataset contains, and how long its rows are in tokens."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuload.engines.host.prompts import render_column
from gpuload.inspect.data import Kind, load_data, open_data
from gpuload.inspect.page import page_of
from gpuload.inspect.plots import pyplot
from gpuload.inspect.statistics import statistics_of
from gpuload.inspect.text import as_text
from gpuload.options import Options
from gpuload.reference.reference import Reference
from gpuload.sources.open import open_sources
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import TEXT

_COMMON_ROLES = (("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant"))


def inspect_files(
    files: Sequence[str],
    tokenizer: Any,
    *,
    kind: Kind | None = None,
    prompt_key: str = "prompt",
    max_samples: int = -1,
    no_template: bool = False,
    html: str | None = None,
) -> None:
    """Prints rows, columns and types, lengths, and how many rows each limit keeps; of chats also tokens per role and
    with loss, and how they fill packs.

    Args:
        kind, prompt_key, max_samples, no_template: as for `open_data`.
        html: also write a page with plots and some rows to this file; needs matplotlib.
    """
    if html:
        pyplot()  # raises before the work, if it is not installed
    opened = open_data(
        list(files), tokenizer, kind=kind, prompt_key=prompt_key, max_samples=max_samples, no_template=no_template
    )
    found = statistics_of(opened, load_data(opened), with_samples=html is not None)
    print(as_text(found))
    if html:
        Path(html).write_text(page_of(found, opened.reference.name), encoding="utf-8")
        print(f"\nwrote {html}")


def inspect_template(files: Sequence[str], tokenizer: Any, *, prompt_key: str = "prompt") -> None:
    """Prints the compiled chat template: what a prompt consists of, for each shape of conversation.

    Args:
        files: whose conversations to use; if empty, common shapes are tried.
    """
    reference = Reference(tokenizer)
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
        f"\n{sum(r.compiled_rows for r in rendered):,} rows compiled, {sum(r.reference_rows for r in rendered):,} "
        f"rendered by transformers, {sum(len(r.rejected) for r in rendered):,} rejected"
    )
    reasons: Counter[str] = sum((Counter(r.reasons) for r in rendered), Counter())
    reasons += sum((Counter(f"rejected: {why}" for why in r.rejected.values()) for r in rendered), Counter())
    for why, count in reasons.most_common(20):
        print(f"  {count:>9,} {why}")
