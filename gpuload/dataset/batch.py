"""A batch: tensors, and Python objects that are made when they are first read."""

from typing import Any

import torch

from gpuload.core.lazy import LazyDict


class RowBatch(LazyDict):
    """A batch: a mapping like a dict, whose Python objects are made when they are first read."""

    def to(self, device: Any, non_blocking: bool = False) -> "RowBatch":
        """Return the same batch with its tensors on a device, as `tensor.to` puts them there.

        Examples:
            >>> import torch
            >>> RowBatch(input_ids=torch.ones(2, 3)).to("meta")["input_ids"].device
            device(type='meta')

        Args:
            device: Where to.
            non_blocking: As for `tensor.to`.
        """

        def moved(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value

        return RowBatch({name: moved(value) for name, value in self.data.items()})

    def _repr_html_(self) -> str:
        from gpuload.dataset.notebook import batch_html

        return batch_html(self.data, f"batch with {len(self)} keys")
