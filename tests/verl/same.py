"""Two data sets of the same files, verl's and gpuload's, and what it means that they are the same."""

import os
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import create_rl_dataset

OURS = {"path": "pkg://gpuload.integrations.verl", "name": "RLHFDataset"}

_cache = tempfile.TemporaryDirectory(prefix="gpuload-verl-")
datasets.config.HF_DATASETS_CACHE = Path(_cache.name)
# No result of an earlier load is found; and the name of a result would cost more than the result: it is a digest of the
# pickled tokenizer.
datasets.fingerprint.Hasher.update = lambda self, value: self.m.update(os.urandom(8))


def verls(files: Any, tokenizer: Any, processor: Any = None, **data: Any) -> Any:
    """verl's own data set, as its trainer makes it."""
    return _create({}, files, tokenizer, processor, data)


def ours(files: Any, tokenizer: Any, processor: Any = None, **data: Any) -> Any:
    """gpuload's, as the trainer makes it when it is switched on."""
    return _create({"custom_cls": OURS}, files, tokenizer, processor, data)


def _create(switch: dict[str, Any], files: Any, tokenizer: Any, processor: Any, data: dict[str, Any]) -> Any:
    names = [str(file) for file in files] if isinstance(files, list) else str(files)
    config = {"filter_overlong_prompts": True, "filter_overlong_prompts_workers": None, **data, **switch}
    samples = config.pop("max_samples", -1)
    return create_rl_dataset(names, OmegaConf.create(config), tokenizer, processor, max_samples=samples)


def assert_same(found: Any, expected: Any, spread: int = 25) -> None:
    """The same rows in the same order: every column of all of them, and some rows as they are drawn, key by key.

    Args:
        found: of gpuload's class.
        expected: of verl's.
        spread: how many rows are drawn.
    """
    assert len(found) == len(expected)
    assert found.dataframe.column_names == expected.dataframe.column_names
    rows = [found.dataframe[number] for number in range(len(found))]
    for name, values in expected.dataframe[:].items():
        assert [row[name] for row in rows] == values, name
    drawn = sorted({round(i * (len(found) - 1) / max(1, spread - 1)) for i in range(spread)})
    for row, number in zip(found.__getitems__(drawn), drawn, strict=True):
        assert_same_row(row, expected[number], number)
    for number in (0, len(found) - 1):
        assert_same_row(found[number], expected[number], number)


def assert_same_row(found: dict[str, Any], expected: dict[str, Any], where: Any) -> None:
    """Same keys in the same order, values, types and dtypes."""
    assert list(found) == list(expected), where
    for key, value in expected.items():
        assert type(found[key]) is type(value), (where, key)
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, (where, key)
            assert torch.equal(found[key], value), (where, key)
        else:
            assert found[key] == value, (where, key)
