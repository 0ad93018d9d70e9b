"""Integration with Ray: Ray Data datasets of tokenized rows, and a token cache that a cluster fills.

    from gpuload.integrations.ray import read_prompts

    prompts = read_prompts("s3://bucket/train/*.parquet", "Qwen/Qwen2.5-7B-Instruct")

The names are imported on first access.
"""

from typing import TYPE_CHECKING

from gpuload.core.lazy import lazy_names

if TYPE_CHECKING:
    from gpuload.integrations.ray.collate import collate_fn
    from gpuload.integrations.ray.dataset import read_chats, read_pairs, read_prompts, report
    from gpuload.integrations.ray.fill import prepare

__all__ = ["collate_fn", "prepare", "read_chats", "read_pairs", "read_prompts", "report"]

__getattr__, __dir__ = lazy_names(
    __name__, dict.fromkeys(__all__, ".dataset") | {"collate_fn": ".collate", "prepare": ".fill"}
)
