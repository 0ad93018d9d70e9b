"""What integrations with trainers share."""

import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.core.errors import DataError, DeviceError, OptionError
from gpuload.integrations.core import (
    are_messages,
    check_switches,
    imported,
    log_fallback,
    log_ignored,
    release_of,
    runs,
    settings_under,
    unless_unsupported,
)

KNOWN = ("device", "verify")
LOGGER = logging.getLogger("gpuload.integrations.test")


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, {}), ({}, {}), ({"device": "cpu"}, {"device": "cpu"}), ({"verify": None}, {"verify": None})],
)
def test_settings(given: Mapping[str, Any] | None, expected: dict[str, Any]) -> None:
    assert settings_under("data.gpuload", given, KNOWN) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cuda", "data.gpuload='cuda': expected keys under it, such as data.gpuload.device=auto"),
        (True, "data.gpuload=True: expected keys"),
        ({"devise": "cpu"}, r"unknown key data.gpuload.devise: did you mean device\?"),
        ({"x": 1}, "unknown key data.gpuload.x; expected one of device, verify"),
        ({1: 1}, "unknown key data.gpuload.1; expected one of device, verify"),
    ],
)
def test_settings_that_are_rejected(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        settings_under("data.gpuload", given, KNOWN)


def test_switches() -> None:
    check_switches("data.gpuload", {"reuse_ids": True, "device": "cpu"}, ["reuse_ids"])
    with pytest.raises(OptionError, match="data.gpuload.reuse_ids='yes': expected true or false"):
        check_switches("data.gpuload", {"reuse_ids": "yes"}, ["reuse_ids"])


def test_what_is_imported() -> None:
    found, missing = imported({"json": ("dumps", "loads"), "json.decoder": ("JSONDecoder",)})
    assert (list(found), missing) == (["dumps", "loads", "JSONDecoder"], None)
    assert imported({"json": ("dumps", "load_all")})[1] == "json has no load_all"
    assert imported({"json": ("JSONDecoder.decode",)}) == ({"JSONDecoder.decode": json.JSONDecoder.decode}, None)
    assert imported({"json": ("JSONDecoder.read",)})[1] == "json has no JSONDecoder.read"
    _, missing = imported({"json": (), "json.moved": ("x",)})
    assert missing == "json.moved cannot be imported (No module named 'json.moved')"


def test_releases() -> None:
    assert release_of("numpy", "NumPy") == f"NumPy {np.__version__}"
    assert release_of("no-such-package", "slime") == "slime"


def test_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log_fallback(LOGGER, "verl's own dataset class", "there are images")
    log_ignored(LOGGER, {}, "rows are tokenized before training")
    log_ignored(LOGGER, {"num_proc": 4}, "rows are tokenized before training")
    log_ignored(LOGGER, {"a": 1, "b": "c"}, "rows are tokenized before training")
    assert [record.getMessage() for record in caplog.records] == [
        "gpuload: falls back to verl's own dataset class: there are images",
        "gpuload: num_proc=4 has no effect: rows are tokenized before training",
        "gpuload: a=1, b='c' have no effect: rows are tokenized before training",
    ]


def test_messages_with_text() -> None:
    assert are_messages(pa.list_(pa.struct([("content", pa.large_string()), ("role", pa.string())])))
    assert not are_messages(pa.list_(pa.struct([("content", pa.list_(pa.string())), ("role", pa.string())])))
    assert not are_messages(pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())])))
    assert not are_messages(pa.string())


def test_what_gpuload_cannot_do_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    def fail(error: Exception) -> None:
        raise error

    assert unless_unsupported(lambda: 3, LOGGER, "the trainer") == 3
    assert unless_unsupported(lambda: fail(DataError("there are images")), LOGGER, "the trainer") is None
    assert [record.getMessage() for record in caplog.records] == [
        "gpuload: falls back to the trainer: there are images"
    ]
    for error in (DeviceError("no GPU"), ValueError("a defect")):
        with pytest.raises(type(error)):
            unless_unsupported(lambda error=error: fail(error), LOGGER, "the trainer")  # type: ignore[misc]


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 12))
def test_runs(sizes: list[int], most: int) -> None:
    found = list(runs(sizes, np.array(sizes, np.int64), most))
    assert [size for run in found for size in run] == sizes
    assert all(run and sum(run[:-1]) < most for run in found)
