"""Integration with Ray: Ray Data datasets of tokenized rows, and a token cache that a cluster fills.

    from gpuload.integrations.ray import read_prompts

    prompts = read_prompts("s3://bucket/train/*.parquet", "Qwen/Qwen2.5-7B-Instruct")

The names are imported on first access.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.integrations.ray.collate import collate_fn
    from gpuload.integrations.ray.dataset import read_chats, read_pairs, read_prompts, report
    from gpuload.integrations.ray.fill import prepare

_MODULES = {
    "collate_fn": "collate",
    "prepare": "fill",
    "read_chats": "dataset",
    "read_pairs": "dataset",
    "read_prompts": "dataset",
    "report": "dataset",
}

__all__ = ["collate_fn", "prepare", "read_chats", "read_pairs", "read_prompts", "report"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gpuload.integrations.ray' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gpuload.integrations.ray.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
