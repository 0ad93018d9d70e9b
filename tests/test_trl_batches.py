"""Batches made from flat ids equal those that TRL's own collators make of the same rows, key by key."""

from __future__ import annotations

import copy
import pickle
import re
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from torch.utils.data import DataLoader  # noqa: E402

from gpuload.integrations.trl import batches  # noqa: E402
from gpuload.integrations.trl.batches import FlatDPO, FlatKTO, FlatRM, FlatSFT  # noqa: E402
from gpuload.integrations.trl.rows import FlatDataset, FlatRows  # noqa: E402

ROWS = 40
KINDS = [FlatSFT, FlatDPO, FlatRM, FlatKTO]


def dataset_of(columns: dict[str, Any], chunk: int) -> Any:
    """A dataset with columns in chunks of some rows."""
    table = pa.table(columns)
    parts = [table.slice(k, chunk).combine_chunks() for k in range(0, len(table), chunk)]
    return datasets.Dataset(datasets.table.InMemoryTable(pa.concat_tables(parts)), fingerprint="rows")


def lists(rng: np.random.Generator, least: int = 1, kind: Any = None) -> pa.Array:
    rows = [rng.integers(0, 99, rng.integers(least, 9)).tolist() for _ in range(ROWS)]
    return pa.array(rows, kind or pa.list_(pa.int32()))


def data_for(kind: Any, seed: int, chunk: int, least: int) -> Any:
    """Rows as the trainer of a collator has them."""
    rng = np.random.default_rng(seed)
    other = {"source": [str(k) for k in range(ROWS)]}
    if kind is FlatSFT:
        ids = lists(rng, least, pa.large_list(pa.int64()) if seed % 3 == 0 else None)
        labels = [[-100 if k % 3 else k for k in row] for row in ids.to_pylist()]
        return dataset_of(other | {"input_ids": ids} | ({"labels": labels} if seed % 2 else {}), chunk)
    if kind is FlatKTO:
        made = {"prompt_ids": lists(rng), "completion_ids": lists(rng, least), "label": rng.random(ROWS) < 0.5}
        return dataset_of(made | ({"KL_completion_ids": lists(rng)} | other if seed % 2 else {}), chunk)
    made = {"chosen_ids": lists(rng, least), "rejected_ids": lists(rng)}
    if kind is FlatDPO:
        scores = {name: rng.random(ROWS) for name in ("ref_chosen_logps", "ref_rejected_logps")}
        return dataset_of(made | {"prompt_ids": lists(rng)} | (scores if seed % 2 else {}), chunk)
    return dataset_of(made | ({"margin": rng.random(ROWS)} if seed % 2 else {}), chunk)


def equal(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert type(found[name]) is type(values)
        if isinstance(values, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(values)), name


def compare(kind: Any, dataset: Any, keys: list[int], **options: Any) -> Any:
    """The batch, which is checked to be TRL's; None if TRL's method has to make it."""
    found = kind(pad_token_id=7, **options).flat(FlatDataset.of(dataset).__getitems__(keys))
    if found is not None:
        expected = kind.__bases__[1](pad_token_id=7, **options)(dataset.__getitems__(keys))
        # TRL before 1.16 has no bounds of sequences, and the collator leaves them out after the first batch.
        equal({name: value for name, value in found.items() if name in expected}, expected)
    return found


keys_of_a_batch = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=9)


@examples(60)
@given(
    kind=st.sampled_from(KINDS),
    keys=keys_of_a_batch,
    seed=st.integers(0, 5),
    chunk=st.sampled_from([1, 3, 17, ROWS]),
    multiple=st.sampled_from([None, 1, 4]),
    limit=st.sampled_from([None, 1, 5, 12]),
    switches=st.tuples(st.booleans(), st.booleans()),
)
def test_batches_are_those_of_trl(
    kind: Any, keys: list[int], seed: int, chunk: int, multiple: Any, limit: Any, switches: tuple[bool, bool]
) -> None:
    options: dict[str, Any] = {"pad_to_multiple_of": multiple}
    if kind is FlatSFT:
        options |= {"padding_free": switches[0], "return_position_ids": switches[1]}
    if kind in (FlatDPO, FlatKTO):
        options["max_length"] = limit
    if kind is FlatDPO:
        options["truncation_mode"] = "keep_end" if switches[0] else "keep_start"
    assert compare(kind, data_for(kind, seed, chunk, 1), keys, **options) is not None


@examples(40)
@given(
    keys=keys_of_a_batch,
    strategy=st.sampled_from(["bfd", "bfd_split", "wrapped"]),
    multiple=st.sampled_from([None, 8]),
    switches=st.tuples(st.booleans(), st.booleans()),
)
def test_batches_of_packs(keys: list[int], strategy: str, multiple: Any, switches: tuple[bool, bool]) -> None:
    packs = trl.pack_dataset(data_for(FlatSFT, 1, ROWS, 1).select_columns(["input_ids", "labels"]), 20, strategy)
    keys = [key % len(packs) for key in keys]
    options = {"padding_free": switches[0], "return_position_ids": switches[1], "pad_to_multiple_of": multiple}
    assert compare(FlatSFT, packs, keys, **options) is not None


@examples(30)
@given(kind=st.sampled_from(KINDS), keys=keys_of_a_batch, seed=st.integers(0, 5))
def test_rows_without_tokens(kind: Any, keys: list[int], seed: int) -> None:
    """TRL makes floats of an empty list in the first place: such batches fall back to it."""
    compare(kind, data_for(kind, seed, 7, 0), keys)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_and_the_columns_of_a_dataset(kind: Any) -> None:
    dataset = data_for(kind, 1, 3, 1)
    for changed in (
        dataset.shuffle(seed=3),
        dataset.select([5, 1, 7, 30]).shuffle(seed=1),
        dataset.select(range(10, 30)),
        datasets.concatenate_datasets([dataset.select(range(5)), dataset]),
    ):
        assert compare(kind, changed, [3, 0, 3]) is not None
    flat = FlatDataset.of(dataset)
    assert compare(kind, flat, [1, 2]) is not None  # its views exist now
    other = data_for(kind, 5, 5, 1)
    joined = datasets.concatenate_datasets([other, flat])
    assert compare(kind, joined, [1, 39, 41]) is not None
    for copied in (copy.deepcopy(flat), pickle.loads(pickle.dumps(flat))):
        assert isinstance(copied, FlatDataset)
        assert not copied.views
        assert compare(kind, copied, [0, 3]) is not None


def test_a_dataset_is_otherwise_that_of_the_package() -> None:
    dataset = data_for(FlatSFT, 1, 3, 1)
    flat = FlatDataset.of(dataset)
    assert isinstance(flat, datasets.Dataset)
    assert flat[3] == dataset[3]
    assert flat[1:4] == dataset[1:4]
    assert list(flat) == list(dataset)
    rows = flat.__getitems__([4, 2])
    assert (len(rows), rows[1], list(rows)) == (2, dataset[2], dataset.__getitems__([4, 2]))
    assert flat.with_format("numpy").__getitems__([0])[0]["input_ids"].dtype == np.int64
    flat.set_format(columns=["labels"])
    assert flat.__getitems__([1]) == [{"labels": dataset[1]["labels"]}]
    assert FlatDataset.of(flat) is flat
    assert FlatDataset.of(None) is None


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": [[1, 2], None]},
        {"input_ids": [[1, 2], [3, None]]},
        {"input_ids": [[1.0], [2.0]]},
        {"labels": [[1], [2]]},
        {"input_ids": [[1], [2]], "labels": [[1, 2], [3]]},
        {"input_ids": [[1, 2], [3]], "seq_lengths": [[1], [1]]},
        {"input_ids": [[1, 2], [3]], "seq_lengths": [[2, 0], [1]]},
    ],
)
def test_other_columns_are_left_to_trl(columns: Any) -> None:
    assert compare(FlatSFT, datasets.Dataset.from_dict(columns), [0, 1]) is None


def test_a_batch_that_differs_from_the_first_one_of_trl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = data_for(FlatSFT, 1, 3, 1)
    loader = DataLoader(FlatDataset.of(dataset), 8, collate_fn=FlatSFT(pad_token_id=7))
    stock = DataLoader(dataset, 8, collate_fn=FlatSFT.__bases__[1](pad_token_id=7))
    for found, expected in zip(loader, stock, strict=True):
        equal(found, expected)
    assert loader.collate_fn.trusted is True
    assert not caplog.records
    flat = FlatSFT.flat
    monkeypatch.setattr(FlatSFT, "flat", lambda self, rows: flat(self, rows) | {"input_ids": torch.zeros(1)})
    loader = DataLoader(FlatDataset.of(dataset), 8, collate_fn=FlatSFT(pad_token_id=7))
    for found, expected in zip(loader, stock, strict=True):
        equal(found, expected)
    assert [record.message for record in caplog.records] == [
        "gpuload: falls back to TRL's collator: the first batch differs from its batch"
    ]


def test_each_set_of_columns_is_compared_once() -> None:
    """Such as those of a dataset to evaluate that has margins, which the one for training has not."""
    for kind in (FlatRM, FlatDPO, FlatKTO):
        collator, stock = kind(pad_token_id=7), kind.__bases__[1](pad_token_id=7)
        for seed in (0, 1, 0, 1):
            dataset = data_for(kind, seed, 3, 1)
            for keys in ([1, 5], [3, 2, 9]):
                equal(collator(FlatDataset.of(dataset).__getitems__(keys)), stock(dataset.__getitems__(keys)))
        assert collator.trusted is True
        assert sorted(collator.counts.values()) == [2, 2]  # rows of the first batches, which TRL has made, too


def test_a_collator_that_is_not_known(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(batches, "KNOWN", {})
    dataset = data_for(FlatSFT, 1, 3, 1)
    assert len(dataset) > 8
    stock = DataLoader(dataset, 8, collate_fn=FlatSFT.__bases__[1](pad_token_id=7))
    collator = FlatSFT(pad_token_id=7)
    for _ in range(64 // len(dataset) + 2):
        for found, expected in zip(DataLoader(FlatDataset.of(dataset), 8, collate_fn=collator), stock, strict=True):
            equal(found, expected)
    (line,) = [record.message for record in caplog.records]
    change = f"TRL {version('trl')}: DataCollatorForLanguageModeling.torch_call has changed"
    assert re.fullmatch(f"gpuload: {re.escape(change)}; (6[4-9]|7.) rows prepared by both are equal: used", line)
    # A later batch differs.
    flat, calls = FlatSFT.flat, iter(range(9))
    second = {"input_ids": torch.zeros(1)}
    monkeypatch.setattr(FlatSFT, "flat", lambda self, rows: flat(self, rows) | (second if next(calls) else {}))
    loader = DataLoader(FlatDataset.of(dataset), 8, collate_fn=FlatSFT(pad_token_id=7))
    for found, expected in zip(loader, stock, strict=True):
        equal(found, expected)
    assert caplog.records[-1].message == f"gpuload: falls back to TRL's collator: {change}, and a batch differs"


def test_another_order_of_rows_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(batches, "ORDER_PROBLEM", "datasets has another way to select rows")
    dataset, collator = data_for(FlatSFT, 1, 3, 1), FlatSFT.__bases__[1](pad_token_id=7)
    trainer = SimpleNamespace(train_dataset=dataset, eval_dataset=None, data_collator=collator)
    batches.use_flat_batches(trainer)
    assert (trainer.train_dataset, trainer.data_collator) == (dataset, collator)
    assert [record.message for record in caplog.records] == [
        "gpuload: falls back to TRL's collator: datasets has another way to select rows"
    ]


def test_workers(tmp_path: Any) -> None:
    dataset = data_for(FlatDPO, 1, 3, 1)
    dataset.save_to_disk(tmp_path)  # a worker that is spawned opens the file
    stock = DataLoader(dataset, 8, collate_fn=FlatDPO.__bases__[1](pad_token_id=7))
    for stored, context in ((dataset, "fork"), (datasets.load_from_disk(tmp_path), "spawn")):
        flat = FlatDataset.of(stored)
        assert isinstance(flat.__getitems__([0]), FlatRows)
        loader = DataLoader(flat, 8, collate_fn=FlatDPO(pad_token_id=7), num_workers=1, multiprocessing_context=context)
        for found, expected in zip(loader, stock, strict=True):
            equal(found, expected)
