"""Conversations with images to train on: the processor's ids, and which of them have loss."""

import copy
import io
import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from image_cases import BUILDERS, encoded, picture
from PIL import Image
from processor_cases import TRANSFORMERS_4
from tiers import core
from torch.utils.data import DataLoader

import gpuload
from gpuload.core.errors import DataError, OptionError
from gpuload.media.dry_run import image_token_of

_CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
# Writes answers in generation blocks, without the mark that ends them.
BLOCKS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    f"{{% generation %}}{_CONTENT}{{% endgeneration %}}{{% else %}}{_CONTENT}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Which mark images have in the template.
NAMES = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "llava_next": "<image>",
    "gemma3": "<start_of_image>",
    "glm46v": "<|image|>",
    "internvl": "<IMG_CONTEXT>",
    "idefics3": "<image>",
}
TEXTS = ("What?", " and \n\n", "caf\u00e9 \u2615", "\n", "\U0001f408\u200d\u2b1b", "1, 2, 3. ", "x" * 40)


@cache
def processor_named(name: str, blocks: bool = False) -> Any:
    try:
        made = BUILDERS[name]()
    except (AttributeError, ImportError) as error:
        pytest.skip(f"cannot be built here: {error!s:.80}")
    if blocks:
        made.chat_template = BLOCKS.replace("IMAGE", NAMES[name])
    return made


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def rows_of(seed: int, count: int = 8) -> list[tuple[list[Any], list[bytes]]]:
    """Conversations with marks in their texts, and their images; also answers with images."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        messages, images = [message("system", "Be brief.")] * rng.randrange(2), []
        for _ in range(rng.randint(1, 3)):
            for role in ("user", "assistant"):
                pieces = [rng.choice(TEXTS) for _ in range(rng.randint(1, 3))]
                if number and rng.random() < (0.7 if role == "user" else 0.2):
                    pieces.insert(rng.randrange(len(pieces) + 1), "<image>")
                    images.append(encoded(picture(rng.randint(40, 150), rng.randint(40, 150)), "PNG"))
                messages = [*messages, message(role, "".join(pieces))]
        found.append((messages, images))
    return found


def table_of(rows: Any, **columns: Any) -> pa.Table:
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    images = pa.array([[{"bytes": data, "path": None} for data in files] for _, files in rows], kind)
    return pa.table({"messages": [messages for messages, _ in rows], "images": images, **columns})


def in_parts(messages: Any, images: list[bytes]) -> Any:
    """Messages as a processor takes them, with decoded images; those of transformers 4 take no texts as contents."""
    rest = iter(images)

    def part(text: str) -> dict[str, Any]:
        if text != "<image>":
            return {"type": "text", "text": text}
        return {"type": "image", "image": Image.open(io.BytesIO(next(rest))).convert("RGB")}

    import re

    if not images and not TRANSFORMERS_4:
        return messages
    return [message(m["role"], [part(text) for text in re.split("(<image>)", m["content"]) if text]) for m in messages]


def load(table: Any, processor: Any, **options: Any) -> Any:
    return gpuload.load_chats(table, processor, **{"max_length": 60_000, "progress": False, **options})


def image_ids(processor: Any) -> set[int]:
    found = {value for name, value in vars(processor).items() if "image" in name and isinstance(value, int)}
    return found | {processor.tokenizer.convert_tokens_to_ids(processor.image_token)}


# -- ids and loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", core([*NAMES], "qwen2_5_vl", "gemma3"))
def test_masks_are_those_of_the_processor(name: str) -> None:
    processor, rows = processor_named(name, blocks=True), rows_of(1, 5)
    chats = load(table_of(rows), processor, verify="full")
    assert "row by row" not in chats.report.engine
    assert not chats.report.check.mismatches
    assert len(chats) == len(rows), chats.report
    learned, of_images = 0, image_ids(processor)
    around_image = NAMES[name].replace(image_token_of(processor), "")
    for row, (messages, images) in zip(chats, rows, strict=True):
        wanted = processor.apply_chat_template(
            in_parts(messages, images), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(wanted["input_ids"][0]), wanted["assistant_masks"][0]
        mask = [bit and token not in of_images for token, bit in zip(ids, mask, strict=True)]
        assert row["input_ids"] == ids
        found = [label != -100 for label in row["labels"]]
        learned += sum(found if TRANSFORMERS_4 else mask)
        # What stands for an image may have further tokens; none of them is learned, but of the processor's mask they
        # are part if the image is in an answer.
        answers = "".join(m["content"] for m in messages if m["role"] == "assistant")
        if (
            TRANSFORMERS_4
        ):  # whose mask has no block that begins inside of a token, and with images is that of other tokens
            assert images or all(one >= bool(other) for one, other in zip(found, mask, strict=True))
            text = processor.tokenizer.decode([token for token, bit in zip(ids, found, strict=True) if bit])
            assert "".join(text.split()) == "".join(answers.replace("<image>", around_image).split())
        elif "<image>" not in answers:
            assert found == list(map(bool, mask))
        else:
            assert all(one <= bool(other) for one, other in zip(found, mask, strict=True))
    assert learned > 50


@pytest.mark.skipif(TRANSFORMERS_4, reason="whose processors make other masks of rows with images, see docs/images.md")
def test_blocks_that_begin_and_end_inside_of_tokens() -> None:
    """Also such as are empty: transformers marks the token inside of which they are."""
    processor = copy.copy(processor_named("qwen2_5_vl"))
    processor.chat_template = (
        "{% for message in messages %}### {{ message['role'] }}:\n{% if message['role'] == 'assistant' %}"
        f"{{% generation %}}{_CONTENT}{{% endgeneration %}}{{% else %}}{_CONTENT}{{% endif %}}"
        "{{ '\\n' }}{% endfor %}"
    ).replace("IMAGE", NAMES["qwen2_5_vl"])
    rng, rows = random.Random(3), []
    for _ in range(12):
        answers = [rng.choice(["", "", " ", "\n", "a", " a\n", "\u2615"]) for _ in range(3)]
        turns = [
            (message("user", "<image>?" if not at else "More."), message("assistant", a))
            for at, a in enumerate(answers)
        ]
        rows.append(([each for turn in turns for each in turn], [encoded(picture(60, 90), "PNG")]))
    chats = load(table_of(rows), processor, verify="off")
    assert "row by row" not in chats.report.engine
    learned = []
    for row, (messages, images) in zip(chats, rows, strict=True):
        wanted = processor.apply_chat_template(
            in_parts(messages, images), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert row["input_ids"] == list(wanted["input_ids"][0])
        learned.append([int(label != -100) for label in row["labels"]])
        assert learned[-1] == list(wanted["assistant_masks"][0]), messages
    assert sum(map(sum, learned)) > 20


@pytest.mark.parametrize("name", core([*NAMES], "qwen3_vl", "gemma3"))
def test_answers_have_loss_and_images_have_none(name: str) -> None:
    """With a template without blocks: answers with the mark that ends them, as for texts."""
    processor = processor_named(name)
    rows = [(m, images) for m, images in rows_of(2, 6) if not any("<image>" in each["content"] for each in m[1::2])]
    chats = load(table_of(rows), processor, verify="full")
    assert not chats.report.check.mismatches
    plain = gpuload.load_chats(
        pa.table({"messages": [[message(m["role"], m["content"].replace("<image>", "")) for m in r] for r, _ in rows]}),
        processor.tokenizer,
        chat_template=processor.chat_template,
        max_length=60_000,
        progress=False,
    )
    for row, without, (messages, images) in zip(chats, plain, rows, strict=True):
        made = processor.apply_chat_template(in_parts(messages, images), tokenize=True, return_dict=True)
        assert row["input_ids"] == list(made["input_ids"][0])
        found, wanted = ([label for label in each["labels"] if label != -100] for each in (row, without))
        assert found == wanted


@pytest.mark.parametrize("loss_on", ["all", "last", "assistant"])
def test_no_token_of_an_image_is_learned(loss_on: Any) -> None:
    processor, rows = processor_named("qwen2_5_vl"), rows_of(3)
    chats = load(table_of(rows), processor, loss_on=loss_on, verify="full")
    assert not chats.report.check.mismatches
    for row, (messages, images) in zip(chats, rows, strict=True):
        learned = processor.tokenizer.decode([label for label in row["labels"] if label != -100])
        assert "<|image_pad|>" not in learned
        assert row["input_ids"].count(processor.image_token_id) >= len(images)
        texts = [m["content"].split("<image>") for m in messages if m["role"] == "assistant"]
        for some in texts[-1:] if loss_on == "last" else texts:
            assert all(text in learned for text in some)
        if loss_on == "all":
            ids = [label if label != -100 else processor.image_token_id for label in row["labels"]]
            assert ids == row["input_ids"]


def test_completions_have_loss_from_where_ids_differ() -> None:
    processor = processor_named("qwen2_5_vl")
    picture_of = [encoded(picture(60, 90), "PNG"), encoded(picture(90, 60), "PNG")]
    rows = {
        "prompt": [[message("user", "<image>What?")], [message("user", "Draw")], [message("user", "Hi")]],
        "completion": [[message("assistant", text)] for text in ("A cat.", "Here: <image>.", "Hello")],
    }
    images = pa.array([[{"bytes": picture_of[0]}], [{"bytes": picture_of[1]}], []])
    chats = load(pa.table(rows | {"images": images}), processor, verify="full")
    assert not chats.report.check.mismatches
    learned = [processor.tokenizer.decode([t for t in row["labels"] if t != -100]) for row in chats]
    end = "<|im_end|>\n"
    assert learned == [f"A cat.{end}", f"Here: <|vision_start|><|vision_end|>.{end}", f"Hello{end}"]


def test_rows_with_arguments_and_marks_of_their_own() -> None:
    processor = processor_named("qwen2_5_vl")
    data = encoded(picture(60, 90), "PNG")
    messages = [message("user", "<image>?"), message("assistant", "no"), message("user", "?")]
    marked = [{**m, "train": None} for m in messages] + [{**message("assistant", "yes"), "train": True}]
    marked[1]["train"] = False
    table = table_of([(marked, [data]), (marked, [data])])
    table = table.append_column("chat_template_kwargs", pa.array([{"x": 1}, None]))
    chats = load(table, processor, verify="full")
    assert "loss on marked" in str(chats.report)
    assert not chats.report.check.mismatches
    assert [processor.tokenizer.decode([t for t in row["labels"] if t != -100]) for row in chats] == [
        "yes<|im_end|>\n"
    ] * 2


def test_templates_that_print_parts_only() -> None:
    processor = BUILDERS["qwen2_5_vl"]()
    processor.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<|image_pad|>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [([message("user", "<image>?"), message("assistant", "yes")], [encoded(picture(60, 90), "PNG")])]
    rows.append(([message("user", "?"), message("assistant", "no")], []))
    chats = load(table_of(rows), processor, verify="full")
    assert not chats.report.check.mismatches
    learned = [processor.tokenizer.decode([t for t in row["labels"] if t != -100]) for row in chats]
    assert learned == ["yes<|im_end|>\n", "no<|im_end|>\n"]


def test_a_processor_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, rows = processor_named("qwen2_5_vl"), rows_of(4)
    by_rule = load(table_of(rows), processor)
    monkeypatch.setattr(gpuload.kinds.images.chats.ImageChatEngine, "rule", None)
    by_row = load(table_of(rows), processor)
    assert "row by row" in by_row.report.engine
    assert [(row["input_ids"], row["labels"]) for row in by_row] == [(r["input_ids"], r["labels"]) for r in by_rule]


# -- data ------------------------------------------------------------------------------------------------------------


def test_sharegpt_data_with_one_image_in_a_file(tmp_path: Path) -> None:
    processor = processor_named("qwen2_5_vl")
    picture(60, 90).save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    plain = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    lines = [{"id": "1", "image": "a.png", "conversations": turns}, {"id": "2", "conversations": plain}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chats = load(str(tmp_path / "train.jsonl"), processor, image_key="image")
    assert [processor.tokenizer.decode([t for t in row["labels"] if t != -100]) for row in chats] == [
        "A cat.<|im_end|>\n",
        "Hello<|im_end|>\n",
    ]
    assert [len(row["image"]) for row in chats] == [1, 0]
    assert chats[0]["image"][0]["path"] == str(tmp_path / "a.png")


def test_rows_that_cannot_be_used_are_dropped_and_named() -> None:
    processor = processor_named("qwen2_5_vl")
    good = encoded(picture(60, 90), "PNG")
    answer = message("assistant", "yes")
    rows = [
        ([message("user", "<image>"), answer], [good]),
        ([message("user", "<image>"), answer], []),
        ([message("user", "?"), answer], [good]),
        ([message("user", "<image>"), answer], [good[:50]]),
        ([message("user", "<image>")], [good]),
        ([message("user", "<image>"), message("assistant", None)], [good]),
    ]
    chats = load(table_of(rows), processor)
    assert chats.origins[:, 1].tolist() == [0]
    report = str(chats.report)
    for why in ("0 images in its column", "1 image in its column", "image 0: ", "no token has loss", "is null"):
        assert why in report
    with pytest.raises(DataError, match="row 0: image 0: "):
        load(table_of(rows[3:4]), processor, strict=True)


# -- batches ---------------------------------------------------------------------------------------------------------


def made_of(processor: Any, rows: Any) -> Any:
    opened = [[Image.open(io.BytesIO(data)).convert("RGB") for data in files] for _, files in rows if files]
    text = [processor.image_token * len(images) for images in opened]
    return processor(text=text, images=opened, return_tensors="pt", padding=True)


def test_batches_and_packs_have_grids_and_pixels() -> None:
    processor, rows = processor_named("qwen2_5_vl"), rows_of(5)
    chats = load(table_of(rows), processor, media="inputs")
    batch, wanted = chats.batch(range(len(rows))), made_of(processor, rows)
    assert batch["pixel_values"].equal(wanted["pixel_values"])
    assert batch["image_grid_thw"].equal(wanted["image_grid_thw"])
    assert batch["position_ids"].shape == (3, *batch["input_ids"].shape)
    typed = {} if TRANSFORMERS_4 else {"mm_token_type_ids": (batch["input_ids"] == processor.image_token_id).long()}
    assert {name: value.tolist() for name, value in batch.items() if "type_ids" in name} == {
        name: value.tolist() for name, value in typed.items()
    }
    assert batch["input_ids"].shape == batch["labels"].shape
    size = int(chats.lengths.max()) + 200
    seen = []
    for pack in chats.loader(1, packing="bfd", pack_length=size):
        assert all(pack["input_ids"].shape == pack[name].shape for name in typed)
        bounds = pack["cu_seq_lens_q"].tolist()
        inside = [pack["input_ids"][0, low:high].tolist() for low, high in pairwise(bounds)]
        assert pack["position_ids"].shape == (4, 1, pack["input_ids"].shape[1])
        numbers = [next(k for k, row in enumerate(chats) if row["input_ids"] == ids) for ids in inside]
        for (low, high), number in zip(pairwise(bounds), numbers, strict=True):
            alone = chats.batch([number])["position_ids"][:, 0]
            assert pack["position_ids"][:, 0, low:high].equal(torch.cat([torch.arange(high - low)[None], alone]))
        grids = [chats[number]["image_grid_thw"] for number in numbers]
        assert pack["image_grid_thw"].equal(torch.cat(grids))
        if any(map(len, grids)):
            assert pack["pixel_values"].equal(made_of(processor, [rows[number] for number in numbers])["pixel_values"])
        seen += numbers
    assert sorted(seen) == list(range(len(rows)))
    for grouped in chats.loader(max_tokens=2 * size, group_by_length=True):
        assert len(grouped["image_grid_thw"]) == sum(map(len, grouped["images"]))


def test_rows_are_the_same_in_workers() -> None:
    processor, rows = processor_named("qwen2_5_vl"), rows_of(6)
    chats = load(table_of(rows), processor)
    loader = DataLoader(chats, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert [row["labels"] for row in loader] == [row["labels"] for row in chats]


def test_options(tmp_path: Path) -> None:
    processor, rows = processor_named("qwen2_5_vl"), rows_of(7)
    table = table_of(rows)
    for option in ({"device": "cuda"}, {"overlong": "keep_start"}, {"turns": "served"}):
        with pytest.raises(OptionError, match=r"is not supported for data with images: remove it"):
            load(table, processor, **option)
    with pytest.raises(OptionError, match="unknown option image_keys: did you mean image_key"):
        load(table, processor, image_keys="images")
    with pytest.raises(OptionError, match="unknown option colour"):
        load(table, processor, colour=1)
    with pytest.raises(OptionError, match="is for data with images: pass a processor"):
        load(table, processor.tokenizer, image_key="images")
    with pytest.raises(OptionError, match="text that no template renders"):
        load(pa.table({"text": ["<image>"]}), processor)
    with pytest.raises(DataError, match="no column 'imags' with images: did you mean images"):
        load(table, processor, image_key="imags")
    chats = load(table, processor)
    for more, why in (
        ({"packing": "wrapped"}, "'bfd' or 'trl'"),
        ({"packing": "bfd", "pack_length": 9}, "longest row"),
    ):
        with pytest.raises(OptionError, match=why):
            chats.loader(1, **more)
    with pytest.raises(OptionError, match="packs have no columns of images"):
        chats.to_arrow(packing="bfd")
    assert chats.to_arrow().read_all().num_rows == len(rows)
    with pytest.raises(OptionError, match="split 'train' has images, which a directory of tokens cannot have"):
        gpuload.save_to_disk({"train": chats}, tmp_path / "made")
