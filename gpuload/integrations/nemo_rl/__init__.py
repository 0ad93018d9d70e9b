"""Integration with NeMo-RL: prompts for algorithms that generate, such as GRPO, and conversations for SFT.

All are tokenized once, by columns.

    data.train.dataset_name=gpuload.integrations.nemo_rl.PromptDataset +data.train.data_path=train.jsonl
    '+data.train.tokenizer=${policy.tokenizer}' '+data.train.max_input_seq_length=${data.max_input_seq_length}'

The names are imported on first access, so that the rest can be imported without NeMo-RL.
"""

from typing import TYPE_CHECKING

from gpuload.core.lazy import lazy_names

if TYPE_CHECKING:
    from gpuload.integrations.nemo_rl.dataset import NemoChatDataset as ChatDataset
    from gpuload.integrations.nemo_rl.dataset import NemoPromptDataset as PromptDataset

__all__ = ["ChatDataset", "PromptDataset"]

__getattr__, __dir__ = lazy_names(__name__, {name: f".dataset:Nemo{name}" for name in __all__})
