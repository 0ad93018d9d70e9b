"""The keys under `data.gpuload` in verl's configuration.

    +data.gpuload.device=cuda +data.gpuload.reuse_ids=true

All other data settings keep their place and name in verl's `data:` section.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuload.errors import OptionError
from gpuload.options import nearest, plain

_LOAD_OPTIONS = "device gpu_memory_limit verify progress token_cache token_cache_bytes".split()


@dataclass(frozen=True)
class Settings:
    """Settings of a gpuload dataset inside verl, in addition to verl's own keys.

    Attributes:
        device, gpu_memory_limit, verify, progress, token_cache, token_cache_bytes: options of `gpuload.load`. The
            token cache is stored in `data.cache_dir`.
        ray_gpu: load in a Ray task with a GPU if this process has none.
        reuse_ids: rows carry their prompt ids, for gpuload's agent loops.
        strict_resume: raise if a checkpoint was made with different data; False logs a warning instead.
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
        """Read the settings from verl's `data:` section.

        Args:
            config: the section, a dict or an OmegaConf mapping.

        Raises:
            OptionError: an unknown key (the message names the nearest known one) or an invalid value.
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
        """Return the settings that are options of `gpuload.load`, by name."""
        return {name: getattr(self, name) for name in _LOAD_OPTIONS}
