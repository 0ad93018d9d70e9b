"""Integration with slime: a data source whose prompts are prepared by columns, and a rollout function for SFT.

    --data-source-path gpuload.integrations.slime.DataSource

The names are imported on first access, because both need slime.
"""

from typing import TYPE_CHECKING

from gpuload.core.lazy import lazy_names

if TYPE_CHECKING:
    from gpuload.integrations.slime.data_source import DataSource
    from gpuload.integrations.slime.sft import sft_rollout

__all__ = ["DataSource", "sft_rollout"]

__getattr__, __dir__ = lazy_names(__name__, {"DataSource": ".data_source", "sft_rollout": ".sft"})
