"""What the tests of the integration with slime share: its arguments, files of prompts, and a stand-in for slime."""

import copy
import json
import random
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def arguments(prompt_data: str, hf_checkpoint: str, **changed: Any) -> Namespace:
    """slime's arguments, as far as data sources and rollouts use them, with slime's defaults."""
    given = {
        "rollout_global_dataset": True, "prompt_data": prompt_data, "hf_checkpoint": hf_checkpoint,
        "dump_details": None, "rollout_max_prompt_len": None, "input_key": "prompt", "multimodal_keys": None,
        "label_key": None, "metadata_key": "metadata", "tool_key": None, "apply_chat_template": True,
        "apply_chat_template_kwargs": {}, "rollout_seed": 42, "rollout_shuffle": False, "n_samples_per_prompt": 2,
        "buffer_filter_path": None, "save": None, "load": None, "gpuload": {"progress": False},
    }  # fmt: skip
    return Namespace(**given | changed)


def rows(count: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with prompts of different lengths, labels and metadata."""
    chosen = random.Random(seed)
    words = "What is 17 + 4 ? Tell me more, please. Größe 東京 <|im_end|> \n\n naïve 🙂".split(" ")
    made = []
    for number in range(count):
        messages = [{"role": "user", "content": " ".join(chosen.choices(words, k=chosen.randrange(1, 60)))}]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        made.append({"prompt": messages, "label": str(number), "metadata": {"level": number % 5, "from": "a"}})
    return made


def write(path: Path, given: Sequence[dict[str, Any]]) -> str:
    """Writes rows as parquet or as JSON lines, depending on the path."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(given)), path, row_group_size=16)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    return str(path)


# -- a stand-in for slime: only what the integration uses --------------------------------------------------------------


@dataclass
class Sample:
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: Any = None
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


class Dataset:
    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Any = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Any = None,
    ):
        self.samples = []
        for row in pq.read_table(path).to_pylist():
            text = row[prompt_key]
            if apply_chat_template:
                text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
            if max_length is None or len(tokenizer.encode(text)) <= max_length:
                label = row[label_key] if label_key is not None else None
                self.samples.append(Sample(prompt=text, label=label, metadata=row.get(metadata_key) or {}))

    def __len__(self) -> int:
        return len(self.samples)


class RolloutDataSourceWithBuffer:
    def __init__(self, args: Any):
        self.args = args
        self.epoch_id = self.sample_offset = 0
        self.dataset: Any = "slime's" if args.prompt_data is not None else None

    def get_samples(self, count: int) -> list[list[Sample]]:
        found = self.dataset.samples[self.sample_offset : self.sample_offset + count]
        self.sample_offset += count
        if len(found) < count:
            self.epoch_id += 1
            self.dataset.shuffle(self.epoch_id)
            self.sample_offset = count - len(found)
            found += self.dataset.samples[: self.sample_offset]
        return [[copy.deepcopy(sample) for _ in range(self.args.n_samples_per_prompt)] for sample in found]


class MultiTurnLossMaskGenerator:
    """The loss mask qwen, message by message."""

    def __init__(self, tokenizer: Any, tokenizer_type: str):
        self._tokenizer = tokenizer
        message = {"role": "user", "content": "x"}
        one, two = len(self._ids([message])), len(self._ids([message, message]))
        self.system_message_length = one - (two - one)
        self.gen_token_length = len(self._ids([message], add_generation_prompt=True)) - one

    def _ids(self, messages: list[dict[str, Any]], **more: Any) -> list[int]:
        return list(self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **more))

    def get_loss_mask(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
        ids, mask = [], []
        for number, message in enumerate(messages):
            added = self.system_message_length if number and message["role"] != "system" else 0
            own = self._ids([message], tools=None if number else tools)[added:]
            unlearned = self.gen_token_length if message["role"] == "assistant" else len(own)
            ids += own
            mask += [0] * unlearned + [1] * (len(own) - unlearned)
        return ids, mask

    def get_response_lengths(self, masks: list[list[int]]) -> list[int]:
        return [len(mask) - mask.index(1) for mask in masks]


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> list[Any]:
    """Marks the samples that slime would tokenize."""
    groups: list[Any] = data_buffer.get_samples(args.rollout_batch_size)
    for (sample,) in groups:
        sample.tokens = "by slime"
    return groups


def stand_in(tokenizer: Any) -> dict[str, ModuleType]:
    """Modules of slime with only what the integration uses of them."""
    contents: dict[str, dict[str, Any]] = {
        "slime": {},
        "slime.rollout": {},
        "slime.utils": {},
        "slime.rollout.data_source": {"RolloutDataSourceWithBuffer": RolloutDataSourceWithBuffer},
        "slime.utils.data": {"Dataset": Dataset, "_parse_generalized_path": lambda path: (path, None)},
        "slime.utils.types": {"Sample": Sample},
        "slime.utils.mask_utils": {"MultiTurnLossMaskGenerator": MultiTurnLossMaskGenerator},
        "slime.rollout.sft_rollout": {"generate_rollout": generate_rollout},
        "slime.utils.processing_utils": {
            "load_tokenizer": lambda name, trust_remote_code: tokenizer,
            "load_processor": lambda name, trust_remote_code: None,
        },
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
    return modules


def without_integration() -> list[str]:
    """The imported modules of slime and of the integration, which a test replaces."""
    return [
        name for name in sys.modules if name.split(".")[0] == "slime" or name.startswith("gpuload.integrations.slime")
    ]
