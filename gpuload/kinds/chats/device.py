"""The stages of a load for SFT on a device.

Conversations are rendered, encoded and marked by kernels. Everything else (texts, prompts with completions, rows with
tools of their own) goes through the stages of the host, and its ids are copied over. All batches are made on the
device.
"""

from gpuload.core.marks import LOSS
from gpuload.engines.device.render import DeviceText
from gpuload.engines.device.training import DeviceTrainingEngine
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import Tokenized
from gpuload.kinds.chats.engine import ChatEngine


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
