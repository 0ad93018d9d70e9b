"""The keys under `data.gpuload` in verl's configuration.

    +data.gpuload.device=cuda +data.gpuload.reuse_ids=true

All other data settings keep their place and name in verl's `data:` section.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from gpuload.integrations.core import LOAD_OPTIONS, check_switches, settings_under


@dataclass(frozen=True)
class Settings:
    """Settings of a gpuload dataset inside verl, in addition to verl's own keys.

    Attributes:
        device, gpu_memory_limit, verify, progress, token_cache, token_cache_bytes: options of `gpuload.load`. The
            token cache is stored in `data.cache_dir`; for SFT without it, in gpuload's own directory.
        store: as for `gpuload.load`. Rows that a Ray task loads are always in memory.
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
    store: str = "auto"
    ray_gpu: bool = False
    reuse_ids: bool = False
    strict_resume: bool = True

    @staticmethod
    def parse(config: Any) -> "Settings":
        """Read the settings from verl's `data:` section, a dict or an OmegaConf mapping.

        Raises:
            OptionError: an unknown key (the message names the nearest known one) or an invalid value.
        """
        known = [field.name for field in dataclasses.fields(Settings)]
        settings = Settings(**settings_under("data.gpuload", config.get("gpuload"), known))
        check_switches("data.gpuload", vars(settings), ("ray_gpu", "reuse_ids", "strict_resume"))
        return settings

    def options(self) -> dict[str, Any]:
        """Return the settings that are options of `gpuload.load`, by name."""
        return {name: getattr(self, name) for name in (*LOAD_OPTIONS, "store")}
