"""The cache of tokenizer tables: whatever has become of a file, the tables are those that were built."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuload.tokenizer import tables

ARRAYS: dict[str, Any] = {
    "ids": np.arange(912, dtype=np.int32),
    "words": np.arange(40, dtype=np.uint64).reshape(10, 4),
    "none": np.zeros(0, np.uint8),
    "reason": np.array("it is é"),
}


class Built:
    """Counts how often the tables are built."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> dict[str, Any]:
        self.times += 1
        return dict(ARRAYS)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path))
    built = Built()
    check(built, 1)
    check(built, 1)
    (found,) = (tmp_path / "tables").iterdir()
    return found


def check(built: Built, times: int | None = None, at: int | None = None) -> None:
    found = tables.cached("test", "content", built)
    assert found.keys() == ARRAYS.keys(), at
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype, (name, at)
        assert np.array_equal(found[name], array), (name, at)
    assert times in (built.times, None)


def test_tables_with_a_flipped_bit(file: Path) -> None:
    """Some bits decide nothing, such as those of times; for the others, the tables are built again."""
    good, built = file.read_bytes(), Built()
    chosen = random.Random(0)
    arrays, end = range(0, len(good), 29), range(good.index(b"PK\x01\x02"), len(good), 3)
    for at in [*arrays, *end]:
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << chosen.randrange(8)]) + good[at + 1 :])
        check(built, at=at)
    assert built.times > (len(arrays) + len(end)) / 2


def test_tables_with_an_array_that_claims_to_be_shorter(file: Path) -> None:
    """As many bytes as the shape asks for are what they were."""
    good = file.read_bytes()
    assert b"'shape': (912,)" in good
    file.write_bytes(good.replace(b"'shape': (912,)", b"'shape': (112,)"))
    check(Built(), 1)


@pytest.mark.parametrize("size", [0, 1, 21, 22, 100, 1000, 4000])
def test_tables_cut_off(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    built = Built()
    check(built, 1)
    check(built, 1)  # the file is replaced


@pytest.mark.parametrize("content", [b"\x93NUMPY", b"PK\x05\x06" + bytes(18), b"\x80\x04K\x01.", b"\x00" * 5000])
def test_tables_of_another_kind(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    check(Built(), 1)
    np.save(file.with_suffix(".npy"), ARRAYS["ids"])
    file.with_suffix(".npy").rename(file)
    check(Built(), 1)


def test_tables_in_a_directory_of_the_same_name(file: Path) -> None:
    file.unlink()
    os.mkdir(file)
    check(Built(), 1)
