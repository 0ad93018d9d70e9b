"""Integration with verl: datasets for `data.custom_cls`, and agent loops that reuse prompt ids.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=RLHFDataset

The classes are imported on first access, so that `SeedRLHFDataset` and `ServedSFTDataset` can be used without verl. The
others are verl's own classes if they cannot replace those of the installed verl: a line in the log says why.
"""

import importlib
import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from gpuload.core.lazy import lazy_names

if TYPE_CHECKING:
    from gpuload.integrations.verl.agent_loop import SingleTurnAgentLoop, ToolAgentLoop
    from gpuload.integrations.verl.rlhf import RLHFDataset
    from gpuload.integrations.verl.seed import SeedRLHFDataset
    from gpuload.integrations.verl.served import ServedSFTDataset
    from gpuload.integrations.verl.sft import SFTDataset

__all__ = ["RLHFDataset", "SFTDataset", "SeedRLHFDataset", "ServedSFTDataset", "SingleTurnAgentLoop", "ToolAgentLoop"]

_WITHOUT_VERL = ("SeedRLHFDataset", "ServedSFTDataset")
_own, __dir__ = lazy_names(
    __name__,
    {
        "RLHFDataset": ".rlhf",
        "SFTDataset": ".sft",
        "SeedRLHFDataset": ".seed",
        "ServedSFTDataset": ".served",
        "SingleTurnAgentLoop": ".agent_loop",
        "ToolAgentLoop": ".agent_loop",
    },
)


def __getattr__(name: str) -> Any:
    return _class_of(name) if name in __all__ and name not in _WITHOUT_VERL else _own(name)


@cache
def _class_of(name: str) -> Any:
    from gpuload.integrations.core import log_fallback, release_of
    from gpuload.integrations.verl.contract import HOMES, contract_problem

    module, stock = HOMES[name]
    kind = getattr(importlib.import_module(module), stock)
    problem = contract_problem(name, kind)
    if problem is None:
        return _own(name)
    log_fallback(logging.getLogger(__name__), f"verl's own {stock}", f"{release_of('verl', 'verl')}: {problem}")
    return kind
