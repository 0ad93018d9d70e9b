"""Training of a small vision model with TRL's trainers, on data with images."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl
from export_cases import one_thread
from image_cases import BUILDERS
from test_trl_images import KNOWS_TEMPLATES, data, images, messages

import gpuload
from gpuload.core.errors import DataError, OptionError
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


def generation_template() -> str:
    """Qwen-VL's turns, of which only those of the assistant are in a generation block."""
    parts = "{% for part in m.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' "
    parts += "else part.text }}{% endfor %}<|im_end|>"
    made = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}" + parts
    made += "{% endgeneration %}{% else %}" + parts + "{% endif %}\n{% endfor %}"
    return made + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def in_parts(row: int) -> list[dict[str, Any]]:
    """A conversation with places for its images, as TRL would make it."""
    pictures = [{"type": "image", "text": None} for _ in images(row)]
    made = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages(row)]
    made[1]["content"] = [*pictures, *made[1]["content"]]
    return made


def conversations(rows: int = 6) -> Any:
    made = {"messages": [in_parts(row) for row in range(rows)], "images": [images(row) for row in range(rows)]}
    made["n"] = list(range(rows))
    return datasets.Dataset.from_dict(made).cast_column("images", datasets.List(datasets.Image()))


def losses(
    name: str, dataset: Any, output: Path, processor: Any, size: int = 2, module: Any = ours, **settings: Any
) -> list[float]:
    """Of two steps of a trainer of a module.

    Args:
        size: rows of a batch.
        **settings: of its configuration; datasets and collators are arguments of the trainer.
    """
    more = {key: settings.pop(key) for key in ("data_collator", "eval_dataset") if key in settings}
    if name == "DPOTrainer":
        more["ref_model"] = small_vision_model(processor)
    args = getattr(trl, name.replace("Trainer", "Config"))(
        output_dir=str(output), report_to=[], bf16=False, use_cpu=True, max_steps=2, logging_steps=1,
        per_device_train_batch_size=size, save_strategy="no", learning_rate=0.01, disable_tqdm=True,
        **{"max_length": None, **settings},
    )  # fmt: skip
    model = small_vision_model(processor)
    made = getattr(module, name)(model, args=args, train_dataset=dataset, processing_class=processor, **more)
    with one_thread():
        made.train()
        if "eval_dataset" in more:
            assert made.evaluate()["eval_loss"] > 0
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def loaded(rows: Any, processor: Any, load: Any = gpuload.load_chats, **options: Any) -> Any:
    return load(rows, processor, **{"media": "inputs", "max_length": 4_000, **options})


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
    given = {"train_sampling_strategy": "group_by_length", "processor": processor}
    found = losses(name, dataset, tmp_path, **given)
    assert found == losses(name, dataset, tmp_path, module=trl, remove_unused_columns=False, **given)
    with pytest.raises(ValueError, match="Can only automatically infer lengths"):
        losses(name, dataset, tmp_path, module=trl, **given)
    assert {type(each).__name__ for each in sampled} == {"LengthGroupedSampler"}
    assert list(sampled[0].lengths) == dataset["length"]


@pytest.mark.skipif(not KNOWS_TEMPLATES, reason="TRL has no loss of answers only for data with images")
def test_losses_of_answers_equal_those_of_trl(tmp_path: Path) -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), conversations()
    processor.chat_template = generation_template()
    expected = losses("SFTTrainer", dataset, tmp_path, processor, module=trl, assistant_only_loss=True)
    assert expected != losses("SFTTrainer", dataset, tmp_path, processor, module=trl)
    chats = loaded(dataset, processor)
    rows, collate = ours.ready(chats)
    assert rows["length"] == chats.lengths.tolist()
    for module in (trl, ours):
        assert losses("SFTTrainer", rows, tmp_path, processor, module=module, data_collator=collate) == expected


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava_next", "gemma3"])
def test_batches_are_those_of_the_processor(name: str) -> None:
    processor, dataset = BUILDERS[name](), conversations()
    rows, collate = ours.ready(loaded(dataset, processor))
    batch = collate([rows[number] for number in (5, 0, 3)])
    given = [in_parts(number) for number in (5, 0, 3)]
    for conversation, number in zip(given, (5, 0, 3), strict=True):
        pictures = iter(dataset[number]["images"])
        for part in conversation[1]["content"]:
            if part["type"] == "image":
                part["image"] = next(pictures)
    made = processor.apply_chat_template(
        given, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
    )
    assert {key for key in batch if key not in made} == {"labels", *(["position_ids"] if "qwen" in name else [])}
    for key in made:
        assert torch.equal(batch[key], made[key]), key
    learned = [row[row >= 0] for row in batch["labels"]]
    end = "<end_of_turn>" if name == "gemma3" else "<|im_end|>"
    wanted = [f"{messages(number)[2]['content']}{end}\n" for number in (5, 0, 3)]
    assert processor.tokenizer.batch_decode(learned) == wanted


def test_a_pack_has_the_loss_of_its_rows(tmp_path: Path) -> None:
    processor = BUILDERS["qwen2_5_vl"]()
    chats = loaded(conversations(), processor)
    rows, collate = ours.ready(chats)
    expected = losses("SFTTrainer", rows, tmp_path, processor, 6, data_collator=collate)
    packs, joined = ours.ready(chats, packing="bfd", pack_length=4_000)
    assert packs["length"] == [int(chats.lengths.sum())]
    assert losses("SFTTrainer", packs, tmp_path, processor, 1, data_collator=joined) == pytest.approx(expected, 1e-4)
    packs, joined = ours.ready(chats, packing="bfd", pack_length=150)
    assert len(packs) > 2
    assert max(packs["length"]) <= 150
    batch = joined([packs[2], packs[0]])
    assert batch["input_ids"].shape == (1, packs[0]["length"] + packs[2]["length"])
    assert int(batch["image_grid_thw"].prod(1).sum()) == len(batch["pixel_values"])


def test_split_datasets_workers_and_groups_of_like_lengths(tmp_path: Path) -> None:
    processor = BUILDERS["qwen2_5_vl"]()
    rows, collate = ours.ready(loaded(conversations(), processor))
    parts = rows.train_test_split(2, seed=0)
    more = {"data_collator": collate, "eval_dataset": parts["test"], "train_sampling_strategy": "group_by_length"}
    found = losses("SFTTrainer", parts["train"], tmp_path, processor, **more)
    assert found == losses("SFTTrainer", parts["train"], tmp_path, processor, dataloader_num_workers=1, **more)


def upside_down(dataset: Any) -> Any:
    """The same rows with other images, of the same sizes and so with the same ids."""
    made = [[each.rotate(180) for each in row] for row in dataset["images"]]
    return datasets.Dataset.from_dict({"messages": dataset["messages"], "images": made})


@pytest.mark.parametrize("packing", [None, "bfd"])
def test_a_collator_takes_its_own_rows_only(packing: Any, tmp_path: Path) -> None:
    """Numbers of rows of another load would silently be those of this one."""
    processor, dataset = BUILDERS["qwen2_5_vl"](), conversations()
    more = {} if packing is None else {"packing": packing, "pack_length": 150}
    rows, collate = ours.ready(loaded(dataset, processor), **more)
    rows.save_to_disk(str(tmp_path))
    for again in (ours.ready(loaded(dataset, processor), **more)[0], datasets.load_from_disk(str(tmp_path))):
        for given in (again, again.with_format("torch"), again.with_format("numpy")):
            assert torch.equal(collate([given[1]])["input_ids"], collate([rows[1]])["input_ids"])
    with pytest.raises(OptionError, match="ready returned a dataset and a collator"):
        losses("SFTTrainer", rows, tmp_path, processor)
    others, _ = ours.ready(loaded(dataset.select([1, 0, 2, 3, 4, 5]), processor), **more)
    turned, _ = ours.ready(loaded(upside_down(dataset), processor), **more)
    assert turned["length"] == rows["length"]
    for wrong in (others, turned, dataset, dataset.remove_columns("images")):
        with pytest.raises(DataError, match="makes batches of its own rows, and these are others"):
            collate([wrong[0]])


def preferences() -> Any:
    def answers(name: str) -> list[Any]:
        rows = data("pairs", 6)[name]
        return [[{**each, "content": [{"type": "text", "text": each["content"]}]} for each in row] for row in rows]

    dataset = conversations()
    made = {name: answers(name) for name in ("chosen", "rejected")}
    made["prompt"] = [row[:2] for row in dataset["messages"]]
    pictures = dataset.select_columns("images")
    return datasets.concatenate_datasets([pictures, datasets.Dataset.from_dict(made)], axis=1)


def test_losses_of_pairs_equal_those_of_trl(tmp_path: Path) -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), preferences()
    rows, collate = ours.ready(loaded(dataset, processor, gpuload.load_pairs))
    expected = losses("DPOTrainer", dataset, tmp_path, processor, module=trl)
    assert losses("DPOTrainer", rows, tmp_path, processor, data_collator=collate) == pytest.approx(expected, 1e-5)


@pytest.mark.parametrize("module", [trl, ours], ids=["trl", "gpuload"])
@pytest.mark.parametrize(("name", "given"), [("SFTTrainer", "load_pairs"), ("DPOTrainer", "load_chats")])
def test_rows_for_another_trainer(name: str, given: str, module: Any, tmp_path: Path) -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), conversations() if given == "load_chats" else preferences()
    rows, collate = ours.ready(loaded(dataset, processor, getattr(gpuload, given)))
    right = "DPOTrainer" if name == "SFTTrainer" else "SFTTrainer"
    for unused in (True, False) if module is ours else (True,):
        with pytest.raises(OptionError, match=f"ready made these batches of {given} for {right}, and this is another"):
            losses(name, rows, tmp_path, processor, module=module, data_collator=collate, remove_unused_columns=unused)


def test_options_of_the_trainer_that_are_those_of_the_load(tmp_path: Path) -> None:
    """As docs/trainers/trl.md says: two have no effect, three are errors of TRL."""
    processor = BUILDERS["qwen2_5_vl"]()
    rows, collate = ours.ready(loaded(conversations(), processor))
    some = [rows, tmp_path, processor]
    expected = losses("SFTTrainer", *some, data_collator=collate)
    for harmless in ({"completion_only_loss": True}, {"max_length": 8}):
        assert losses("SFTTrainer", *some, data_collator=collate, **harmless) == expected
    for name in ("packing", "padding_free", "assistant_only_loss"):
        with pytest.raises(ValueError, match=name):
            losses("SFTTrainer", *some, data_collator=collate, **{name: True})


@pytest.mark.parametrize("packing", [None, "bfd"])
def test_a_resumed_run_has_the_rows_of_one_that_was_not_interrupted(
    packing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), conversations()
    monkeypatch.setattr(type(processor), "save_pretrained", lambda *_: None)  # one without videos cannot be saved

    def run(output: Path, model: Any, **resumed: Any) -> tuple[list[Any], list[float]]:
        more = {} if packing is None else {"packing": packing, "pack_length": 150}
        rows, collate = ours.ready(loaded(dataset, processor), **more)
        seen: list[Any] = []

        def collated(given: Any) -> Any:
            seen.append(collate(given))
            return seen[-1]

        args = trl.SFTConfig(
            output_dir=str(output), report_to=[], bf16=False, use_cpu=True, max_steps=5, logging_steps=1, save_steps=3,
            max_length=None, per_device_train_batch_size=1 if packing else 2, learning_rate=0.01, disable_tqdm=True,
        )  # fmt: skip
        trainer = ours.SFTTrainer(
            model, args=args, train_dataset=rows, processing_class=processor, data_collator=collated
        )
        with one_thread():
            trainer.train(**resumed)
        return seen, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    seen, whole = run(tmp_path / "a", small_vision_model(processor))
    checkpoint = str(tmp_path / "a" / "checkpoint-3")
    # The trainer of transformers 5.23 does not find this model's weights under the names that it has saved.
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint)
    again, found = run(tmp_path / "b", model, resume_from_checkpoint=checkpoint)
    wanted = [batch["input_ids"].tolist() for batch in seen[3:5]]
    assert [batch["input_ids"].tolist() for batch in again][:2] == wanted
    assert wanted[0] != wanted[1]
    assert found == whole


def test_rows_that_are_not_ready() -> None:
    processor, dataset = BUILDERS["qwen2_5_vl"](), conversations(4)
    for wrong in (loaded(dataset, processor, media="reference"), dataset, None):
        with pytest.raises(OptionError, match="ready needs conversations, or pairs for DPO"):
            ours.ready(wrong)
    llava = loaded(dataset, BUILDERS["llava_next"]())
    chats = loaded(dataset, processor)
    with pytest.raises(OptionError, match="pack_length is for packs: pass packing too"):
        ours.ready(chats, pack_length=4_000)
    with pytest.raises(OptionError, match="pack_length='4000': expected an integer of at least 1"):
        ours.ready(chats, packing="bfd", pack_length="4000")  # type: ignore[arg-type]
    packing: Any
    for packing in (True, False, "wrapped"):
        with pytest.raises(OptionError, match=f"packing={packing!r}: packs with images are 'bfd' or 'trl', and None"):
            ours.ready(chats, packing=packing)
    with pytest.raises(OptionError, match="processors whose position_ids are known"):
        ours.ready(llava, packing="bfd", pack_length=4_000)
    assert len(ours.ready(llava)[0]) == 4
    weighted = [[*in_parts(0)[:2], {**in_parts(0)[2], "weight": 0.5}]]
    made = datasets.Dataset.from_dict({"messages": weighted, "images": [images(0)]})
    with pytest.raises(OptionError, match="weights of messages other than 0 and 1"):
        ours.ready(loaded(made, processor, loss_on="marked"))
