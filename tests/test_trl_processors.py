"""The integration with TRL with a processor and data that is only text: what TRL makes of it, through the processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tiers import SHARED, shared

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from processor_cases import GEMMA, llava, qwen_vl  # noqa: E402
from tokenizer_cases import small_tokenizer  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402
from transformers import AutoTokenizer, Gemma3ImageProcessorPil, Gemma3Processor  # noqa: E402
from trl_cases import (  # noqa: E402
    COMPLETIONS,
    IMPLICIT,
    LABELED,
    MESSAGES,
    PAIRS,
    PLAIN,
    TEXTS,
    TOOLS,
    Row,
    assistant,
    equal,
    prepared,
    unhashed,
    user,
)  # fmt: skip

from gpuload.integrations import trl as ours  # noqa: E402

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text()
MAKERS = [qwen_vl, llava]


def both(name: str, rows: list[Row], processor: Any, *more: Any, **settings: Any) -> tuple[Any, Any]:
    """What our trainer and TRL's make of the same rows with a processor."""
    config, settings = (
        getattr(trl, name.replace("Trainer", "Config")),
        {"trainer__tokenizer": processor.tokenizer, **settings},
    )
    kinds = getattr(ours, name), getattr(trl, name)
    return tuple(prepared(kind, config, unhashed(rows), processor, *more, **settings) for kind in kinds)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("gpuload")]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("name", "rows", "settings"),
    [
        ("SFTTrainer", MESSAGES, {"max_length": 30}),
        ("SFTTrainer", COMPLETIONS, {"trainer_completion_only_loss": True}),
        ("SFTTrainer", TEXTS, {}),
        ("SFTTrainer", PLAIN, {"trainer_completion_only_loss": True}),
        ("SFTTrainer", TOOLS, {}),
        ("DPOTrainer", PAIRS, {}),
        ("DPOTrainer", IMPLICIT, {"max_length": 30}),
        ("KTOTrainer", LABELED, {"trainer_desirable_weight": 2.0}),
    ],
)
def test_text_with_a_processor(
    caplog: pytest.LogCaptureFixture, make: Callable[..., Any], name: str, rows: list[Row], settings: dict[str, Any]
) -> None:
    processor = make(small_tokenizer(QWEN3))
    equal(*both(name, rows, processor, *((False, None) if name == "SFTTrainer" else ()), **settings))
    kind = type(processor).__name__
    assert said(caplog) == [f"gpuload: {kind} is a processor; 45 rows prepared by both are equal: used"]


def test_texts_are_parts_of_a_message(caplog: pytest.LogCaptureFixture) -> None:
    """A template that does something else with parts than with text."""
    processor = qwen_vl(small_tokenizer(QWEN3))
    processor.chat_template = (
        "\n {% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text | trim | upper }}{% endfor %}{% endif %}{{ m.tool_calls | length if "
        "m.tool_calls }}{% endfor %}"
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}]
    rows = [{"messages": [user(f" \n é{n} "), {**assistant("x "), "tool_calls": calls[: n % 2]}]} for n in range(30)]
    equal(*both("SFTTrainer", rows, processor, False, None))
    assert "is a processor; 30 rows prepared by both are equal: used" in caplog.text


class OwnProcessor(type(qwen_vl(small_tokenizer(QWEN3)))):  # type: ignore[misc]
    """Code of a model's repository."""


def of_other_code(tokenizer: Any) -> Any:
    made = qwen_vl(tokenizer)
    made.__class__ = OwnProcessor
    return made


def with_bos(tokenizer: Any) -> Any:
    """A processor that adds <|im_start|> where a text does not begin with it."""
    made = qwen_vl(tokenizer)
    made.tokenizer.bos_token = "<|im_start|>"
    number = made.tokenizer.bos_token_id
    made.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<|im_start|> $A", None, [("<|im_start|>", number)]
    )
    made.chat_template = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
    return made


PLACEHOLDER = [{"messages": [user("one"), assistant("<|image_pad|>" if n == 70 else f"{n}" * 9)]} for n in range(99)]
BEGUN = [{"messages": [user("<|im_start|>" * (n != 70) + "one"), assistant(f"{n}")]} for n in range(99)]


@pytest.mark.parametrize(
    ("why", "make", "rows"),
    [
        ("OwnProcessor is a processor whose code is not of transformers, but of", of_other_code, MESSAGES),
        ("row 70 has a token that stands for an image, which Qwen2VLProcessor would need", qwen_vl, PLACEHOLDER),
        ("adds special tokens to texts, of which some do not begin with <|im_start|>", with_bos, BEGUN),
    ],
)
def test_processors_that_trl_calls_itself(
    caplog: pytest.LogCaptureFixture, why: str, make: Callable[..., Any], rows: list[Row]
) -> None:
    processor, results = make(small_tokenizer(QWEN3)), []
    for kind in (ours, trl):
        try:
            args = {"trainer__tokenizer": processor.tokenizer}
            results.append(prepared(kind.SFTTrainer, trl.SFTConfig, unhashed(rows), processor, False, None, **args))
        except ValueError as error:
            results.append(error)
    if isinstance(results[1], ValueError):
        assert str(results[0]) == str(results[1])
    else:
        equal(*results)
    assert "gpuload: falls back to TRL for the train dataset: " in said(caplog)[-1]
    assert why in said(caplog)[-1]


def test_texts_that_begin_with_a_special_token(caplog: pytest.LogCaptureFixture) -> None:
    equal(*both("SFTTrainer", BEGUN[:70], with_bos(small_tokenizer(QWEN3)), False, None))
    assert "is a processor; 64 rows prepared by both are equal: used" in caplog.text


@shared
@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_real_text_with_a_processor(caplog: pytest.LogCaptureFixture, family: str) -> None:
    if family == "qwen":
        processor = qwen_vl(AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen2.5-instruct"))
    else:
        tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "gemma3")
        processor = Gemma3Processor(Gemma3ImageProcessorPil(), tokenizer, GEMMA)
    data = pq.read_table(SHARED / "datasets" / "zh_multiturn.parquet").slice(0, 300)
    chats = [{"messages": row["prompt"] + [assistant("好的")]} for row in data.to_pylist()]
    equal(*both("SFTTrainer", chats, processor, False, None))
    raw = json.loads((SHARED / "datasets" / "chats_and_pairs" / "dpo_en_demo.json").read_text())
    pairs = [
        {
            "prompt": [user(turn["value"]) for turn in row["conversations"][:1]],
            **{name: [assistant(row[name]["value"])] for name in ("chosen", "rejected")},
        }
        for row in raw
    ]
    equal(*both("DPOTrainer", pairs, processor))
    assert [line.rpartition(";")[2] for line in said(caplog)] == [" 64 rows prepared by both are equal: used"] * 2
