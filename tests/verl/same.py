"""Create verl's and gpuload's dataset from the same files, and compare them."""

import os
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import verl
from conftest import user
from omegaconf import OmegaConf
from packaging.version import Version

try:
    from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
except ImportError:  # before verl 0.9
    from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler  # noqa: F401

VERL = Version(verl.__version__).release

NUMBERED = {
    "prompt": [user(f"question {i}") for i in range(60)],
    "extra_info": [{"index": i} for i in range(60)],
    "data_source": ["a"] * 60,
}
CUSTOM_CLS = {"path": "pkg://gpuload.integrations.verl", "name": "RLHFDataset"}

_cache = tempfile.TemporaryDirectory(prefix="gpuload-verl-")
datasets.config.HF_DATASETS_CACHE = Path(_cache.name)
# `datasets` caches results under a digest of the pickled tokenizer, which takes longer to compute than these results. A
# random digest is fast, and never finds the result of another test.
datasets.fingerprint.Hasher.update = lambda self, value: self.m.update(os.urandom(8))


def verl_dataset(files: Any, tokenizer: Any, processor: Any = None, **data: Any) -> Any:
    """Create verl's own dataset, as its trainer does."""
    return _create({}, files, tokenizer, processor, data)


def gpuload_dataset(files: Any, tokenizer: Any, processor: Any = None, **data: Any) -> Any:
    """Create gpuload's dataset, as the trainer does with `custom_cls`. The token cache is off unless `data` sets it."""
    settings = data.get("gpuload", {})
    data["gpuload"] = {"token_cache": False} | settings if isinstance(settings, dict) else settings
    return _create({"custom_cls": CUSTOM_CLS}, files, tokenizer, processor, data)


def _create(custom_cls: dict[str, Any], files: Any, tokenizer: Any, processor: Any, data: dict[str, Any]) -> Any:
    names = [str(file) for file in files] if isinstance(files, list) else str(files)
    config = {
        "filter_overlong_prompts": True,
        "filter_overlong_prompts_workers": None,
        "cache_dir": f"{_cache.name}/gpuload",
        **data,
        **custom_cls,
    }
    samples = config.pop("max_samples", -1)
    return create_rl_dataset(names, OmegaConf.create(config), tokenizer, processor, max_samples=samples)


def assert_same(found: Any, expected: Any, spread: int = 25) -> None:
    """Assert that two datasets have the same rows in the same order.

    Compares every column of all rows, and some rows key by key as they are returned by the datasets.

    Args:
        found: of gpuload's class.
        expected: of verl's class.
        spread: number of rows to compare key by key.
    """
    assert len(found) == len(expected)
    assert found.dataframe.column_names == expected.dataframe.column_names
    rows = [found.dataframe[number] for number in range(len(found))]
    for name, values in expected.dataframe[:].items():
        assert [row[name] for row in rows] == values, name
    numbers = sorted({round(i * (len(found) - 1) / max(1, spread - 1)) for i in range(spread)})
    for row, number in zip(found.__getitems__(numbers), numbers, strict=True):
        assert_same_row(row, expected[number], number)
    for number in (0, len(found) - 1):
        assert_same_row(found[number], expected[number], number)


def assert_same_row(found: dict[str, Any], expected: dict[str, Any], where: Any) -> None:
    """Assert that two rows have the same keys in the same order, with the same values, types and dtypes."""
    assert list(found) == list(expected), where
    for key, value in expected.items():
        assert type(found[key]) is type(value), (where, key)
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, (where, key)
            assert torch.equal(found[key], value), (where, key)
        else:
            assert found[key] == value, (where, key)
