"""Integration with torchtitan: packs of conversations or texts, tokenized once, by columns.

    from gpuload.integrations.torchtitan import DataLoader

    config.dataloader = DataLoader.Config(files=["train.parquet"])

The name is imported on first access, so that the rest can be imported without torchtitan.
"""

from typing import TYPE_CHECKING

from gpuload.core.lazy import lazy_names

if TYPE_CHECKING:
    from gpuload.integrations.torchtitan.loader import TorchtitanLoader as DataLoader

__all__ = ["DataLoader"]

__getattr__, __dir__ = lazy_names(__name__, {"DataLoader": ".loader:TorchtitanLoader"})
