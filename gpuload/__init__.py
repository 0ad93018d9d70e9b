"""gpuload: a GPU-accelerated dataframe loader for LLM post-training.

    prompts = gpuload.load("train/*.parquet", tokenizer="Qwen/Qwen2.5-7B-Instruct", max_prompt_length=1024)
    for batch in prompts.loader(batch_size=256, shuffle=True, seed=0):
        batch["input_ids"]  # int64 (256, 1024), left-padded

Importing this package imports neither torch nor CUDA: names are looked up when they are first used.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpuload._version import __version__ as __version__

if TYPE_CHECKING:
    from gpuload.chats.dataset import ChatDataset
    from gpuload.chats.load import load_chats
    from gpuload.dataset import PromptDataset, collate_fn
    from gpuload.errors import GpuloadError
    from gpuload.load import load
    from gpuload.loader import PromptLoader
    from gpuload.options import Options
    from gpuload.pairs.dataset import PairDataset
    from gpuload.pairs.load import load_pairs

_HOMES = {
    "load": "gpuload.load",
    "load_chats": "gpuload.chats.load",
    "load_pairs": "gpuload.pairs.load",
    "ChatDataset": "gpuload.chats.dataset",
    "PairDataset": "gpuload.pairs.dataset",
    "PromptDataset": "gpuload.dataset",
    "collate_fn": "gpuload.dataset",
    "PromptLoader": "gpuload.loader",
    "Options": "gpuload.options",
    "GpuloadError": "gpuload.errors",
}

__all__ = [
    "ChatDataset",
    "GpuloadError",
    "Options",
    "PairDataset",
    "PromptDataset",
    "PromptLoader",
    "collate_fn",
    "load",
    "load_chats",
    "load_pairs",
]


class _Package(ModuleType):
    """Keeps `gpuload.load` the function: importing the submodule of that name would replace it with the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "load" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpuload' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
