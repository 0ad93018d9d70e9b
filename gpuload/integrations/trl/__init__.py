"""Integration with TRL: its trainers, with datasets prepared by columns, and prompts for GRPO.

    from gpuload.integrations.trl import SFTTrainer  # instead of: from trl import SFTTrainer

The names are imported on first access, so that `prompts` can be used without TRL.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.integrations.trl.grpo import prompts
    from gpuload.integrations.trl.trainers import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

__all__ = ["DPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer", "prompts"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gpuload.integrations.trl' has no attribute {name!r}")
    home = importlib.import_module(f"gpuload.integrations.trl.{'grpo' if name == 'prompts' else 'trainers'}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
