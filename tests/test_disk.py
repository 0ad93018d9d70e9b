"""A store on disk: everything is as in memory, also in other processes and for the next load."""

import errno
import gc
import multiprocessing
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cache_cases import TEMPLATE, same
from conftest import user
from tiers import core
from torch.utils.data import DataLoader

import gpuload
from gpuload.cache import column_file
from gpuload.cache import known_files as known
from gpuload.cache.column_file import ColumnFile, ColumnWriter, columns_of
from gpuload.cache.entry import EntryWriter, read_entry
from gpuload.cli.main import main
from gpuload.core.errors import DataError, OptionError, SourceError, StoreError
from gpuload.core.files import PartialDirectory
from gpuload.core.memory import free_memory
from gpuload.pipeline import keep_on_disk as disk
from gpuload.pipeline import room
from gpuload.sources import batches


@pytest.fixture
def store(warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stores; files have several parts."""
    monkeypatch.setattr(column_file, "PART_BYTES", 4096)
    return warm_cache.parent / "store"


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_prompt_length": 30},
    {"max_prompt_length": 9, "filter_overlong_prompts": False, "truncation": "middle"},
    {"return_raw_chat": True},
    {"return_full_prompt": True},
    {"max_samples": 300},
    {"max_samples": 250, "shuffle": True, "seed": 3},
    {"token_cache": False},
]


@pytest.mark.parametrize("options", core(OPTIONS, *OPTIONS[::3]), ids=str)
def test_equal_to_memory(options: dict[str, Any], files: list[str], qwen: Any, store: Path) -> None:
    expected = gpuload.load(files, qwen, chat_template=TEMPLATE, **{**options, "token_cache": False, "store": "memory"})
    found = gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk", **options)
    assert f"ids and columns are on disk, in {store}" in str(found.report)
    same(found, expected)
    rows = np.random.default_rng(0).integers(-len(found), len(found), 50)
    for key, values in expected.batch(rows).items():
        assert found.batch(rows)[key].tolist() == values.tolist()
    if "return_raw_chat" not in options:  # files have other types in this column
        assert found.columns == expected.columns
    found = gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk", **options)
    same(found, expected)


@pytest.mark.parametrize("options", core(OPTIONS[:-1], *OPTIONS[:-1:4]), ids=str)
def test_the_next_load_uses_the_files(
    options: dict[str, Any], files: list[str], qwen: Any, store: Path, made: list[int]
) -> None:
    raw = {name: options[name] for name in ("return_raw_chat", "return_full_prompt") if name in options}
    gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk", **raw)
    there, count = sorted(store.glob("*")), len(made)
    # Of entries it is not known how single rows were rendered: the report of a sample is that of another warm load.
    cached = {"token_cache": "max_samples" in options}
    expected = gpuload.load(files, qwen, chat_template=TEMPLATE, store="memory", **options, **cached)
    before = len(made)
    found = gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk", **options)
    same(found, expected, checked=False)
    if not raw.get("return_full_prompt"):  # entries have no texts
        assert len(made) == before
        assert cached["token_cache"] == (before == count)
        assert sorted(store.glob("*")) == there
        assert len(there) == 6
    same(gpuload.load(files, qwen, chat_template=TEMPLATE, store="memory", **options), expected, checked=False)


def test_ids_of_an_earlier_load(files: list[str], qwen: Any, store: Path, made: list[int]) -> None:
    """Entries that were made for memory are used in place, and no cache evicts them any more."""
    expected = gpuload.load(files, qwen, chat_template=TEMPLATE, store="memory")
    count = len(made)
    same(gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk"), expected)
    same(gpuload.load(files, qwen, chat_template=TEMPLATE, store="memory"), expected)
    assert len(made) == count
    assert not list((store.parent / "tokens").glob("*.arrow"))
    assert len(list(store.glob("*.arrow"))) == 3


@pytest.mark.parametrize("found", ["ids", "columns"])
def test_a_sample_of_which_files_have_one_half(found: str, files: list[str], qwen: Any, store: Path) -> None:
    """Files that were found have all rows of their source, and those that are written have the sample."""
    gpuload.load(files, qwen, chat_template=TEMPLATE, store="memory" if found == "ids" else "disk")
    if found == "columns":
        for file in store.glob("*.arrow"):
            file.unlink()
    sample: dict[str, Any] = {"max_samples": 250, "shuffle": True, "seed": 3}
    expected = gpuload.load(files, qwen, chat_template=TEMPLATE, store="memory", **sample, token_cache=found == "ids")
    made = gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk", **sample)
    same(made, expected, checked=False)


def test_another_tokenizer_uses_the_columns(files: list[str], qwen: Any, store: Path) -> None:
    gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk")
    columns = {path: path.stat().st_mtime_ns for path in store.glob("*.columns")}
    other = TEMPLATE + "!"
    found = gpuload.load(files, qwen, chat_template=other, store="disk")
    same(found, gpuload.load(files, qwen, chat_template=other, store="memory", token_cache=False))
    assert set(store.glob("*.columns")) == set(columns)
    assert len(list(store.glob("*.arrow"))) == 6


def test_a_file_that_is_given_twice(files: list[str], qwen: Any, store: Path) -> None:
    twice = [files[0], files[1], files[0]]
    expected = gpuload.load(twice, qwen, chat_template=TEMPLATE, token_cache=False)
    for _ in range(2):
        same(gpuload.load(twice, qwen, chat_template=TEMPLATE, store="disk"), expected)


def test_frames_and_parts_of_files_are_removed_with_the_dataset(files: list[str], qwen: Any, store: Path) -> None:
    table = pq.read_table(files[0])
    for data, options in ((table, {}), (files, {"max_samples": 20})):
        found = gpuload.load(data, qwen, chat_template=TEMPLATE, store="disk", **options)
        kept = list(store.glob("*.partial"))
        assert len(kept) == 1
        again = pickle.loads(pickle.dumps(found))
        assert again.tokens.to_lists() == found.tokens.to_lists()
        assert again[3]["raw_prompt_ids"] == found[3]["raw_prompt_ids"]
        del again
        gc.collect()
        assert list(store.glob("*.partial")) == kept
        del found
        gc.collect()
        assert not list(store.glob("*.partial"))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_map_the_files(context: str, files: list[str], qwen: Any, store: Path) -> None:
    found = gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk")
    assert len(pickle.dumps(found)) < len(pickle.dumps(gpuload.load(files, qwen, chat_template=TEMPLATE)))
    loader = DataLoader(
        found,
        batch_size=64,
        collate_fn=gpuload.collate_fn,
        num_workers=2,
        multiprocessing_context=multiprocessing.get_context(context),
    )
    ids = [row for batch in loader for row in batch["raw_prompt_ids"]]
    assert ids == found.tokens.to_lists()


def test_workers_that_do_not_find_a_store_say_which(files: list[str], qwen: Any, store: Path) -> None:
    """An error of unpickling would only be known to the worker, which it would end."""
    found = gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk")
    for file in store.glob("*.columns"):
        file.unlink()
    spawn = multiprocessing.get_context("spawn")
    loader = DataLoader(found, batch_size=64, collate_fn=list, num_workers=1, multiprocessing_context=spawn)
    with pytest.raises(StoreError, match=f"{store}/.*columns: the file was removed or replaced"):
        next(iter(loader))


def test_resume_from_memory(files: list[str], qwen: Any, store: Path) -> None:
    in_memory, on_disk = (
        gpuload.load(files, qwen, chat_template=TEMPLATE, store=where).loader(16, shuffle=True, seed=2)
        for where in ("memory", "disk")
    )
    batches = iter(in_memory)
    next(batches)
    on_disk.load_state_dict(in_memory.state_dict())
    assert next(iter(on_disk))["raw_prompt_ids"].tolist() == next(batches)["raw_prompt_ids"].tolist()


def test_types_of_columns(write: Callable[..., str], qwen: Any, store: Path) -> None:
    """Dictionaries differ from part to part; nested and empty values, and columns of nulls."""
    n = 200
    labels = pa.chunked_array(
        [pa.array([f"{part} {row % 3}" for row in range(n // 4)]).dictionary_encode() for part in range(4)]
    )
    columns = {
        "prompt": pa.array([user(f"row {row}") for row in range(n)]),
        "label": labels,
        "nothing": pa.nulls(n),
        "nested": pa.array([[{"a": [row] * (row % 3), "b": None}] * (row % 2) for row in range(n)]),
        "text": pa.array([None if row % 7 == 0 else "x" * row for row in range(n)], pa.large_string()),
    }
    path = write(columns)
    for data in (path, pq.read_table(path)):
        expected = gpuload.load(data, qwen, token_cache=False)
        for _ in range(2):
            found = gpuload.load(data, qwen, store="disk")
            same(found, expected)
            assert found.column_types == expected.column_types


def test_invalid_text_is_found_again(tmp_path: Path, qwen: Any, store: Path) -> None:
    texts = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc"))
    pq.write_table(pa.table({"prompt": [user("a"), user("b"), user("c")], "note": texts}), tmp_path / "a.parquet")
    expected = gpuload.load(tmp_path / "a.parquet", qwen, token_cache=False)
    assert expected.report.rows_rejected == 1
    for _ in range(2):
        same(gpuload.load(tmp_path / "a.parquet", qwen, store="disk"), expected)


# -- damage, and what cannot be written ------------------------------------------------------------------------------


def test_damaged_ids(files: list[str], qwen: Any, store: Path) -> None:
    """Lengths are compared when a file is opened, ids when they are used."""
    gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="disk")
    found = gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="memory", token_cache=False)
    (path,) = store.glob("*.arrow")
    whole = path.read_bytes()
    row = found.tokens[5].tobytes()
    path.write_bytes(whole.replace(row, row[:-1] + bytes([row[-1] ^ 1])))
    damaged = gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="disk")
    with pytest.raises(StoreError, match=r"\.arrow: the file is damaged: its checksum is wrong"):
        damaged.batch([5])
    path.unlink()
    same(gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="disk"), found)


def test_damaged_columns(files: list[str], qwen: Any, store: Path) -> None:
    gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="disk")
    found = gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="memory", token_cache=False)
    (path,) = store.glob("*.columns")
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        opened = ColumnFile.open(path, path.stem)
        if opened is None:  # the index
            continue
        try:
            tables = [opened.table(number) for number in range(len(opened.parts))]
        except StoreError:
            continue
        assert pa.concat_tables(tables).num_rows == 300  # between the parts there are bytes that nothing reads
    path.write_bytes(whole[: len(whole) // 2])
    same(gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="disk"), found)


def test_removed_while_it_is_used(files: list[str], qwen: Any, store: Path) -> None:
    found = gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk")
    expected, pickled = found.tokens.to_lists(), pickle.dumps(found)
    shutil.rmtree(store)
    assert found.tokens.to_lists() == expected  # this process has mapped it
    with pytest.raises(StoreError, match="the file was removed or replaced while a dataset used it: load again"):
        len(pickle.loads(pickled).tokens.to_lists())


@pytest.mark.parametrize("again", ["columns", "all"])
def test_files_made_again_in_other_parts(
    again: str, write: Callable[..., str], qwen: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset in another process reads the files that are there now: they have the same rows in other parts."""
    lengths = np.random.default_rng(0).integers(1, 40, (2, 600))
    prompts, labels = ([f"{row} " * length for row, length in enumerate(each)] for each in lengths.tolist())
    path = write({"prompt": [user(text) for text in prompts], "label": labels})
    monkeypatch.setattr(batches, "BATCH_BYTES", 20_000)
    found = gpuload.load(path, qwen, store="disk", max_prompt_length=70)
    kept = [labels[found.origin(row)[1]] for row in range(len(found))]
    selected = found.passed_through.select(np.arange(0, len(found), 3))
    before = {file.name: file.read_bytes() for file in store.glob("*")}
    pickled = pickle.dumps([found, selected])
    for file in store.glob("*" if again == "all" else "*.columns"):
        file.unlink()
    monkeypatch.setattr(batches, "BATCH_ROWS", 37)
    gpuload.load(path, qwen, store="disk")
    assert {file.name for file in store.glob("*")} == set(before)
    assert any(file.read_bytes() != before[file.name] for file in store.glob("*.columns"))
    other, some = pickle.loads(pickled)
    assert other.take(["label"]) == found.take(["label"]) == {"label": kept}
    assert other.tokens.to_lists() == found.tokens.to_lists()
    assert some.take(np.arange(len(some))) == {"label": kept[::3]}


def test_files_of_other_rows_are_an_error(files: list[str], qwen: Any, store: Path, tmp_path: Path) -> None:
    """Whatever has replaced the ids: rows of other lengths are not read as those of the dataset."""
    found = gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="disk")
    (path,) = store.glob("*.arrow")
    pickled, entry = pickle.dumps(found), read_entry(path, path.stem, 300)
    assert entry is not None
    writer = EntryWriter(tmp_path, path.stem, "other")
    writer.write(replace(entry.rows(0, 300), ids=entry.rows(0, 300).ids.take(np.arange(300)[::-1])), 0)
    writer.close("sample")
    writer.path.replace(path)
    with pytest.raises(StoreError, match="the file was removed or replaced while a dataset used it: load again"):
        pickle.loads(pickled).batch([5])


def test_too_little_space(files: list[str], qwen: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(store.anchor)
    gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="disk")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=-(10**9)))
    with pytest.raises(StoreError, match=r"a store of about [\d,]+ bytes is needed, and [-\d,]+ bytes are free"):
        gpuload.load(files[1:], qwen, chat_template=TEMPLATE, store="disk")
    # What is there needs no space; and with "auto" the rows are in memory.
    gpuload.load(files[1:], qwen, chat_template=TEMPLATE, store="memory", token_cache=False)
    monkeypatch.setattr(room, "free_memory", lambda: 1)
    automatic = gpuload.load(files[1:], qwen, chat_template=TEMPLATE)
    assert "ids and columns are in memory, although they may take most of it" in str(automatic.report)


def test_room_is_made_for_a_store(files: list[str], qwen: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of stores that were not used for the longest time are removed, if the disk is too small."""
    gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="disk")
    old = set(store.glob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(10))
    gpuload.load(files[2:], qwen, chat_template=TEMPLATE, store="disk")
    assert old - set(store.glob("*"))


class _Usage:
    def __init__(self, free: int):
        self.free = free


@pytest.mark.parametrize("fails", ["ids", "columns"])
def test_the_disk_is_full(
    fails: str, files: list[str], qwen: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((disk.EntryWriter, "write") if fails == "ids" else (ColumnWriter, "_write")), full)
    with pytest.raises(StoreError, match=r"the disk is full after [\d,]+ bytes of the store were written"):
        gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk")
    assert not list(store.glob("*.partial"))


def test_a_directory_without_permission(files: list[str], qwen: Any, store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write the store: .*: set cache_dir to a directory"):
        gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk", cache_dir=str(tmp_path / "file"))


_READ_ONLY: list[str] = []


def _read_only(event: str, arguments: Any) -> None:
    """An audit hook: what is below the paths in `_READ_ONLY` cannot be written, by any user."""
    if not _READ_ONLY or event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime"):
        return
    writes = event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    path = os.fspath(arguments[0]) if not isinstance(arguments[0], int) else ""
    missing = event != "os.mkdir" or not os.path.exists(path)
    if writes and missing and any(str(path).startswith(root) for root in _READ_ONLY):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


@pytest.fixture
def read_only(store: Path) -> Iterator[Callable[[], None]]:
    """Makes the disk of the store read-only until the end of the test."""
    sys.addaudithook(_read_only)
    yield lambda: _READ_ONLY.append(str(store.parent))
    _READ_ONLY.clear()


@pytest.mark.parametrize(
    "options", [{}, {"max_prompt_length": 30}, {"max_samples": 30, "shuffle": True, "seed": 3}], ids=str
)
def test_a_complete_store_on_a_read_only_disk(
    options: dict[str, Any], files: list[str], qwen: Any, store: Path, read_only: Callable[[], None]
) -> None:
    gpuload.load(files[1:], qwen, chat_template=TEMPLATE, store="disk")
    killed = PartialDirectory(store)
    killed._lock.close()
    read_only()
    with pytest.raises(OSError, match="Read-only"):
        (store / "file").touch()
    with pytest.raises(StoreError, match="cannot write the store: Read-only file system: set cache_dir"):
        gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk", **options)
    _READ_ONLY.clear()
    gpuload.load(files[:1], qwen, chat_template=TEMPLATE, store="disk")
    expected = gpuload.load(files, qwen, chat_template=TEMPLATE, store="memory", **options)
    there = sorted(path.name for path in store.rglob("*"))
    read_only()
    found = gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk", **options)
    same(found, expected, checked=False)
    assert sorted(path.name for path in store.rglob("*")) == there


def test_a_damaged_source(write: Callable[..., str], qwen: Any, store: Path) -> None:
    path = Path(write([user(f"a {n}") for n in range(2000)]))
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes(1000) + whole[1200:])
    with pytest.raises(SourceError, match="data.parquet: damaged parquet file"):
        gpuload.load(path, qwen, store="disk")
    assert not list(store.glob("*"))


def test_a_load_that_fails_leaves_nothing(
    files: list[str], qwen: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(disk.OnDisk, "complete", fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk")
    assert not list(store.glob("*"))


def test_invalid_option(files: list[str], qwen: Any) -> None:
    with pytest.raises(OptionError, match="store='ssd': expected one of 'auto', 'memory', 'disk'"):
        gpuload.load(files, qwen, store="ssd")


@pytest.mark.parametrize("raw", [False, True])
def test_prepare(
    raw: bool, files: list[str], qwen_folder: str, qwen: Any, store: Path, made: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """`gpuload prepare --store disk` makes what a load uses."""
    command = ["prepare", *files, "--tokenizer", qwen_folder, *["--return-raw-chat"] * raw]
    assert main([*command, "--store", "disk"]) == 0
    assert f"ids and columns are on disk, in {store}" in capsys.readouterr().out
    there, count = sorted(store.glob("*")), len(made)
    found = gpuload.load(files, qwen, store="disk", return_raw_chat=raw)
    assert (len(made), sorted(store.glob("*"))) == (count, there)
    same(found, gpuload.load(files, qwen, store="memory", return_raw_chat=raw, token_cache=False))
    for wrong in ([*command, "--store", "dsk"], [*command, "--store", "disk", "--ray", "--cache-dir", "x"]):
        if "--ray" in wrong:
            with pytest.raises(SystemExit):
                main(wrong)
        else:
            assert main(wrong) == 1
    assert "--store dsk: expected one of 'auto', 'memory', 'disk'" in capsys.readouterr().err


# -- what decides ----------------------------------------------------------------------------------------------------


def test_auto(files: list[str], qwen: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, expected in ((10**9, False), (10**4, True), (None, False)):
        monkeypatch.setattr(room, "free_memory", lambda free=free: free)
        found = gpuload.load(files, qwen, chat_template=TEMPLATE)
        assert ("are on disk" in str(found.report)) == expected


def test_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.core import memory

    free = free_memory()
    assert free is not None
    assert 1 << 20 < free < 1 << 50
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\nfile 300000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert free_memory() == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() > 600000  # type: ignore[operator]


def test_known_digests(write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest is remembered only for a file whose last change was some time ago."""
    from gpuload.sources.fetch import SourceFile
    from gpuload.sources.local import opened

    path = write(["a"])
    calls: list[int] = []

    def digest(*names: str) -> bytes:
        with opened(SourceFile(path, path, "parquet")) as (local, _):
            pass
        return known.known_digest(tmp_path / "digests", local, names, lambda: calls.append(1) or b"1")  # type: ignore[func-returns-value]

    digest("prompt"), digest("prompt")
    assert len(calls) == 2
    monkeypatch.setattr(known, "SETTLED", -1e9)
    digest("prompt"), digest("prompt")
    assert len(calls) == 3
    digest("other", "prompt"), digest("other", "prompt")
    assert len(calls) == 4
    about = os.stat(path)
    Path(path).write_bytes(Path(path).read_bytes())  # same bytes, and other times
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    digest("prompt")
    assert len(calls) == 5


def test_rows_without_columns(tmp_path: Path) -> None:
    writer = ColumnWriter(tmp_path / "a", "key", "source")
    writer.add(pa.table({}), 3, {1: "why"})
    writer.close()
    found = ColumnFile.open(tmp_path / "a", "key")
    assert found is not None
    assert (found.num_rows, found.invalid) == (3, {1: "why"})
    assert ColumnFile.open(tmp_path / "a", "other") is None
    assert columns_of([found, found], np.arange(6)).take(np.array([0, 5])) == {}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not tell which files are open")
def test_a_load_that_has_failed_has_closed_its_files(tmp_path: Path, qwen: Any) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text('{"prompt": [{"role": "user", "content": "x"}], "n": 1}\n' * 3)
    files[1].write_text('{"prompt": [{"role": "user", "content": "y"}], "n": 1}\n{"prompt": [], "n": 2}\n')
    with pytest.raises(DataError) as error:
        gpuload.load(files, qwen, max_prompt_length=60, store="disk", strict=True, cache_dir=str(tmp_path / "c"))
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert [name for name in opened if str(tmp_path) in name] == []
    assert "row 1" in str(error.value)


def test_rows_in_any_order(files: list[str], qwen: Any, store: Path) -> None:
    found = gpuload.load(files, qwen, chat_template=TEMPLATE, store="disk").token_store
    whole = found.to_host()
    for rows in (np.arange(len(found)), np.random.default_rng(0).integers(0, len(found), 500), np.zeros(0, np.int64)):
        taken, expected = found.take(rows), whole.take(rows)
        assert taken.values.dtype == np.int32
        assert taken.values.flags.writeable
        assert taken.to_lists() == expected.to_lists()
