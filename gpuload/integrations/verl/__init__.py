"""Integration with verl 0.9.1: datasets for `data.custom_cls`, and agent loops that reuse the prompt ids of the loader.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=RLHFDataset

The classes are imported on first access, so that `SeedRLHFDataset` can be used without verl.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.integrations.verl.rlhf import RLHFDataset
    from gpuload.integrations.verl.seed import SeedRLHFDataset
    from gpuload.integrations.verl.sft import SFTDataset

_MODULES = {
    "RLHFDataset": "gpuload.integrations.verl.rlhf",
    "SeedRLHFDataset": "gpuload.integrations.verl.seed",
    "SFTDataset": "gpuload.integrations.verl.sft",
}

__all__ = ["RLHFDataset", "SFTDataset", "SeedRLHFDataset"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gpuload.integrations.verl' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
