"""Data with images for TRL: the rows that are kept have at most as many tokens as the limit, by TRL's own collator."""

import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from image_cases import BUILDERS, encoded, picture
from PIL import Image
from tokenizers.processors import TemplateProcessing
from trl import GRPOTrainer
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from gpuload.core.errors import DataError, OptionError
from gpuload.integrations.trl import fitting

KNOWS_TEMPLATES = "chat_template" in DataCollatorForVisionLanguageModeling.__dataclass_fields__
"""Of TRL 1.14.2 it knows none, and no loss of answers only either."""

SIZES = ((30, 40), (200, 90), (61, 240), (120, 120), (300, 300), (33, 27), (260, 80))


def messages(row: int) -> list[dict[str, Any]]:
    asked = {"role": "user", "content": f"What is in {row}? " + "Look well. " * (row % 4)}
    return [{"role": "system", "content": "Be brief."}, asked, {"role": "assistant", "content": f"Number {row}."}]


def images(row: int) -> list[dict[str, Any]]:
    count = (1, 2, 0, 1)[row % 4]
    sizes = [SIZES[(row + k) % len(SIZES)] for k in range(count)]
    return [{"bytes": encoded(picture(*size), "PNG"), "path": None} for size in sizes]


def data(kind: str, rows: int = 16) -> Any:
    """A dataset of a form that TRL takes."""
    made: dict[str, list[Any]] = {"n": list(range(rows))}
    if kind == "messages":
        made["messages"] = [messages(row) for row in range(rows)]
    elif kind == "completion":
        made["prompt"] = [messages(row)[:2] for row in range(rows)]
        made["completion"] = [messages(row)[2:] for row in range(rows)]
    elif kind in ("pairs", "prompts"):
        made["prompt"] = [messages(row)[:2] for row in range(rows)]
        if kind == "pairs":
            made["chosen"] = [messages(row)[2:] for row in range(rows)]
            made["rejected"] = [[{"role": "assistant", "content": "No. " * (row % 6)}] for row in range(rows)]
    else:
        made["text"] = ["<|image_pad|>" * len(images(row)) + f" {row}" * row for row in range(rows)]
    made["images"] = [images(row) for row in range(rows)]
    if kind == "one image":
        made["image"] = [(images(row) or images(0))[0] for row in range(rows)]
        made["text"] = [f"<|image_pad|>{row}" for row in range(rows)]
        del made["images"]
    kinds: dict[str, Any] = {"image": datasets.Image(), "images": datasets.List(datasets.Image())}
    dataset = datasets.Dataset.from_dict(made)
    for name in kinds.keys() & made.keys():
        dataset = dataset.cast_column(name, kinds[name])
    return dataset


def collated(processor: Any, row: dict[str, Any], **options: Any) -> Any:
    return DataCollatorForVisionLanguageModeling(processor, **options)([dict(row)])


def length(processor: Any, row: dict[str, Any]) -> int:
    return int(collated(processor, row)["attention_mask"].sum())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("qwen2_5_vl", kind) for kind in ("messages", "completion", "text", "one image")),
        ("llava_next", "messages"),
        ("llava_next", "completion"),
    ],
)
def test_kept_rows_are_those_that_fit(name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    processor = BUILDERS[name]()
    dataset = data(kind)
    lengths = [length(processor, row) for row in dataset]
    limit = sorted(lengths)[9]
    assert lengths.count(limit) < len(lengths)
    with caplog.at_level(logging.INFO, "gpuload.integrations.trl"):
        kept = fitting(dataset, processor, limit)
    wanted = [row for row, each in enumerate(lengths) if each <= limit]
    assert kept["n"] == wanted
    assert kept.features == dataset.features
    assert f"{len(wanted)} of 16 rows have at most {limit:,} tokens" in caplog.text
    for row in kept:
        whole, cut = collated(processor, row), collated(processor, row, max_length=limit)
        assert whole.keys() == cut.keys()
        assert all(torch.equal(whole[key], cut[key]) for key in whole)  # nothing is truncated, and pixels are the same


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava_next", "gemma3", "idefics2"])
def test_pairs_that_fit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    processor, dataset = BUILDERS[name](), data("pairs")

    def pair(row: dict[str, Any], **options: Any) -> Any:
        return DataCollatorForVisionPreference(processor, **options)([dict(row)])

    lengths = [int(pair(row)["attention_mask"].sum(1).max()) for row in dataset]
    limit = sorted(lengths)[9]
    kept = fitting(dataset, processor, limit, length_column_name="length")
    assert not [line for line in caplog.records if "on every row" in line.message]
    wanted = [row for row, each in enumerate(lengths) if each <= limit]
    assert 0 < len(wanted) < len(lengths)
    assert kept["n"] == wanted
    assert kept["length"] == [lengths[row] for row in wanted]
    assert kept.remove_columns("length").features == dataset.features
    for row in kept:
        whole, cut = pair(row), pair(row, max_length=limit)
        assert whole.keys() == cut.keys()
        assert all(torch.equal(whole[key], cut[key]) for key in whole)


def test_pairs_with_arguments_for_the_template() -> None:
    processor = BUILDERS["qwen2_5_vl"]()
    processor.chat_template = "{{ 'word ' * (n or 0) }}" + processor.chat_template
    dataset = data("pairs", 8).add_column("chat_template_kwargs", [{"n": row} for row in range(8)])
    collator = DataCollatorForVisionPreference(processor)
    lengths = [int(collator([dict(row)])["attention_mask"].sum(1).max()) for row in dataset]
    assert fitting(dataset, processor, 10_000, length_column_name="tokens")["tokens"] == lengths


@pytest.mark.parametrize("label", [False, True])
def test_answers_with_labels(label: bool) -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), data("completion", 8)
    dataset = dataset.add_column("label", [label] * 8)
    collator = DataCollatorForVisionUnpairedPreference(processor)
    lengths = [int(collator([dict(row)])["attention_mask"].sum()) for row in dataset]
    assert fitting(dataset, processor, 10_000, length_column_name="length")["length"] == lengths


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
BEGINS = "{{ bos_token }}{% if tools %}{{ tools | length }} tools{% endif %}{{ 'word ' * (n or 0) }}"


def prompt_length(processor: Any, row: dict[str, Any], tools: Any = None, **kwargs: Any) -> int:
    """As `GRPOTrainer` makes a prompt."""
    images = row.get("images", [row["image"]] if row.get("image") else None)
    prompt = prepare_multimodal_messages(row["prompt"], images=images)
    trainer = SimpleNamespace(
        _is_vlm=True,
        environment_factories=None,
        processing_class=processor,
        tools=tools,
        chat_template=kwargs.pop("chat_template", None),
        chat_template_kwargs=kwargs,
    )
    ids, *_ = GRPOTrainer._tokenize_prompts(trainer, [prompt])
    return len(ids[0])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava_next", "gemma3", "idefics2"])
@pytest.mark.parametrize("own", [{}, {"tools": TOOLS, "n": 3}], ids=["plain", "tools"])
def test_prompts_that_fit(name: str, own: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    processor, dataset = BUILDERS[name](), data("prompts")
    tokenizer = processor.tokenizer  # which adds a token to prompts that do not begin with it
    begin, number = "<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.bos_token = begin
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A", f"{begin} $A $B", [(begin, number)])
    assert tokenizer("a")["input_ids"][0] == number
    if own:
        processor.chat_template = BEGINS + processor.chat_template
    lengths = [prompt_length(processor, row, **own) for row in dataset]
    limit = sorted(lengths)[9]
    kept = fitting(dataset, processor, limit, chat_template_kwargs=own, length_column_name="length")
    assert not [line for line in caplog.records if "on every row" in line.message]
    wanted = [row for row, each in enumerate(lengths) if each <= limit]
    assert 0 < len(wanted) < len(lengths)
    assert kept["n"] == wanted
    assert kept["length"] == [lengths[row] for row in wanted]


def test_prompts_with_other_columns_and_one_image_or_none(caplog: pytest.LogCaptureFixture) -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), data("prompts", 12)
    rows = dataset.cast_column("images", datasets.List(datasets.Image(decode=False))).to_list()
    made = [
        {"prompt": row["prompt"], "completion": "solved", "n": row["n"], "image": next(iter(row["images"]), None)}
        for row in rows
    ]
    dataset = datasets.Dataset.from_list(made).cast_column("image", datasets.Image())
    assert any(row["image"] is None for row in made)
    lengths = [prompt_length(processor, row) for row in dataset]
    with caplog.at_level(logging.INFO, "gpuload.integrations.trl"):
        kept = fitting(dataset, processor, 10_000, trainer="grpo", length_column_name="length")
    assert kept["length"] == lengths
    assert kept["n"] == list(range(12))
    assert "12 of 12 rows have at most 10,000 tokens, as GRPOTrainer counts them" in caplog.text


def test_the_processor_runs_on_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, dataset, calls = BUILDERS["qwen2_5_vl"](), data("messages", 200), []
    right = DataCollatorForVisionLanguageModeling.torch_call
    monkeypatch.setattr(
        DataCollatorForVisionLanguageModeling,
        "torch_call",
        lambda self, rows: (calls.append(len(rows)), right(self, rows))[1],
    )
    assert 0 < len(fitting(dataset, processor, 70)) < 200
    assert len(calls) <= 6


def test_rows_that_the_collator_rejects_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    dataset, processor = data("messages", 8), BUILDERS["qwen2_5_vl"]()
    rows = dataset.cast_column("images", datasets.List(datasets.Image(decode=False))).to_list()
    rows[0]["images"][0]["bytes"] = rows[0]["images"][0]["bytes"][:60]
    rows[1]["messages"][0]["role"] = "teacher"
    rows[3]["images"] = [{"bytes": encoded(picture(2, 900), "PNG"), "path": None}]
    made = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    with caplog.at_level(logging.INFO, "gpuload.integrations.trl"):
        kept = fitting(made, processor, 10_000)
    assert kept["n"] == [2, 4, 5, 6, 7]
    assert "Invalid role in message: teacher" in caplog.text
    for row in kept:
        collated(processor, row)


@pytest.mark.parametrize("kind", ["messages", "completion", "text"])
def test_odd_rows_are_kept_if_the_collator_takes_them(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Among so many rows that most are not compared."""
    processor = BUILDERS["qwen2_5_vl"]()
    rows = data(kind, 60).cast_column("images", datasets.List(datasets.Image(decode=False))).to_list()
    odd = [*((at, None) for at in (18, 19, 20, 21)), (22, []), (24, [None])]
    for at, images_of_row in (*odd, *((at, [{"bytes": b"none"}]) for at in (26, 27, 28))):
        rows[at]["images"] = images_of_row
        if kind == "text":
            rows[at]["text"] = "text" * at
    for at, token in ((31, "<|video_pad|>"), (35, "<|image_pad|>"), (39, "<|vision_start|>")):
        if kind == "text":
            rows[at]["text"] += token
        else:
            rows[at]["prompt" if kind == "completion" else "messages"][1]["content"] += token
    made = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    wanted = []
    for row in range(len(made)):
        try:
            length(processor, made[row])
        except Exception:
            continue
        wanted.append(rows[row]["n"])
    with caplog.at_level(logging.INFO, "gpuload.integrations.trl"):
        assert fitting(made, processor, 10_000)["n"] == wanted
    assert "3 cannot be used: UnidentifiedImageError" in caplog.text


def test_paths_that_are_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the cache of the hub."""
    for row in range(40):
        (tmp_path / f"{row}.blob").write_bytes(encoded(picture(30 + row, 60), "PNG"))
        (tmp_path / f"{row}.png").symlink_to(f"{row}.blob")
    paths = [[str(tmp_path / f"{row}.png")] for row in range(40)]
    made = datasets.Dataset.from_dict({"images": paths, "messages": [messages(0)] * 40})
    dataset, calls = made.cast_column("images", datasets.List(datasets.Image())), []
    right = DataCollatorForVisionLanguageModeling.torch_call
    monkeypatch.setattr(
        DataCollatorForVisionLanguageModeling,
        "torch_call",
        lambda self, rows: (calls.append(len(rows)), right(self, rows))[1],
    )
    assert len(fitting(dataset, BUILDERS["qwen2_5_vl"](), 10_000)) == 40
    assert len(calls) <= 6


@pytest.mark.skipif(not KNOWS_TEMPLATES, reason="TRL's collator takes no template")
def test_another_template_and_other_processors(caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<|image_pad|>' }}"
    template += "{% endfor %}{% endfor %}"
    processor, dataset = BUILDERS["qwen2_5_vl"](), data("messages", 8)
    lengths = [int(collated(processor, row, chat_template=template)["attention_mask"].sum()) for row in dataset]
    limit = sorted(lengths)[4]
    kept = fitting(dataset, processor, limit, chat_template=template)
    assert kept["n"] == [row for row, each in enumerate(lengths) if each <= limit]


def test_images_that_are_turned() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(60, 420).save(file, "JPEG", exif=exif)
    dataset = datasets.Dataset.from_dict(
        {"images": [[{"bytes": file.getvalue(), "path": None}]], "messages": [messages(0)]}
    ).cast_column("images", datasets.List(datasets.Image()))
    processor = BUILDERS["llava_next"]()
    wanted = length(processor, dataset[0])
    assert len(fitting(dataset, processor, wanted)) == 1
    with pytest.raises(DataError, match="none of 1 rows has at most"):
        fitting(dataset, processor, wanted - 1)


def test_wrong_arguments() -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), data("messages", 2)
    with pytest.raises(OptionError, match="fitting needs a processor, not"):
        fitting(dataset, processor.tokenizer, 9)
    for limit in (0, -1, True, 2.5, None):
        with pytest.raises(OptionError, match="expected a positive number of tokens"):
            fitting(dataset, processor, limit)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="expected 'sft', 'dpo' or 'grpo'"):
        fitting(dataset, processor, 9, trainer="ppo")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="the dataset has this column"):
        fitting(dataset, processor, 9, length_column_name="n")
    for kind in ("messages", "pairs"):
        with pytest.raises(OptionError, match="chat_template_kwargs are those of GRPOConfig"):
            fitting(data(kind, 2), processor, 9, chat_template_kwargs={})
    name: Any
    for name in ("", 5):
        with pytest.raises(OptionError, match="expected the name of a column"):
            fitting(dataset, processor, 9, length_column_name=name)
    kwargs: Any
    for kwargs in (5, [1]):
        with pytest.raises(OptionError, match="expected a dict"):
            fitting(data("prompts", 2), processor, 9, chat_template_kwargs=kwargs)
    with pytest.raises(DataError, match=r"none of 2 rows has at most 9 tokens, as SFTTrainer counts them$"):
        fitting(dataset, processor, 9)
    with pytest.raises(DataError, match="as DPOTrainer counts them; 2 cannot be used: KeyError: 'prompt'"):
        fitting(dataset, processor, 4_000, trainer="dpo")
    for wrong in (dataset.remove_columns("images"), dataset.to_iterable_dataset(), [{"images": []}]):
        with pytest.raises(DataError, match="column image or images"):
            fitting(wrong, processor, 9)
