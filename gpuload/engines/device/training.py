"""The engine of a device for data to train on, of which some rows go through the stages of the host."""

from collections import Counter
from typing import Any

from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.render import DeviceText
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import Prompts


class DeviceTrainingEngine(DeviceEngine):
    """A `DeviceEngine` that says in the report which rows the host rendered and encoded."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._rows: Counter[type] = Counter()  # by the kind of their text

    def describe(self, compiled: bool = True) -> str:
        if self._rows[HostText] and not self._rows[DeviceText]:
            return f"{self.host.describe(compiled)}; batches on {self.device}"
        return super().describe(compiled)

    @property
    def counts(self) -> dict[str, int]:
        if not self._rows[HostText] or self.host.by_prompt:
            return super().counts
        what = "rows rendered and encoded on the host: kernels take columns of messages only"
        return {what: self._rows[HostText], **super().counts}

    def render(self, prompts: Prompts) -> HostText | DeviceText:
        return self._counted(super().render(prompts))

    def _counted(self, text: HostText | DeviceText) -> HostText | DeviceText:
        self._rows[DeviceText if isinstance(text, DeviceText) else HostText] += len(text)
        return text
