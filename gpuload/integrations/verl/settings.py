"""The keys of `data.gpuload`, checked once.

    +data.gpuload.device=cuda +data.gpuload.reuse_ids=true

Everything else that concerns data keeps its place and name in verl's own `data:` section.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuload.errors import OptionError
from gpuload.options import nearest, plain


@dataclass(frozen=True)
class Settings:
    """What a data set inside verl takes besides verl's own keys.

    Attributes:
        device, gpu_memory_limit, verify, progress, token_cache, token_cache_bytes: as `gpuload.load` takes them; the
            cache is in `data.cache_dir`.
        ray_gpu: where this process sees no GPU, load in a Ray task that has one.
        reuse_ids: rows carry their prompts' ids, for gpuload's agent loop.
        strict_resume: a checkpoint of other data is rejected; else it is resumed with a warning.
    """

    device: str = "auto"
    gpu_memory_limit: int = 0
    verify: str = "sample"
    progress: bool | None = None
    token_cache: bool = True
    token_cache_bytes: int = 0
    ray_gpu: bool = False
    reuse_ids: bool = False
    strict_resume: bool = True

    @staticmethod
    def parse(config: Any) -> "Settings":
        """From verl's `data:` section.

        Raises:
            OptionError: an unknown key, naming the nearest one there is, or a value that makes no sense.
        """
        given = plain(config.get("gpuload") or {})
        if not isinstance(given, Mapping):
            raise OptionError(f"data.gpuload={given!r}: expected keys under it, such as data.gpuload.device=auto")
        known = {field.name for field in dataclasses.fields(Settings)}
        for name in given:
            if name not in known:
                raise OptionError(f"unknown key data.gpuload.{name}{nearest(str(name), known)}")
        settings = Settings(**given)
        for name in ("ray_gpu", "reuse_ids", "strict_resume"):
            if not isinstance(getattr(settings, name), bool):
                raise OptionError(f"data.gpuload.{name}={getattr(settings, name)!r}: expected true or false")
        return settings

    def options(self) -> dict[str, Any]:
        """Those that `gpuload.load` takes."""
        names = "device gpu_memory_limit verify progress token_cache token_cache_bytes".split()
        return {name: getattr(self, name) for name in names}
