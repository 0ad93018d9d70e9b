"""Training of a small vision model with TRL's trainers, on data with images."""

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl
from export_cases import five_steps, one_thread
from image_cases import BUILDERS
from test_trl_images import data, images, messages

import gpuload
from gpuload.core.errors import OptionError
from gpuload.integrations import trl as ours


def small_vision_model(processor: Any) -> Any:
    """A Qwen2.5-VL with two layers, the same at each call."""
    tokenizer = processor.tokenizer
    size = {"hidden_size": 32, "intermediate_size": 48}
    text = {**size, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    text |= {"bos_token_id": None, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    text["rope_parameters"]["rope_theta"] = 10_000.0
    vision = {
        **size,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 56,
        "fullatt_block_indexes": [0],
    }
    names = ("image", "video", "vision_start", "vision_end")
    tokens = (processor.image_token, processor.video_token, "<|vision_start|>", "<|vision_end|>")
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, tokens, strict=True)
    }
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


@pytest.mark.parametrize(("name", "kind"), [("SFTTrainer", "messages"), ("DPOTrainer", "pairs")])
def test_rows_of_like_lengths_in_a_batch(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, sampled = BUILDERS["qwen2_5_vl"](), []
    right = transformers.Trainer._get_train_sampler
    monkeypatch.setattr(
        transformers.Trainer,
        "_get_train_sampler",
        lambda self, dataset=None: (sampled.append(right(self, dataset)), sampled[-1])[1],
    )
    dataset = ours.fitting(data(kind), processor, 400, length_column_name="length")
    config = getattr(trl, name.replace("Trainer", "Config"))

    def losses(module: Any, **settings: Any) -> list[float]:
        settings = {"train_sampling_strategy": "group_by_length", "max_length": 400, **settings}
        trainer, model = getattr(module, name), small_vision_model(processor)
        more = {"ref_model": small_vision_model(processor)} if name == "DPOTrainer" else {}
        return five_steps(trainer, config, model, dataset, processor, tmp_path, more, **settings)[1]

    assert losses(ours) == losses(trl, remove_unused_columns=False)
    with pytest.raises(ValueError, match="Can only automatically infer lengths"):
        losses(trl)
    assert {type(each).__name__ for each in sampled} == {"LengthGroupedSampler"}
    assert list(sampled[0].lengths) == dataset["length"]


def generation_template() -> str:
    """Qwen-VL's turns, of which only those of the assistant are in a generation block."""
    parts = "{% for part in m.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' "
    parts += "else part.text }}{% endfor %}<|im_end|>"
    made = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}" + parts
    made += "{% endgeneration %}{% else %}" + parts + "{% endif %}\n{% endfor %}"
    return made + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def in_parts(row: int) -> list[dict[str, Any]]:
    """A conversation with places for its images, as TRL would make it."""
    pictures = [{"type": "image", "text": None}] * len(images(row))
    made = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages(row)]
    made[1]["content"] = [*pictures, *made[1]["content"]]
    return made


def conversations(rows: int = 12) -> Any:
    made = {"messages": [in_parts(row) for row in range(rows)], "images": [images(row) for row in range(rows)]}
    made["n"] = list(range(rows))
    return datasets.Dataset.from_dict(made).cast_column("images", datasets.List(datasets.Image()))


def losses(kind: Any, dataset: Any, output: Path, size: int = 3, steps: int = 4, **settings: Any) -> list[float]:
    """Of some steps of a trainer of a module."""
    processor = settings.pop("processor")
    collator, tested = settings.pop("data_collator", None), settings.pop("eval_dataset", None)
    args = trl.SFTConfig(
        output_dir=str(output), report_to=[], bf16=False, use_cpu=True, max_steps=steps, logging_steps=1,
        per_device_train_batch_size=size, save_strategy="no", learning_rate=0.01, disable_tqdm=True, **settings,
    )  # fmt: skip
    made = kind(
        small_vision_model(processor), args=args, train_dataset=dataset, eval_dataset=tested, data_collator=collator,
        processing_class=processor,
    )  # fmt: skip
    with one_thread():
        made.train()
        if tested is not None:
            assert made.evaluate()["eval_loss"] > 0
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("module", [trl, ours])
def test_losses_of_answers_equal_those_of_trl(module: Any, tmp_path: Path) -> None:
    processor = BUILDERS["qwen2_5_vl"]()
    processor.chat_template = generation_template()
    dataset = conversations()
    given = {"processor": processor, "max_length": None}
    expected = losses(trl.SFTTrainer, dataset, tmp_path, assistant_only_loss=True, **given)
    chats = gpuload.load_chats(dataset, processor, media="inputs", max_length=4_000)
    rows, collate = ours.ready(chats)
    assert rows["length"] == chats.lengths.tolist()
    assert losses(module.SFTTrainer, rows, tmp_path, data_collator=collate, **given) == expected
    everything = losses(trl.SFTTrainer, dataset, tmp_path, **given)
    assert everything != expected


def test_batches_are_those_of_the_processor() -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), conversations()
    chats = gpuload.load_chats(dataset, processor, media="inputs", max_length=4_000)
    rows, collate = ours.ready(chats)
    batch = collate([rows[number] for number in (5, 0, 3)])
    given = [copy.deepcopy(in_parts(number)) for number in (5, 0, 3)]
    for conversation, number in zip(given, (5, 0, 3), strict=True):
        pictures = iter(dataset[number]["images"])
        for part in conversation[1]["content"]:
            if part["type"] == "image":
                part["image"] = next(pictures)
    made = processor.apply_chat_template(
        given, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
    )
    assert {name for name in batch if name not in made} == {"labels", "position_ids"}
    for name in made:
        assert torch.equal(batch[name], made[name]), name
    learned = [row[row >= 0] for row in batch["labels"]]
    wanted = [f"{messages(number)[2]['content']}<|im_end|>" for number in (5, 0, 3)]
    assert processor.tokenizer.batch_decode(learned) == wanted


def test_a_pack_has_the_loss_of_its_rows(tmp_path: Path) -> None:
    processor = BUILDERS["qwen2_5_vl"]()
    chats = gpuload.load_chats(conversations(), processor, media="inputs", max_length=4_000)
    given = {"processor": processor, "max_length": None}
    rows, collate = ours.ready(chats)
    expected = losses(ours.SFTTrainer, rows, tmp_path, 12, 3, data_collator=collate, **given)
    packs, joined = ours.ready(chats, packing="bfd", pack_length=4_000)
    assert packs["length"] == [int(chats.lengths.sum())]
    assert losses(ours.SFTTrainer, packs, tmp_path, 1, 3, data_collator=joined, **given) == pytest.approx(
        expected, 1e-4
    )
    several, joined = ours.ready(chats, packing="bfd", pack_length=200)
    assert len(several) > 3
    assert max(several["length"]) <= 200
    two = losses(ours.SFTTrainer, several, tmp_path, 2, 3, data_collator=joined, **given)
    assert all(loss > 0 for loss in two)


def test_split_datasets_workers_and_groups_of_like_lengths(tmp_path: Path) -> None:
    processor = BUILDERS["qwen2_5_vl"]()
    chats = gpuload.load_chats(conversations(), processor, media="inputs", max_length=4_000)
    rows, collate = ours.ready(chats)
    parts = rows.train_test_split(4, seed=0)
    given = {"processor": processor, "max_length": None, "data_collator": collate, "eval_dataset": parts["test"]}
    given["train_sampling_strategy"] = "group_by_length"
    found = losses(ours.SFTTrainer, parts["train"], tmp_path, **given)
    assert found == losses(ours.SFTTrainer, parts["train"], tmp_path, dataloader_num_workers=1, **given)


def test_losses_of_pairs_equal_those_of_trl(tmp_path: Path) -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), data("pairs", 12)
    dataset = dataset.remove_columns("prompt").add_column("prompt", [in_parts(row)[:2] for row in range(12)])
    for name in ("chosen", "rejected"):
        parts = [[{**m, "content": [{"type": "text", "text": m["content"]}]} for m in row] for row in dataset[name]]
        dataset = dataset.remove_columns(name).add_column(name, parts)

    def five(rows: Any, **more: Any) -> list[float]:
        more |= {"ref_model": small_vision_model(processor)}
        model = small_vision_model(processor)
        return five_steps(trl.DPOTrainer, trl.DPOConfig, model, rows, processor, tmp_path, more, max_length=None)[1]

    pairs = gpuload.load_pairs(dataset, processor, media="inputs", max_length=4_000)
    rows, collate = ours.ready(pairs)
    assert five(rows, data_collator=collate) == pytest.approx(five(dataset), 1e-5)


def test_rows_that_are_not_ready() -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), conversations(4)
    for wrong in (gpuload.load_chats(dataset, processor, max_length=4_000), dataset, None):
        with pytest.raises(OptionError, match="ready needs conversations, or pairs for DPO"):
            ours.ready(wrong)
    llava = gpuload.load_chats(dataset, BUILDERS["llava"](), media="inputs", max_length=4_000)
    with pytest.raises(OptionError, match="processors whose position_ids are known"):
        ours.ready(llava, packing="bfd", pack_length=4_000)
    assert len(ours.ready(llava)[0]) == 4
    weighted = [[*in_parts(0)[:2], {**in_parts(0)[2], "weight": 0.5}]]
    made = datasets.Dataset.from_dict({"messages": weighted, "images": [images(0)]})
    chats = gpuload.load_chats(made, processor, media="inputs", max_length=4_000, loss_on="marked")
    with pytest.raises(OptionError, match="weights of messages other than 0 and 1"):
        ours.ready(chats)
