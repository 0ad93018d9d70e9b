"""Stores that machines share, pieces in them, parts of files, and what `gpuload.integrations.ray` says without Ray."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gpuload
from gpuload.cache.entry import EntryWriter, read_entry
from gpuload.cache.shared_store import SharedStore
from gpuload.core.arrays import Ragged
from gpuload.core.errors import GpuloadError, SourceError, StoreError
from gpuload.core.options import Options
from gpuload.engines.protocol import Tokenized
from gpuload.integrations.ray.parts import FilePart, all_parts, open_files
from gpuload.integrations.ray.pieces import EntryPlan, Piece, is_complete, join
from gpuload.kinds.prompts import PromptKind
from gpuload.pipeline.run import open_job, run
from gpuload.sources.fetch import SourceFile
from gpuload.sources.footer import column_digest, digests_of_parts
from gpuload.sources.read import open_file
from gpuload.sources.row_groups import FilePlace, local_part, place_files
from tests import s3_cases
from tests.ray_cases import split_file

s3, urls = s3_cases.s3, s3_cases.urls


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, gsm8k: str, qwen_folder: str) -> None:
    from gpuload.cli.main import main
    from gpuload.integrations.ray import prepare, read_chats, read_pairs, read_prompts

    monkeypatch.setitem(sys.modules, "ray", None)
    for read in (read_prompts, read_chats, read_pairs):
        with pytest.raises(GpuloadError, match=r"needs Ray Data .*pip install 'gpuload\[ray\]' on all nodes"):
            read(gsm8k, qwen_folder)
    with pytest.raises(GpuloadError, match="needs Ray Data"):
        prepare(gsm8k, qwen_folder, "store")
    with pytest.raises(SystemExit):
        main(["prepare", gsm8k, "--tokenizer", qwen_folder, "--ray"])
    assert main(["prepare", gsm8k, "--tokenizer", qwen_folder, "--ray", "--cache-dir", "store"]) == 1


def test_parts_are_runs_of_row_groups(gsm8k: str, tmp_path: Path) -> None:
    few = split_file(gsm8k, tmp_path, [400, 30, 170], 50)
    opened = open_files(few, Options())
    parts = all_parts(opened, 120)
    assert [(part.file, part.groups, part.rows) for part in parts] == [
        (0, range(0, 3), range(0, 150)),
        (0, range(3, 6), range(150, 300)),
        (0, range(6, 8), range(300, 400)),
        (1, range(0, 1), range(0, 30)),
        (2, range(0, 3), range(0, 150)),
        (2, range(3, 4), range(150, 170)),
    ]
    assert [part.take for part in all_parts(opened, 120, 320)] == [150, 150, 20]
    empty = str(tmp_path / "empty.parquet")
    pq.write_table(pq.read_table(few[0]).slice(0, 0), empty)
    assert [part.file for part in all_parts(open_files([empty, few[1]], Options()), 120)] == [1]


def test_a_source_of_row_groups_has_its_rows_under_their_numbers(gsm8k: str, qwen_folder: str, tmp_path: Path) -> None:
    (file,) = split_file(gsm8k, tmp_path, [400], 50)
    place = SourceFile(file, file, "parquet")
    part = open_file(place, groups=range(3, 6), only="prompt")
    assert (part.num_rows, part.first_row, part.schema.names, part.parquet) == (150, 150, ["prompt"], None)
    options = gpuload.Options(max_prompt_length=100, device="cpu", token_cache=False)
    found = run(open_job(PromptKind(), [part], qwen_folder, options))
    whole = gpuload.load(file, qwen_folder, max_prompt_length=100, device="cpu", token_cache=False)
    rows = np.flatnonzero((whole.origins[:, 1] >= 150) & (whole.origins[:, 1] < 300))
    assert found.origins.tolist() == whole.origins[rows].tolist()
    assert found.tokens.to_lists() == whole.tokens.take(rows).to_lists()
    # The other columns, which several threads decode, are those of the same rows.
    part = open_file(place, groups=range(3, 6))
    assert part.without is not None
    assert pa.concat_tables(part.without("prompt")).equals(pq.read_table(file).slice(150, 150).drop_columns("prompt"))


def test_digests_of_parts_are_made_in_one_pass(gsm8k: str, tmp_path: Path) -> None:
    (file,) = split_file(gsm8k, tmp_path, [400], 50)
    local = open_file(SourceFile(file, file, "parquet")).file
    assert local is not None
    groups = [range(0, 3), range(3, 8)]
    whole, parts = digests_of_parts(local, ["prompt"], groups)
    assert whole == column_digest(local, "prompt")
    assert parts == [column_digest(local, "prompt", groups=each) for each in groups]
    assert len({whole, *parts}) == 3


def two_pieces(store: SharedStore, directory: Path) -> EntryPlan:
    """The plan of an entry, both pieces of which are in the store: the rows [1], [1] and [1], [1], [1]."""
    place = FilePlace("/data.parquet", "data", "parquet", 60.0)
    pieces = []
    for rows in (range(0, 2), range(2, 5)):
        piece = Piece(FilePart(place, 0, None, rows, len(rows), b""), f"piece-{rows.start}")
        ids = Ragged(np.ones(len(rows), np.int32), np.arange(len(rows) + 1))
        writer = EntryWriter(directory, piece.key, "data")
        writer.write(Tokenized(ids=ids, text_sizes=np.ones(len(rows), np.int64), text_nbytes=len(rows)), len(rows))
        writer.close("sample")
        pieces.append((piece, writer.path))
    plan = EntryPlan("data", "whole", "sample", tuple(piece for piece, _ in pieces))
    for piece, path in pieces:
        store.put(path, f"{plan.folder}/{piece.name}")
    return plan


def check_joined(store: SharedStore, plan: EntryPlan) -> None:
    found = read_entry(Path(store.location, plan.entry), plan.key, 5)
    assert found is not None
    assert [row for part in found.parts for row in part.ids.to_lists()] == [[1]] * 5
    assert (found.verified, found.compared) == ("sample", 5)
    assert store.names(plan.folder) == set()
    assert not Path(store.location, plan.folder).exists()


def test_the_last_piece_completes_an_entry(tmp_path: Path) -> None:
    store = SharedStore(str(tmp_path / "store"))
    store.create()
    plan = two_pieces(store, tmp_path)
    first = f"{plan.folder}/{plan.pieces[0].name}"
    assert store.get(first, tmp_path / "first")
    store.remove(first)
    join(store, plan)
    assert not is_complete(store, plan)
    assert store.names(plan.folder) == {plan.pieces[1].name}
    store.put(tmp_path / "first", first)
    join(store, plan)
    check_joined(store, plan)
    # A worker of another run that was making a piece meanwhile.
    store.put(tmp_path / "first", first)
    join(store, plan)
    check_joined(store, plan)


@pytest.mark.parametrize("number", [0, 1])
def test_two_workers_join_the_same_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    store = SharedStore(str(tmp_path / "store"))
    store.create()
    plan = two_pieces(store, tmp_path)
    real = SharedStore.get

    def get(self: SharedStore, name: str, local: Path) -> bool:
        if name.endswith(plan.pieces[number].name):
            monkeypatch.setattr(SharedStore, "get", real)
            join(SharedStore(store.location), plan)  # another worker is faster, and removes the pieces
            check_joined(store, plan)
        return real(self, name, local)

    monkeypatch.setattr(SharedStore, "get", get)
    join(store, plan)
    check_joined(store, plan)


def test_pieces_that_disappear_are_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedStore(str(tmp_path / "store"))
    store.create()
    plan = two_pieces(store, tmp_path)
    real = SharedStore.get

    def get(self: SharedStore, name: str, local: Path) -> bool:
        self.remove(f"{plan.folder}/{plan.pieces[1].name}")
        return real(self, name, local)

    monkeypatch.setattr(SharedStore, "get", get)
    join(store, plan)
    assert not is_complete(store, plan)
    assert store.names(plan.folder) == {plan.pieces[0].name}


def test_a_store_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    store = SharedStore(str(tmp_path / "store"))
    name = store.create()
    assert store.create() == name
    store.check(name)
    os.rename(tmp_path / "store", tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="the store is not there on this node: mount the same storage"):
        store.check(name)
    with pytest.raises(StoreError, match=r"cannot write the store .*: check that the storage is there"):
        store.put(Path(__file__), "tokens/a.arrow")
    assert not (tmp_path / "store").exists()
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreError, match="not there on this node"):
        store.check(name)
    (tmp_path / "store" / "store.json").write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        store.create()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "No space left on device: free space there"),
        (PermissionError(13, "Permission denied"), "Permission denied: give this user, on every node, the permission"),
        (OSError(5, "Input/output error"), "Input/output error: check that the storage is there"),
    ],
)
def test_storage_that_fails_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    store = SharedStore(str(tmp_path / "store"))
    store.create()

    def fail(source: Any, target: Any) -> None:
        Path(target).write_bytes(b"half")
        raise error

    monkeypatch.setattr("gpuload.cache.shared_store.shutil.copyfile", fail)
    with pytest.raises(StoreError, match=message):
        store.put(Path(__file__), "tokens/a.arrow")
    assert list((tmp_path / "store" / "tokens").iterdir()) == []


# -- S3 ---------------------------------------------------------------------------------------------------------------


def test_a_copy_of_some_row_groups_has_few_bytes(
    s3: Any, urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_copy = tmp_path / "whole.parquet"
    whole_copy.write_bytes(_content(s3, "data/a.parquet"))
    (place,) = place_files(urls[0], 60.0)
    copy = local_part(place, range(4, 6), tmp_path, None)
    size = s3.head_object(Bucket="bucket", Key="data/a.parquet")["ContentLength"]
    about = os.stat(copy.path)
    assert about.st_size == size
    assert about.st_blocks * 512 < size
    found, whole = pq.ParquetFile(copy.path), pq.ParquetFile(io.BytesIO(_content(s3, "data/a.parquet")))
    assert found.read_row_groups([4, 5]).equals(whole.read_row_groups([4, 5]))
    # Of one column, with a gap that is not worth a request, and with one that is.
    for gap in (1 << 20, 0):
        monkeypatch.setattr("gpuload.sources.row_groups._GAP", gap)
        copy = local_part(place, range(2, 9), tmp_path, None, "prompt")
        found = pq.ParquetFile(copy.path).read_row_groups(range(2, 9), columns=["prompt"])
        assert found.equals(whole.read_row_groups(range(2, 9), columns=["prompt"]))
        digests = [
            column_digest(source.file, "prompt", groups=range(2, 9))
            for source in (open_file(copy), open_file(SourceFile(str(whole_copy), "a", "parquet")))
            if source.file is not None
        ]
        assert digests[0] == digests[1]
    s3.put_object(Bucket="bucket", Key="data/c.parquet", Body=b"nothing")
    (place,) = place_files("s3://bucket/data/c.parquet", 60.0)
    with pytest.raises(SourceError, match=r"c.parquet: damaged parquet file"):
        local_part(place, range(0, 1), tmp_path, None)
    s3.delete_object(Bucket="bucket", Key="data/c.parquet")
    with pytest.raises(SourceError, match="no such file"):
        local_part(place, range(0, 1), tmp_path, None)


def _content(s3: Any, key: str) -> bytes:
    return s3.get_object(Bucket="bucket", Key=key)["Body"].read()


def test_files_of_a_store_on_s3(s3: Any, tmp_path: Path) -> None:
    store = SharedStore("s3://bucket/files")
    name = store.create()
    assert SharedStore("s3://bucket/files/").create() == name
    store.check(name)
    assert store.names("pieces/a") == set()
    assert store.read("none") is None
    assert not store.get("none", tmp_path / "none")
    (tmp_path / "one").write_bytes(b"one")
    store.put(tmp_path / "one", "pieces/a/one")
    store.write("pieces/a/two", b"two")
    assert store.names("pieces/a") == {"one", "two"}
    assert store.get("pieces/a/one", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"one"
    store.write("pieces/a/two", b"2")
    assert store.read("pieces/a/two") == b"2"
    assert store.exists("pieces/a/two")
    assert not store.exists("pieces/a/three")
    store.remove("pieces/a")
    store.remove("pieces/a")
    assert store.names("pieces/a") == set()
