"""The stages of a load for SFT on a device.

Conversations are rendered, encoded and marked by kernels. Everything else (texts, prompts with completions, rows with
tools of their own) goes through the stages of the host, and its ids are copied over. All batches are made on the
device.
"""

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gpuload.arrays import Ragged
from gpuload.chats.batches import HostChatBatches, Parts
from gpuload.chats.engine import ChatEngine
from gpuload.engines.choose import choose_device
from gpuload.engines.device.batches import DeviceBatches, pad_labelled, prepare_pad
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.packs import packed, prepare_pack
from gpuload.engines.device.render import DeviceText
from gpuload.engines.device.store import DeviceStore
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import Engine, Prompts, Tokenized
from gpuload.loss import LOSS
from gpuload.options import Options, Truncation
from gpuload.packing import Plan


def chat_engine(options: Options, reference: Any, exact_only: bool = False) -> Engine:
    """The engine of a load for SFT that `options.device` names.

    Args:
        reference: a `ChatReference`.

    Raises:
        DeviceError: a GPU is asked for and not available.
    """
    device, notes = choose_device(options.device)
    if device == "cpu":
        return ChatEngine(reference, exact_only, notes)
    from gpuload.engines.device import cuda

    limit, tokens_on = options.gpu_memory_limit, options.tokens_on
    return cuda.cuda_engine(reference, device, limit, tokens_on, exact_only, DeviceChatEngine)


class DeviceChatEngine(DeviceEngine):
    """The `Engine` of a load for SFT on a device. For the arguments see `DeviceEngine`."""

    host_engine = ChatEngine

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._rows: Counter[type] = Counter()  # by the kind of their text

    @property
    def description(self) -> str:
        if self._rows[HostText] and not self._rows[DeviceText]:
            return f"{self.host.description}; batches on {self.device}"
        return super().description

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._rows[HostText] or self.host.by_prompt:
            return super().notes
        rows = f"{self._rows[HostText]:,} rows rendered and encoded on the host: kernels take columns of messages only"
        return (rows, *super().notes)

    def render(self, prompts: Prompts) -> HostText | DeviceText:
        text = super().render(prompts)
        self._rows[DeviceText if isinstance(text, DeviceText) else HostText] += len(text)
        return text

    def encode(self, text: HostText | DeviceText) -> Tokenized:
        made = super().encode(text)
        if isinstance(text, DeviceText) and text.answers is None:
            with self._kernels.current():
                values = made.ids.values
                values |= LOSS  # the loss is on all tokens
        return made

    def batches(self, store: Ragged | DeviceStore, limit: int, side: Truncation, pad_id: int) -> "DeviceChatBatches":
        return DeviceChatBatches(self._kernels, store, limit, side, pad_id)


class DeviceChatBatches(DeviceBatches):
    """The `ChatBatches` of a device. For the arguments see `DeviceBatches`; ids have the bits of `gpuload.loss`."""

    @cached_property
    def _labelled(self) -> Callable[..., None]:
        return prepare_pad(self._kernels, self._index, self._limit, self._side, self._pad_id, labelled=True)

    @cached_property
    def _pack(self) -> Callable[..., None]:
        return prepare_pack(self._kernels, self._index)

    def __call__(
        self, numbers: np.ndarray[Any, Any], rows: Callable[[], Ragged], width: int
    ) -> dict[str, torch.Tensor]:
        if self._elsewhere:
            return HostChatBatches(self._pad_id)(numbers, rows, width)
        with self._kernels.current():
            return pad_labelled(self._kernels, self._labelled, self._kernels.xp.asarray(numbers), width)

    def packed(self, plan: Plan, packs: Any, parts: Parts) -> dict[str, Any]:
        if self._elsewhere:
            return HostChatBatches.packed(plan, packs, parts)
        with self._kernels.current():
            return packed(self._kernels, self._pack, plan, packs)

    def __reduce__(self) -> tuple[type[HostChatBatches], tuple[int]]:
        return HostChatBatches, (self._pad_id,)
