"""gpuload: a GPU-accelerated dataframe loader for LLM post-training.

    prompts = gpuload.load("train/*.parquet", tokenizer="Qwen/Qwen2.5-7B-Instruct", max_prompt_length=1024)
    for batch in prompts.loader(batch_size=256, shuffle=True, seed=0):
        batch["input_ids"]  # int64 (256, 1024), left-padded

Importing this package imports neither torch nor CUDA: names are looked up when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gpuload._version import __version__ as __version__

if TYPE_CHECKING:
    from gpuload.core.errors import GpuloadError
    from gpuload.core.options import Options
    from gpuload.dataset.loader import PromptLoader
    from gpuload.export import save_to_disk
    from gpuload.inspect.checks.findings import Finding
    from gpuload.inspect.checks.run import check
    from gpuload.kinds.chats.dataset import ChatDataset
    from gpuload.kinds.load import load
    from gpuload.kinds.load_chats import load_chats
    from gpuload.kinds.load_pairs import load_pairs
    from gpuload.kinds.pairs.dataset import PairDataset
    from gpuload.kinds.prompts import PromptDataset, collate_fn

_HOMES = {
    "load": "gpuload.kinds.load",
    "load_chats": "gpuload.kinds.load_chats",
    "load_pairs": "gpuload.kinds.load_pairs",
    "ChatDataset": "gpuload.kinds.chats.dataset",
    "PairDataset": "gpuload.kinds.pairs.dataset",
    "PromptDataset": "gpuload.kinds.prompts",
    "collate_fn": "gpuload.kinds.prompts",
    "PromptLoader": "gpuload.dataset.loader",
    "Options": "gpuload.core.options",
    "GpuloadError": "gpuload.core.errors",
    "save_to_disk": "gpuload.export",
    "check": "gpuload.inspect.checks.run",
    "Finding": "gpuload.inspect.checks.findings",
}

__all__ = [
    "ChatDataset",
    "Finding",
    "GpuloadError",
    "Options",
    "PairDataset",
    "PromptDataset",
    "PromptLoader",
    "check",
    "collate_fn",
    "load",
    "load_chats",
    "load_pairs",
    "save_to_disk",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from gpuload.core.memory import garbage_collection_paused

        with garbage_collection_paused():  # with torch and transformers imported, one takes longer than these modules
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gpuload' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
