"""Integration with NeMo Automodel: its dataset of conversations, tokenized once, by columns.

    dataset:
      _target_: gpuload.integrations.automodel.ChatDataset
      path_or_dataset_id: train.jsonl

The name is imported on first access, so that the rest can be imported without Automodel.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.integrations.automodel.dataset import AutomodelChatDataset as ChatDataset

__all__ = ["ChatDataset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gpuload.integrations.automodel' has no attribute {name!r}")
    from gpuload.integrations.automodel import dataset

    return dataset.AutomodelChatDataset


def __dir__() -> list[str]:
    return sorted(__all__)
