"""Integration with verl 0.7.1 to 0.9.1: datasets for `data.custom_cls`, and agent loops that reuse prompt ids.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=RLHFDataset

The classes are imported on first access, so that `SeedRLHFDataset` can be used without verl. The others need one of
these versions of verl.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gpuload.integrations.verl.versions import check_verl_version

if TYPE_CHECKING:
    from gpuload.integrations.verl.agent_loop import SingleTurnAgentLoop, ToolAgentLoop
    from gpuload.integrations.verl.rlhf import RLHFDataset
    from gpuload.integrations.verl.seed import SeedRLHFDataset
    from gpuload.integrations.verl.sft import SFTDataset

_MODULES = {
    "RLHFDataset": "gpuload.integrations.verl.rlhf",
    "SFTDataset": "gpuload.integrations.verl.sft",
    "SingleTurnAgentLoop": "gpuload.integrations.verl.agent_loop",
    "ToolAgentLoop": "gpuload.integrations.verl.agent_loop",
}

__all__ = ["RLHFDataset", "SFTDataset", "SeedRLHFDataset", "SingleTurnAgentLoop", "ToolAgentLoop"]


def __getattr__(name: str) -> Any:
    if name == "SeedRLHFDataset":
        return importlib.import_module("gpuload.integrations.verl.seed").SeedRLHFDataset
    if name not in _MODULES:
        raise AttributeError(f"module 'gpuload.integrations.verl' has no attribute {name!r}")
    check_verl_version()
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
