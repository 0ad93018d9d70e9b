"""The stages of a load for SFT on a device.

Conversations are rendered, encoded and marked by kernels. Everything else (texts, prompts with completions, rows with
tools of their own) goes through the stages of the host, and its ids are copied over. All batches are made on the
device.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from gpuload.core.arrays import Ragged
from gpuload.core.marks import LOSS, with_loss
from gpuload.core.options import Truncation
from gpuload.engines.device.batches import DeviceBatches, copied
from gpuload.engines.device.packs import packed, prepare_pack
from gpuload.engines.device.render import DeviceText
from gpuload.engines.device.store import DeviceStore
from gpuload.engines.device.training import DeviceTrainingEngine
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import Tokenized
from gpuload.kinds.chats.batches import HostChatBatches, Parts
from gpuload.kinds.chats.engine import ChatEngine
from gpuload.packing import Plan


class DeviceChatEngine(DeviceTrainingEngine):
    """The `Engine` of a load for SFT on a device. For the arguments see `DeviceEngine`."""

    host_engine = ChatEngine

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
    """The `ChatBatches` of a device. For the arguments see `DeviceBatches`; ids have the bits of `core.marks`."""

    _host = HostChatBatches
    _labelled = True

    @cached_property
    def _pack(self) -> Callable[..., None]:
        return prepare_pack(self._kernels, self._index)

    def packed(self, plan: Plan, packs: Any, parts: Parts) -> dict[str, Any]:
        if self._elsewhere:
            return self._host.packed(plan, packs, parts)
        with self._kernels.current():
            if self._on_disk:
                with copied(self._kernels, with_loss(*parts())) as index:
                    return packed(self._kernels, prepare_pack(self._kernels, index), plan, packs)
            return packed(self._kernels, self._pack, plan, packs)
