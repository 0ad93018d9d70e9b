"""A page whose data does its best to break it."""

import json
from pathlib import Path
from typing import Any

from gpuload.inspect.data import open_data
from gpuload.inspect.page import page_of
from gpuload.inspect.statistics import Statistics, statistics_of
from gpuload.pipeline.run import run

HOSTILE = [
    "<script>document.title = 'broken'; alert(1)</script>",
    "</span></div></main><h1>markup</h1><!-- ",
    '" onmouseover="alert(2)" x=\'',
    "<img src=x onerror=alert(3)><svg/onload=alert(4)><link rel=stylesheet href=http://a.test/b>",
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; &amp; ]]> $x^2$",
    "\x00\x01\x1b[31m\x7f \u202e right to left \u2066 \u200b \u2028 \ufeff",
    "\U000120a0\U000120a1 \u4f60\u597d \U0001f469\u200d\U0001f467 e\u0301",
    "  spaces \t tabs \r\n\n breaks   ",
]


def statistics(tokenizer: Any, folder: Path, rows: int = 60) -> Statistics:
    """Of conversations of several sources, with dropped rows, in which every hostile text is somewhere."""
    file = folder / f"{HOSTILE[0][:8]}.jsonl".replace("/", "")
    with file.open("w") as lines:
        for k in range(rows):
            one, other = HOSTILE[k % len(HOSTILE)], HOSTILE[(k + 1) % len(HOSTILE)]
            messages: Any = [{"role": "user", "content": one}, {"role": "assistant", "content": other * (1 + k // 8)}]
            if k == 11:
                messages = [{"role": "<b>tool</b>\x1b", "content": None}]
            if k == 12:
                messages = [{"role": "user", "content": one}]
            row = {"messages": messages, "data_source": HOSTILE[k % 5], one[:30] or "x": "value"}
            lines.write(json.dumps(row) + "\n")
    opened = open_data(str(file), tokenizer)
    return statistics_of(opened, run(opened), with_samples=True)


def write_pairs(tokenizer: Any, folder: Path) -> Path:
    """The page of pairs with hostile texts as a file."""
    file, page = folder / "pairs.jsonl", folder / "pairs.html"
    lines = [
        json.dumps({"prompt": one * (1 + 40 * (k % 3)), "chosen": one, "rejected": other})
        for k, (one, other) in enumerate(zip(HOSTILE, HOSTILE[1:] + HOSTILE[-1:], strict=True))
    ]
    file.write_text("\n".join(lines))
    opened = open_data(str(file), tokenizer)
    page.write_text(page_of(statistics_of(opened, run(opened), with_samples=True), "t"), encoding="utf-8")
    return page


def write_page(tokenizer: Any, folder: Path) -> Path:
    """The page of these conversations as a file."""
    page = folder / "page.html"
    page.write_text(page_of(statistics(tokenizer, folder), HOSTILE[3]), encoding="utf-8")
    return page
