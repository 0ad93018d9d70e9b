"""Arrow arrays without pandas: the same as pyarrow makes, and no load imports it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.core.arrow import as_arrow, as_numpy, as_scalar, fill_null
from gpuload.demo_data import demo_files
from gpuload.sources.types import json_type

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string())]))
TEXTS = st.text(max_size=4) | st.none()
MESSAGE = st.fixed_dictionaries({"role": TEXTS}, optional={"content": TEXTS, "more": TEXTS}) | st.none()
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.string(): TEXTS,
    pa.large_string(): TEXTS,
    pa.large_binary(): st.binary(max_size=4) | st.none(),
    pa.bool_(): st.booleans() | st.none(),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1) | st.none(),
    pa.float64(): st.floats() | st.none(),
    pa.int8(): st.integers(-128, 127) | st.none(),
    pa.list_(pa.int64()): st.lists(st.integers(-9, 9) | st.none(), max_size=3) | st.none(),
    pa.large_list(pa.list_(pa.string())): st.lists(st.lists(TEXTS, max_size=2) | st.none(), max_size=3) | st.none(),
    MESSAGES: st.lists(MESSAGE, max_size=3) | st.none(),
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
@given(data=st.data())
def test_python_objects(kind: pa.DataType, data: st.DataObject) -> None:
    values = data.draw(st.lists(VALUES[kind], max_size=12))
    found = as_arrow(values, kind)
    found.validate(full=True)
    assert found.type == kind
    assert repr(found.to_pylist()) == repr(pa.array(values, kind).to_pylist())
    for value in values[:1]:
        assert repr(as_scalar(value, kind)) == repr(pa.scalar(value, kind))


def test_zero_keeps_its_sign() -> None:
    kind = pa.list_(pa.struct([("x", pa.float64())]))
    assert repr(as_arrow([[{"x": -0.0}, None], None], kind).to_pylist()) == "[[{'x': -0.0}, None], None]"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, "a"], pa.large_string()),
        (["\ud800"], pa.large_string()),
        ([1 << 63], pa.int64()),
        ([{"role": 1}], pa.struct([("role", pa.string())])),
        ([["a"], [{}]], pa.list_(pa.string())),
    ],
)
def test_values_of_another_type(values: list[Any], kind: pa.DataType) -> None:
    """pyarrow's own errors."""
    with pytest.raises((pa.ArrowException, TypeError, ValueError, OverflowError)) as expected:
        pa.array(values, kind)
    with pytest.raises(type(expected.value)) as found:
        as_arrow(values, kind)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("kind", ["?", "i1", "u2", "i4", "i8", "u8", "f4", "f8"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 70])
def test_numpy_arrays(kind: str, count: int) -> None:
    values = np.random.default_rng(count).integers(0, 2, 2 * count).astype(kind)[::2]
    array = as_arrow(values)
    array.validate(full=True)
    assert array.equals(pa.array(values))
    for part in (array, array[3:], array[2:-3], pa.chunked_array([array[:2], array[2:]])):
        found = as_numpy(part)
        assert found.dtype == values.dtype
        assert found.tolist() == part.to_pylist()
    if kind != "?":
        assert as_arrow(values, pa.int64()).equals(pa.array(values, pa.int64()))


def test_nulls() -> None:
    some = as_arrow([None, "a"], pa.large_string())
    assert fill_null(some, "b").to_pylist() == ["b", "a"]
    assert fill_null(some[1:], "b").to_pylist() == ["a"]
    assert fill_null(as_arrow([True, None], pa.bool_()), False).to_pylist() == [True, False]
    assert fill_null(as_arrow(np.arange(2, dtype=np.int32)), -1).type == pa.int32()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.just(0.5) | st.sampled_from(["", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@given(st.lists(JSON, max_size=3))
def test_types_of_json(values: list[Any]) -> None:
    """As pyarrow infers them; values without a type are those that its types change."""
    kind = json_type(values)
    if kind is not None:
        assert kind == pa.array(values).type
        return
    try:
        changed = json.dumps(pa.array(values).to_pylist())
    except (pa.ArrowException, TypeError):
        return
    assert changed != json.dumps(values)


PROBE = """
import sys
import gpuload

prompts, rows, chats, pairs, cache, tokenizer = sys.argv[1:]
loads = [(gpuload.load, prompts), (gpuload.load, rows), (gpuload.load_chats, chats), (gpuload.load_pairs, pairs)]
for load, file in loads:
    for cached in (False, True):
        loaded = load(file, tokenizer, cache_dir=cache)
        assert bool(loaded.report.from_cache) == cached, loaded.report
        loaded.batch([0, 1])["index" if load is gpuload.load else "input_ids"]
        loaded[3]
        next(iter(loaded.loader(4, shuffle=True, seed=0)))
        assert "pandas" not in sys.modules, (file, cached)
import pandas
"""


def test_no_load_imports_pandas(tmp_path: Path) -> None:
    file, tokenizer = demo_files()
    table = pq.read_table(file).slice(0, 60)
    pq.write_table(table, tmp_path / "prompts.parquet")
    rows = table.to_pylist()
    answers = [{"role": "assistant", "content": row["reward_model"]["ground_truth"]} for row in rows]
    made = {
        "rows": rows,
        "chats": [{"messages": [*row["prompt"], answer]} for row, answer in zip(rows, answers, strict=True)],
        "pairs": [
            {"prompt": row["prompt"], "chosen": [answer], "rejected": [{**answer, "content": "none"}]}
            for row, answer in zip(rows, answers, strict=True)
        ],
    }
    files = [tmp_path / "prompts.parquet"]
    for name, some in made.items():
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in some))
    arguments = [*map(str, files), str(tmp_path / "cache"), tokenizer]
    subprocess.run([sys.executable, "-c", PROBE, *arguments], check=True)
