"""`gpuload inspect`: what a dataset contains, and how long its prompts are in tokens."""

import base64
import html as html_text
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuload.dataset import PromptDataset
from gpuload.engines.host.prompts import render_column
from gpuload.errors import GpuloadError
from gpuload.load import load
from gpuload.options import Options
from gpuload.reference.reference import Reference
from gpuload.sources.open import open_sources
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import TEXT

_LIMITS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_NO_LIMIT = 2**31 - 1
_GROUPS = 20
_COMMON_ROLES = (("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant"))

Lengths = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class LengthGroup:
    """The lengths in tokens, ascending, of all prompts or of those with one `data_source`."""

    name: str
    lengths: Lengths

    def percentiles(self) -> list[int]:
        return [int(value) for value in np.percentile(self.lengths, _PERCENTILES, method="nearest")]

    def within(self, limit: int) -> int:
        return int(np.searchsorted(self.lengths, limit, side="right"))


def inspect_files(
    files: Sequence[str],
    tokenizer: Any,
    *,
    prompt_key: str = "prompt",
    max_samples: int = -1,
    no_template: bool = False,
    html: str | None = None,
) -> None:
    """Prints rows, columns and types, prompt lengths, and how many rows each limit keeps.

    Args:
        html: also write a page with plots to this file; needs matplotlib.
    """
    if html:
        _matplotlib()  # raises before the work, if it is not installed
    prompts = load(
        list(files),
        tokenizer,
        prompt_key=prompt_key,
        max_samples=max_samples,
        max_prompt_length=_NO_LIMIT,
        filter_overlong_prompts=False,
        chat_template=None if no_template else "default",
    )
    groups = _groups(prompts)
    print(_text(prompts, groups))
    if html:
        Path(html).write_text(_page(prompts, groups), encoding="utf-8")
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


def _groups(prompts: PromptDataset) -> list[LengthGroup]:
    """All prompts, then those of each data_source, the largest first."""
    lengths = np.asarray(prompts.tokens.lengths)
    groups = [LengthGroup("all", np.sort(lengths))]
    if "data_source" in prompts.column_types.names:
        names = np.array([str(name) for name in prompts.take(["data_source"])["data_source"]])
        found, counts = np.unique(names, return_counts=True)
        for name in found[np.argsort(-counts)][:_GROUPS]:
            groups.append(LengthGroup(str(name), np.sort(lengths[names == name])))
    return groups


def _text(prompts: PromptDataset, groups: list[LengthGroup]) -> str:
    limits = [limit for limit in _LIMITS if limit < groups[0].lengths[-1] * 2] or [_LIMITS[0]]
    width = min(32, max(len(group.name) for group in groups))
    lines = [str(prompts.report), "", "columns"]
    lines += [f"  {field.name:20} {field.type!s:.90}" for field in prompts.column_types]
    lines += ["", f"prompt lengths in tokens{'':{max(1, width - 22)}} " + _row(_PERCENTILES, "p{}")]
    lines += [
        f"  {group.name:{width}.{width}} {len(group.lengths):>9,} " + _row(group.percentiles()) for group in groups
    ]
    lines += ["", "histogram", *_histogram(groups[0].lengths)]
    lines += ["", f"rows kept with max_prompt_length{'':{max(1, width - 29)}} " + _row(limits)]
    for group in groups:
        kept = [f"{100 * group.within(limit) / len(group.lengths):.1f}%" for limit in limits]
        lines.append(f"  {group.name:{width}.{width}} {len(group.lengths):>9,} " + _row(kept))
    return "\n".join(lines)


def _row(values: Sequence[Any], form: str = "{}") -> str:
    return " ".join(f"{form.format(value):>8}" for value in values)


def _bins(lengths: Lengths) -> tuple[Lengths, Any]:
    """Counts and edges of about 16 bins up to the 99th percentile, and one for the rest."""
    top = max(1, int(np.percentile(lengths, 99)))
    edges = np.unique(np.linspace(0, top, 16).astype(int))
    return np.histogram(lengths, np.append(edges, max(top + 1, int(lengths[-1]) + 1)))


def _histogram(lengths: Lengths) -> list[str]:
    counts, edges = _bins(lengths)
    scale = 50 / max(1, counts.max())
    return [
        f"  {int(low):>8,} - {int(high) - 1:>8,} {count:>9,} {'#' * int(np.ceil(count * scale))}"
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]


# -- the page --------------------------------------------------------------------------------------------------------


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise GpuloadError("--html needs matplotlib: pip install 'gpuload[html]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _page(prompts: PromptDataset, groups: list[LengthGroup]) -> str:
    """One self-contained page: the text report, and plots as embedded pictures."""
    title = html_text.escape(", ".join(prompts.report.files))
    plots = "".join(
        f'<figure><img alt="{name}" src="data:image/png;base64,{png}"><figcaption>{name}</figcaption></figure>'
        for name, png in _plots(groups)
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}"
        "pre{overflow-x:auto;background:#f6f6f4;padding:1rem}img{max-width:100%}figure{margin:1.5rem 0}</style>"
        f"<h1>{title}</h1>{plots}<pre>{html_text.escape(_text(prompts, groups))}</pre></html>\n"
    )


def _plots(groups: list[LengthGroup]) -> list[tuple[str, str]]:
    pyplot = _matplotlib()
    everything = groups[0].lengths
    figure, axes = pyplot.subplots(figsize=(9, 3.2), layout="constrained")
    axes.hist(everything[everything <= np.percentile(everything, 99.5)], bins=60, color="#4a7a4a")
    axes.set(xlabel="prompt length in tokens (up to the 99.5th percentile)", ylabel="rows")
    pictures = [("prompt lengths", _png(pyplot, figure))]

    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    for group in groups[:8]:
        axes.step(
            group.lengths, np.arange(1, len(group.lengths) + 1) / len(group.lengths), where="post", label=group.name
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="max_prompt_length", ylabel="fraction of rows kept")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    pictures.append(("rows kept by max_prompt_length", _png(pyplot, figure)))
    return pictures


def _png(pyplot: Any, figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    pyplot.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()
