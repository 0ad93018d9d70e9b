"""Training of a small vision model with TRL's trainers, on data with images."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from export_cases import five_steps
from image_cases import BUILDERS
from test_trl_images import data

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
