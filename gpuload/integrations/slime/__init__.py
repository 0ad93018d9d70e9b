"""Integration with slime: a data source whose prompts are prepared by columns, and a rollout function for SFT.

    --data-source-path gpuload.integrations.slime.DataSource

The names are imported on first access, because both need slime.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.integrations.slime.data_source import DataSource
    from gpuload.integrations.slime.sft import sft_rollout

_MODULES = {"DataSource": "data_source", "sft_rollout": "sft"}

__all__ = ["DataSource", "sft_rollout"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gpuload.integrations.slime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gpuload.integrations.slime.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
