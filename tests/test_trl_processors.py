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
from export_cases import five_steps, small_model  # noqa: E402
from processor_cases import GEMMA, TRANSFORMERS_4, llava, qwen_vl, without_torchvision  # noqa: E402
from tokenizer_cases import small_tokenizer  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    Gemma3Processor,
    Qwen2ForCausalLM,
)
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
from gpuload.integrations.comparison import comparable  # noqa: E402

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
        processor = Gemma3Processor(without_torchvision("Gemma3ImageProcessor")(), tokenizer, GEMMA)
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


def trainer_of(kind: Any, rows: list[Row], processor: Any, output: Path, eval_dataset: Any = None, **more: Any) -> Any:
    """An `SFTTrainer` with a small model."""
    args = trl.SFTConfig(output_dir=str(output), report_to=[], bf16=False, use_cpu=True, **more)
    model = small_model(Qwen2ForCausalLM, getattr(processor, "tokenizer", processor))
    data = {"train_dataset": datasets.Dataset.from_list(rows), "eval_dataset": eval_dataset}
    return kind.SFTTrainer(model, args=args, processing_class=processor, **data)


NO_IMAGES = [row | {"images": None} for row in MESSAGES * 3]
LEARNED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content[0].text }}<|im_end|>{% endgeneration %}{% else %}{{ m.content[0].text }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("make", "rows", "template", "settings"),
    [
        (qwen_vl, NO_IMAGES, None, {"max_length": 16, "pad_to_multiple_of": 8}),
        (llava, [row | {"images": []} for row in NO_IMAGES], None, {}),
        (qwen_vl, NO_IMAGES, LEARNED, {"assistant_only_loss": True}),
    ],
)
def test_conversations_without_images(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, make: Any, rows: Any, template: str | None, settings: Any
) -> None:
    """TRL renders and tokenizes them in its collator. Batches are the same, and come from ids."""
    if TRANSFORMERS_4 and "assistant_only_loss" in settings:
        pytest.skip("TRL needs transformers 5.18 for it")
    made, theirs = (make(small_tokenizer(QWEN3)) for _ in range(2))
    if template is not None:
        made.chat_template = theirs.chat_template = template
    trainers = [trainer_of(kind, rows, one, tmp_path, **settings) for kind, one in ((ours, made), (trl, theirs))]
    for _ in range(2):  # the first batches are compared, until these have 64 rows
        found, expected = ([dict(batch) for batch in trainer.get_train_dataloader()] for trainer in trainers)
        assert [list(batch) for batch in found] == [list(batch) for batch in expected]
        assert comparable(found) == comparable(expected)
    kind = type(made).__name__
    if TRANSFORMERS_4:  # the comparison decides; the batches above are TRL's in any case
        assert said(caplog)[-1] == f"gpuload: falls back to TRL's collator: {kind} is a processor, and a batch differs"
        return
    assert said(caplog) == [f"gpuload: {kind} is a processor; 64 rows prepared by both are equal: used"] * 2
    # The first 64 rows, of whose columns TRL makes the batches as well, are enough.
    assert trainers[0].data_collator.agreed


def test_losses_of_conversations_without_images(tmp_path: Path) -> None:
    def trained(kind: Any) -> Any:
        processor = qwen_vl(small_tokenizer(QWEN3))
        model = small_model(Qwen2ForCausalLM, processor.tokenizer)
        data = datasets.Dataset.from_list(NO_IMAGES)
        return five_steps(kind.SFTTrainer, trl.SFTConfig, model, data, processor, tmp_path)

    (data, losses), (_, expected) = trained(ours), trained(trl)
    assert losses == expected
    assert {"input_ids", "images"} <= set(data.column_names)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row | {"images": [1] * (n == 7)} for n, row in enumerate(MESSAGES)], None),
        ([row | {"images": None} for row in TOOLS], None),
        ([row | {"images": None} for row in COMPLETIONS], None),
        ([row | {"images": None} for row in PLACEHOLDER], "row 70 has a token that stands for an image"),
    ],
)
def test_data_that_the_collator_of_trl_prepares(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, rows: list[Row], why: str | None
) -> None:
    made = trainer_of(ours, rows, qwen_vl(small_tokenizer(QWEN3)), tmp_path)
    assert made.train_dataset.column_names == list(rows[0])
    assert type(made.data_collator).__module__ == "trl.trainer.sft_trainer"
    fell_back = [line for line in said(caplog) if "falls back to TRL's collator for the train dataset: " in line]
    assert len(fell_back) == (why is not None)
    assert (why or "") in "".join(fell_back)


def test_evaluation_of_other_data(tmp_path: Path) -> None:
    """Raw rows go to TRL's collator, also next to those with ids."""
    rows, processor = NO_IMAGES, qwen_vl(small_tokenizer(QWEN3))
    made = trainer_of(ours, rows, processor, tmp_path, eval_dataset=datasets.Dataset.from_list(rows[:9]))
    theirs = trainer_of(trl, rows, processor, tmp_path)
    assert "input_ids" in made.eval_dataset.column_names
    raw = datasets.Dataset.from_list(rows[9:20])
    found, expected = (list(map(dict, trainer.get_eval_dataloader(raw))) for trainer in (made, theirs))
    assert comparable(found) == comparable(expected)


def test_a_tokenizer_and_a_column_of_images(tmp_path: Path) -> None:
    """Also without any image, TRL takes the data for images."""
    found = []
    for kind in (ours, trl):
        with pytest.raises(ValueError, match="The dataset appears to be vision-related") as error:
            trainer_of(kind, NO_IMAGES, small_tokenizer(QWEN3), tmp_path)
        found.append(str(error.value))
    assert found[0] == found[1]
