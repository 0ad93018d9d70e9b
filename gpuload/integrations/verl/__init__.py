"""gpuload inside verl: data sets for `data.custom_cls`, and agent loops that reuse the loader's ids.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=RLHFDataset

Names are looked up when they are first used: `SeedRLHFDataset` needs no verl.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.integrations.verl.rlhf import RLHFDataset
    from gpuload.integrations.verl.seed import SeedRLHFDataset
    from gpuload.integrations.verl.sft import SFTDataset

_HOMES = {
    "RLHFDataset": "gpuload.integrations.verl.rlhf",
    "SeedRLHFDataset": "gpuload.integrations.verl.seed",
    "SFTDataset": "gpuload.integrations.verl.sft",
}

__all__ = ["RLHFDataset", "SFTDataset", "SeedRLHFDataset"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpuload.integrations.verl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
