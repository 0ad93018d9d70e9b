"""Integration with NeMo Automodel: its dataset of conversations, tokenized once, by columns.

    dataset:
      _target_: gpuload.integrations.automodel.ChatDataset
      path_or_dataset_id: train.jsonl

The name is imported on first access, so that the rest can be imported without Automodel.
"""

from typing import TYPE_CHECKING

from gpuload.core.lazy import lazy_names

if TYPE_CHECKING:
    from gpuload.integrations.automodel.dataset import AutomodelChatDataset as ChatDataset

__all__ = ["ChatDataset"]

__getattr__, __dir__ = lazy_names(__name__, {"ChatDataset": ".dataset:AutomodelChatDataset"})
