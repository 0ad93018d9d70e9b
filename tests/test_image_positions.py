"""Positions in three dimensions are those of the models' own `get_rope_index`."""

import inspect
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from image_cases import BUILDERS
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
    return BUILDERS[name]()


def of_model(name: str, processor: Any, batch: Any, prefix: str = "") -> Any:
    """What the model's method makes of a batch: it needs two numbers of the model's configuration."""
    model = getattr(transformers, MODELS[name])
    if "mm_token_type_ids" not in inspect.signature(model.get_rope_index).parameters:
        pytest.skip("another version of transformers")
    vision = SimpleNamespace(spatial_merge_size=processor.image_processor.merge_size, tokens_per_second=2)
    own = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
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
    import pyarrow as pa

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
