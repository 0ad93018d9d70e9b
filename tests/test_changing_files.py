"""Files that change while they are loaded, or that were damaged before: an error, never rows of two versions."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cache_cases import entries
from conftest import user
from tiers import core

import gpuload
from gpuload.cache import entry
from gpuload.cache import store as cache
from gpuload.cache.entry import read_entry
from gpuload.core.errors import SourceError
from gpuload.engines.host import engine as cpu
from gpuload.integrations.verl.reading import file_digest
from gpuload.media.headers import FileBytes
from gpuload.pipeline import keep_on_disk as disk
from gpuload.sources import local
from gpuload.sources.fetch import SourceFile
from gpuload.sources.footer import damage_of, single_group
from gpuload.sources.read import _decode, _read_parquet, open_file

CHANGED = "the file was changed while it was loaded: load it again when it is complete"


def write(path: Path, letter: str, rows: int = 6, **options: Any) -> bytes:
    """Files of equal size and footer length for every letter."""
    words = [f"{letter * 3} {row}" for row in range(rows)]
    table = pa.table({"prompt": [user(word) for word in words], "answer": words})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False, **options)
    return path.read_bytes()


def replace(path: Path, rows: int) -> None:
    write(path.with_name("new.parquet"), "B", rows)
    os.replace(path.with_name("new.parquet"), path)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "replaced": lambda path: replace(path, 6),
    "replaced by fewer rows": lambda path: replace(path, 3),
    "replaced by more rows": lambda path: replace(path, 9),
    "rewritten in place": lambda path: write(path, "B"),
    "written into": lambda path: path.write_bytes(path.read_bytes().replace(b"AAA", b"BBB")),
    "cut short": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "replaced by a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "data.parquet", "A")
    return tmp_path / "data.parquet"


@pytest.mark.parametrize("change", core(CHANGES, *list(CHANGES)[1::3]))
def test_a_change_between_hashing_and_reading(
    change: str, file: Path, qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids are those of the old file: they must not get the columns of the new one."""
    gpuload.load(file, qwen)

    def read_and_change(*arguments: Any, **more: Any) -> Any:
        found = read_entry(*arguments, **more)
        assert found is not None
        CHANGES[change](file)
        return found

    monkeypatch.setattr(cache, "read_entry", read_and_change)
    with pytest.raises(SourceError) as raised:
        gpuload.load(file, qwen)
    assert str(raised.value) == f"{file}: {CHANGED}"


@pytest.mark.parametrize("token_cache", [True, False])
@pytest.mark.parametrize("change", core(CHANGES, *list(CHANGES)[::3]))
def test_a_change_while_rows_are_read(
    change: str, token_cache: bool, file: Path, qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cpu.render_column

    def render(*arguments: Any) -> Any:
        CHANGES[change](file)
        return real(*arguments)

    monkeypatch.setattr(cpu, "render_column", render)
    with pytest.raises(SourceError) as raised:
        gpuload.load(file, qwen, token_cache=token_cache, verify="off")
    assert str(raised.value) == f"{file}: {CHANGED}"
    assert not token_cache or entries(warm_cache) == []


def test_a_change_that_the_clock_does_not_show(
    file: Path, qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems store times to the second. What is cached is compared with the file's content."""
    real = cpu.render_column

    def render(*arguments: Any) -> Any:
        about = file.stat()
        CHANGES["written into"](file)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        return real(*arguments)

    monkeypatch.setattr(cpu, "render_column", render)
    with pytest.raises(SourceError, match=CHANGED):
        gpuload.load(file, qwen)
    assert entries(warm_cache) == []


def change_unseen(file: Path, start: bytes) -> None:
    """Writes into values, all from the one that starts so, and sets the clock back."""
    about, whole = file.stat(), file.read_bytes()
    at = whole.index(start)
    file.write_bytes(whole[:at] + whole[at:].replace(b"old!", b"new!"))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """A file whose values are as long as those that `change_unseen` writes."""
    words = [f"old! {row}" for row in range(60)]
    table = pa.table({"prompt": [user(word) for word in words], "label": [f"label {word}" for word in words]})
    pq.write_table(
        table, tmp_path / "labelled.parquet", compression="none", use_dictionary=False, write_statistics=False
    )
    return tmp_path / "labelled.parquet"


@pytest.mark.parametrize("cached", ["nothing", "ids", "columns", "columns, and ids cannot be"])
@pytest.mark.parametrize("start", core([b"old!", b"label old! 20"], b"label old! 20"))
def test_a_store_of_a_file_whose_change_the_clock_does_not_show(
    start: bytes, cached: str, labelled: Path, qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored for good, and what is joined with stored rows, is compared with the file's content at the end."""
    file, store = labelled, warm_cache.parent / "store"
    options = {"chat_template": "{{ messages[0].content }}"}
    if cached != "nothing":
        gpuload.load(file, qwen, store="disk", **options)
    for path in store.glob("*.columns" if cached == "ids" else "*.arrow"):
        path.unlink()
    if cached.endswith("cannot be"):
        options["chat_template"] += "{{ strftime_now('%S') if 0 }}"
    real, before = disk.OnDisk.open, file.read_bytes()

    def write_and_open(*arguments: Any) -> Any:
        change_unseen(file, start)
        return real(*arguments)

    there = set(store.glob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(disk.OnDisk, "open", write_and_open)
        with pytest.raises(SourceError, match=CHANGED):
            gpuload.load(file, qwen, store="disk", **options)
    assert set(store.glob("*")) == there
    for content in (file.read_bytes(), before):
        file.write_bytes(content)
        expected = pq.read_table(file)
        found = gpuload.load(file, qwen, store="disk", **options)
        assert found.take(["label"])["label"] == expected["label"].to_pylist()
        texts = [qwen.decode(ids) for ids in found.tokens.to_lists()]
        assert texts == [messages[0]["content"] for messages in expected["prompt"].to_pylist()]


def test_columns_of_a_file_that_has_changed_since_its_ids_were_found(
    labelled: Path, qwen: Any, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, too, ids of the old rows are not joined with columns of the new ones."""
    gpuload.load(labelled, qwen)
    real = entry.other_columns

    def write_and_read(*arguments: Any) -> Any:
        change_unseen(labelled, b"old!")
        return real(*arguments)

    monkeypatch.setattr(entry, "other_columns", write_and_read)
    with pytest.raises(SourceError, match=CHANGED):
        gpuload.load(labelled, qwen)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_change_while_a_file_is_opened(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"data.{ending}"
    write(path, "A") if ending == "parquet" else path.write_text('{"prompt": "AAA"}\n' * 9)
    real = local._state

    def state(about: os.stat_result) -> Any:
        monkeypatch.setattr(local, "_state", real)
        CHANGES["written into"](path)
        return real(about)

    monkeypatch.setattr(local, "_state", state)
    with pytest.raises(SourceError, match=CHANGED):
        open_file(SourceFile(str(path), "x", "json" if ending == "jsonl" else ending))


@pytest.mark.parametrize("path_is_read", [damage_of, single_group, file_digest, FileBytes])
def test_nobody_is_waited_for_who_writes_to_a_pipe(path_is_read: Callable[..., Any], tmp_path: Path) -> None:
    """A file may be replaced after it was found. `FileBytes` compares its state with what was looked up."""
    os.mkfifo(tmp_path / "pipe")
    arguments = (
        (pa.ArrowInvalid("broken"),) if path_is_read is damage_of else ("name",) * (path_is_read is single_group)
    )
    with suppress(OSError):
        path_is_read(str(tmp_path / "pipe"), *arguments)


def test_a_json_file_is_read_once(tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later changes do not matter."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "AAA", "answer": "AAA"}\n' * 3)
    real = cpu.render_column

    def render(*arguments: Any) -> Any:
        CHANGES["written into"](path)
        return real(*arguments)

    monkeypatch.setattr(cpu, "render_column", render)
    prompts = gpuload.load(path, qwen, return_full_prompt=True)
    assert prompts.take(["answer"]) == {"answer": ["AAA"] * 3}
    assert all("AAA" in text for text in prompts.take(["full_prompts"])["full_prompts"])


@pytest.mark.parametrize("rows", [5, 7])
def test_a_number_of_rows_that_differs_from_the_footers(rows: int, file: Path) -> None:
    with local.opened(SourceFile(str(file), "x", "parquet")) as (opened, _):
        pass
    with pytest.raises(SourceError, match=f"x: damaged parquet file \\(6 rows instead of {rows}\\)"):
        list(_read_parquet(opened, rows, _decode(opened, set(), range(1))))


def test_pages_with_checksums_are_compared_with_them(tmp_path: Path, qwen: Any) -> None:
    path = tmp_path / "data.parquet"
    whole = write(path, "A", write_page_checksum=True)
    assert len(gpuload.load(path, qwen)) == 6
    for at in (whole.index(b"AAA 1"), whole.rindex(b"AAA 1")):  # in a prompt, in an answer
        path.write_bytes(whole[:at] + b"B" + whole[at + 1 :])
        with pytest.raises(SourceError, match="damaged parquet file .*CRC.*: download it again"):
            gpuload.load(path, qwen)
    write(path, "A", write_page_checksum=False)
    assert len(gpuload.load(path, qwen)) == 6


@pytest.mark.parametrize("name", [b"answer", b"role"])
def test_a_damaged_column_name(name: bytes, file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(name, b"\xff" + name[1:]))
    with pytest.raises(SourceError, match="x: damaged parquet file .*decode byte 0xff"):
        open_file(SourceFile(str(file), "x", "parquet"))


@pytest.mark.parametrize("name", [b"answer", b"content"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_column_with_two_names(name: bytes, place: int, tmp_path: Path) -> None:
    """A footer has no checksum, but most of it is there twice."""
    path = tmp_path / "data.parquet"
    table = pa.table({"prompt": [user("a")], "answer": ["b"]})
    pq.write_table(table, path, store_schema=False, write_statistics=False)
    whole = path.read_bytes()
    assert whole.count(name) == 2
    at = whole.index(name) if place == 0 else whole.rindex(name)
    path.write_bytes(whole[:at] + b"q" + whole[at + 1 :])
    with pytest.raises(SourceError, match="x: damaged parquet file \\(its footer has the name .* only once"):
        open_file(SourceFile(str(path), "x", "parquet"))


def test_files_of_arrow_without_a_descriptor(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in pyarrow 21."""

    class OldFile(pa.OSFile):  # type: ignore[misc]
        def fileno(self) -> int:
            raise AttributeError("'pyarrow.lib.OSFile' object has no attribute 'handle'")

    file = write([user("a"), user("b")])
    expected = gpuload.load(file, qwen).tokens.to_lists()
    monkeypatch.setattr("pyarrow.OSFile", OldFile)
    assert gpuload.load(file, qwen).tokens.to_lists() == expected
