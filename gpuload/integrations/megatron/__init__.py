"""Integration with Megatron-LM: a dataset of rows or packs that `gpuload prepare --export ... --for megatron` wrote.

    from gpuload.integrations.megatron import PreparedDataset  # in the provider, instead of SFTDataset

The name is imported on first access, so that the rest can be imported without Megatron-core.
"""

from typing import TYPE_CHECKING

from gpuload.core.lazy import lazy_names

if TYPE_CHECKING:
    from gpuload.integrations.megatron.dataset import MegatronPreparedDataset as PreparedDataset

__all__ = ["PreparedDataset"]

__getattr__, __dir__ = lazy_names(__name__, {"PreparedDataset": ".dataset:MegatronPreparedDataset"})
