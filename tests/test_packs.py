"""Packed batches on the host and by the kernel, compared with transformers' flash-attention collator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from simulator.host_kernels import COMPILER
from simulator.strict_arrays import StrictKernels
from transformers import DataCollatorWithFlattening
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.marks import with_loss
from gpuload.dataset.pieces import tokens_of
from gpuload.engines.device import packs as device
from gpuload.engines.device.store import DeviceStore, Segments
from gpuload.engines.host import packs as host
from gpuload.packing import Plan, batch_rows, pack

COLLATOR = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 5, 16, 17, 40]), min_size=1, max_size=40).filter(any)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def rows_of(lengths: Any, seed: int = 0, dtype: Any = np.uint8) -> tuple[Ragged, Any]:
    """Rows of random ids, and a loss mask."""
    offsets = offsets_of(np.asarray(lengths, np.int64))
    chance = np.random.default_rng(seed)
    ids = chance.integers(0, 2**21, offsets[-1], np.int32)  # the bits above are those of `core.marks`
    return Ragged(ids, offsets), chance.integers(0, 2, offsets[-1]).astype(dtype)


def collated(ids: Ragged, mask: Any, plan: Any, packs: Any) -> dict[str, Any]:
    """What transformers makes of the same pieces."""
    features = []
    for pack_number in packs:
        for piece in range(plan.offsets[pack_number], plan.offsets[pack_number + 1]):
            low = int(ids.offsets[plan.rows[piece]] + plan.first[piece])
            place = slice(low, low + int(plan.lengths[piece]))
            labels = np.where(mask[place], ids.values[place], -100)
            features.append({"input_ids": ids.values[place].tolist(), "labels": labels.tolist()})
    return dict(COLLATOR(features))


def packed(ids: Ragged, mask: Any, plan: Plan, packs: Any) -> dict[str, Any]:
    """A batch that the host makes."""
    pieces = plan.take(packs)
    return host.packed(tokens_of(with_loss(ids, mask), pieces), pieces)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name


def on_device(kernels: StrictKernels, ids: Ragged, mask: Any) -> tuple[Any, DeviceStore]:
    """The launch for rows in several segments of device memory, and what the addresses point into."""
    segments, count, marked = Segments(kernels), len(ids), with_loss(ids, mask)
    parts = [segments.add(marked, rows) for rows in np.array_split(np.arange(count), 3)]
    stores = [part for part in parts if part is not None]
    store = DeviceStore(
        kernels, *(np.concatenate([getattr(part, name) for part in stores]) for name in ("address", "lengths")),
        stores[-1].segments,
    )  # fmt: skip
    return device.prepare_pack(kernels, store.index), store


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped", "trl"])
@given(lengths=LENGTHS, size=st.sampled_from([1, 7, 16, 100]), data=st.data())
def test_packed_batches_are_those_of_transformers(
    strategy: Any, dtype: Any, lengths: list[int], size: int, data: st.DataObject
) -> None:
    ids, mask = rows_of(lengths, len(lengths), dtype)
    plan = pack(lengths, size, strategy, shuffle=True)
    packs = data.draw(st.lists(st.integers(0, len(plan) - 1), min_size=1, max_size=6))
    assert_same(packed(ids, mask, plan, packs), collated(ids, mask, plan, packs))


def test_batches_by_token_budget_are_those_of_transformers() -> None:
    lengths = np.random.default_rng(0).integers(0, 50, 300)
    ids, mask = rows_of(lengths)
    plan = batch_rows(lengths, max_tokens=200, shuffle=True)
    for batch in range(len(plan)):
        assert_same(packed(ids, mask, plan, [batch]), collated(ids, mask, plan, [batch]))


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_batches_are_those_of_trl(strategy: Any) -> None:
    """TRL packs ids and labels, and its collator makes a batch of packs."""
    lengths = np.random.default_rng(2).integers(0, 400, 1500)
    ids, mask = rows_of(lengths)
    labels = Ragged(np.where(mask, ids.values, -100), ids.offsets)
    rows = Dataset.from_dict({"input_ids": ids.to_lists(), "labels": labels.to_lists()})
    theirs = pack_dataset(rows, 256, strategy)
    plan = pack(lengths, 256, "trl" if strategy == "bfd" else "trl_bfd_split")
    assert len(plan) == len(theirs)
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    for packs in ([0], [3, 1, 2], [*range(len(plan))]):
        expected = collate([theirs[number] for number in packs])
        ours = packed(ids, mask, plan, packs)
        assert_same(ours, {name: expected[name] for name in ours})


@needs_compiler
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_the_kernel_makes_the_same_batches(strategy: Any) -> None:
    kernels = StrictKernels()
    lengths = np.random.default_rng(1).choice([0, 1, 2, 31, 100, 257, 700], 400)
    ids, mask = rows_of(lengths)
    plan = pack(lengths, 300, strategy, shuffle=True)
    launch, memory = on_device(kernels, ids, mask)
    before = kernels.xp.waits
    for packs in (np.arange(1), np.arange(8), np.array([5, 3, 5]), np.arange(len(plan))):
        ours = device.packed(kernels, launch, plan.take(packs))
        assert_same(ours, packed(ids, mask, plan, packs))
        assert_same(ours, collated(ids, mask, plan, packs))
    assert kernels.xp.waits == before, "the host does not wait for the device"
    del memory


@needs_compiler
def test_no_packs_are_an_empty_batch() -> None:
    ids, mask = rows_of([3, 2])
    plan = pack(ids.lengths, 4)
    kernels = StrictKernels()
    launch, memory = on_device(kernels, ids, mask)
    empty = packed(ids, mask, plan, [])
    assert_same(device.packed(kernels, launch, plan.take([])), empty)
    assert empty["input_ids"].shape == empty["seq_idx"].shape == (1, 0)
    assert empty["cu_seq_lens_q"].tolist() == [0]
    assert empty["max_length_q"] == 0
    del memory
