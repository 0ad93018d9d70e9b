"""Positions in three dimensions are those of the models' own `get_rope_index`."""

import inspect
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers
from image_cases import BUILDERS
from processor_cases import TRANSFORMERS_4
from test_images import load, rows_of, table_of

import gpuload
from gpuload.kinds.images.positions import rope_positions

MODELS = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "glm4v": "Glm4vModel",
    "glm46v": "Glm46VModel",
}


@cache
def processor_named(name: str) -> Any:
    if TRANSFORMERS_4 and not hasattr(transformers, MODELS.get(name, "ProcessorMixin")):
        pytest.skip("transformers 4.57 does not have this model")
    return BUILDERS[name]()


def of_model(name: str, processor: Any, batch: Any, prefix: str = "") -> Any:
    """What the model's method makes of a batch: it needs two numbers of the model's configuration."""
    model = getattr(transformers, MODELS[name])
    vision = SimpleNamespace(spatial_merge_size=processor.image_processor.merge_size, tokens_per_second=2)
    own = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    if TRANSFORMERS_4:
        own.config.image_token_id, own.config.video_token_id = processor.image_token_id, processor.video_token_id
        start = "<|vision_start|>" if "qwen" in name else "<|begin_of_image|>"
        own.config.video_start_token_id = own.config.video_end_token_id = -1
        own.config.vision_start_token_id = processor.tokenizer.convert_tokens_to_ids(start)
        ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"]
        found, _ = model.get_rope_index(own, ids, image_grid_thw=batch["image_grid_thw"], attention_mask=mask)
        return found * mask  # 1 in the padding, which no token looks at
    own.get_vision_position_ids = partial(model.get_vision_position_ids, own)
    ids, mask, types = (batch[f"{prefix}{key}"] for key in ("input_ids", "attention_mask", "mm_token_type_ids"))
    found, _ = model.get_rope_index(own, ids, types, image_grid_thw=batch["image_grid_thw"], attention_mask=mask)
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_batches_of_prompts(name: str) -> None:
    processor = processor_named(name)
    # Without tokens between two images, the model's method takes them for one.
    given = [row for row in rows_of(1) if "qwen" in name or "<image><image>" not in row[0]]
    prompts = load(table_of(given), processor, verify="off")
    for rows in ([*range(len(given))], [len(given) - 2], [len(given) - 1, 0]):
        batch = prompts.batch(rows, padding="longest")
        assert batch["position_ids"].equal(of_model(name, processor, batch))
    (loaded,) = prompts.loader(6)
    assert loaded["position_ids"].equal(of_model(name, processor, loaded))


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_batches_of_pairs(objective: str) -> None:
    processor, table = processor_named("qwen2_5_vl"), table_of(rows_of(2))
    made = {"prompt": table["prompt"], "images": table["images"]}
    answers = [[{"role": "assistant", "content": f"{k} " * (k + 1)}] for k in range(6)]
    made |= {"chosen": answers, "rejected": answers[::-1]} if objective == "dpo" else {"completion": answers}
    made |= {} if objective == "dpo" else {"label": [True, False] * 3}
    pairs = gpuload.load_pairs(pa.table(made), processor, objective=objective, max_length=20_000)
    batch = pairs.batch(range(6))
    assert batch["position_ids"].equal(of_model("qwen2_5_vl", processor, batch))
    if objective == "kto":
        assert batch["KL_position_ids"].equal(of_model("qwen2_5_vl", processor, batch, "KL_"))


def test_other_processors_have_none() -> None:
    prompts = load(table_of(rows_of(3)), processor_named("llava_next"), verify="off")
    assert "position_ids" not in prompts.batch([0, 1])


def test_tokens_and_grids_must_agree() -> None:
    images, mask = torch.tensor([[0, 1, 1, 0]]).bool().numpy(), torch.ones(1, 4).bool().numpy()
    with pytest.raises(ValueError, match="a row has 2 tokens of images, and its grids say 1"):
        rope_positions(images, mask, [[[1, 2, 2]]], 2)


def small_model(processor: Any) -> Any:
    """A Qwen2.5-VL with random weights."""
    images, size = processor.image_processor, {"hidden_size": 32, "intermediate_size": 32}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"patch_size": images.patch_size, "temporal_patch_size": images.temporal_patch_size, "depth": 2}
    vision |= {"spatial_merge_size": images.merge_size, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**size, **heads, "rope_parameters": rope, "vocab_size": len(processor.tokenizer)},
        vision_config={**size, **vision, "fullatt_block_indexes": [1]},
        image_token_id=processor.image_token_id,
    )
    torch.manual_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def test_a_model_computes_the_same_with_them() -> None:
    """As with the positions that it makes itself; and of a pack as of its rows."""
    processor, table = processor_named("qwen2_5_vl"), table_of(rows_of(4)[:4])
    if "mm_token_type_ids" not in inspect.signature(transformers.Qwen2_5_VLModel.get_rope_index).parameters:
        pytest.skip("another version of transformers")
    answers = [[*each, {"role": "assistant", "content": f"{k}"}] for k, each in enumerate(table["prompt"].to_pylist())]
    table = pa.table({"messages": answers, "images": table["images"]})
    chats = gpuload.load_chats(table, processor, media="inputs", max_length=20_000)
    names = ["input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"]
    (batch,), model = chats.loader(4), small_model(processor)
    (pack,) = chats.loader(1, packing="bfd", pack_length=int(chats.lengths.sum()))
    with torch.no_grad():
        own = model(**{name: batch[name] for name in names}).logits
        given = model(**{name: batch[name] for name in [*names, "position_ids"]}).logits
        of_pack = {name: pack[name] for name in [*names[:1], *names[2:], "position_ids"]}
        packed = model(**of_pack, use_cache=False).logits  # with a cache, the model looks for no rows in a pack
    mask = batch["attention_mask"].bool()
    assert own[mask].equal(given[mask])
    rows = {
        tuple(ids[kept].tolist()): each[kept] for ids, kept, each in zip(batch["input_ids"], mask, own, strict=True)
    }
    bounds = pack["cu_seq_lens_q"].tolist()
    for low, high in pairwise(bounds):
        alone = rows[tuple(pack["input_ids"][0, low:high].tolist())]
        torch.testing.assert_close(packed[0, low:high], alone, rtol=1e-4, atol=1e-5)
