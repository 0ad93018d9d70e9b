"""Integration with TRL: its trainers, with datasets prepared by columns, and prompts for GRPO.

    from gpuload.integrations.trl import SFTTrainer  # instead of: from trl import SFTTrainer

The names are imported on first access, so that `prompts` can be used without TRL.
"""

from typing import TYPE_CHECKING

from gpuload.core.lazy import lazy_names

if TYPE_CHECKING:
    from gpuload.integrations.trl.grpo import prompts
    from gpuload.integrations.trl.image_batches import ready
    from gpuload.integrations.trl.images import fitting
    from gpuload.integrations.trl.trainers import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

__all__ = ["DPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer", "fitting", "prompts", "ready"]

__getattr__, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(__all__, ".trainers") | {"prompts": ".grpo", "fitting": ".images", "ready": ".image_batches"},
)
