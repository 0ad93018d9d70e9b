"""Stores that machines share, pieces in them, parts of files, and what `gpuload.integrations.ray` says without Ray."""

import io
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3fs.core import S3File

import gpuload
from gpuload.cache.entry import EntryWriter, read_entry
from gpuload.cache.shared_store import SharedStore
from gpuload.core.arrays import Ragged
from gpuload.core.errors import GpuloadError, SourceError, StoreError
from gpuload.core.marks import CHOSEN, REJECTED, sequence, split
from gpuload.core.options import Options
from gpuload.engines.protocol import Tokenized
from gpuload.integrations.ray.parts import FilePart, all_parts, open_files, open_part, part_digests
from gpuload.integrations.ray.pieces import EntryPlan, Piece, is_complete, join
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.prompts import PromptKind
from gpuload.pipeline.run import open_job, run
from gpuload.sources import remote
from gpuload.sources.fetch import SourceFile, find, here
from gpuload.sources.footer import column_digest, digests_of_parts
from gpuload.sources.read import open_file
from tests import s3_cases
from tests.conftest import user
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
    found = run(open_job(PromptKind(), [part], qwen_folder, options, time.perf_counter()))
    whole = gpuload.load(file, qwen_folder, max_prompt_length=100, device="cpu", token_cache=False)
    rows = np.flatnonzero((whole.origins[:, 1] >= 150) & (whole.origins[:, 1] < 300))
    assert found.origins.tolist() == whole.origins[rows].tolist()
    assert found.tokens.to_lists() == whole.tokens.take(rows).to_lists()
    # The other columns, which several threads decode, are those of the same rows.
    part = open_file(place, groups=range(3, 6))
    assert part.without is not None
    assert pa.concat_tables(part.without("prompt")).equals(pq.read_table(file).slice(150, 150).drop_columns("prompt"))


def test_rows_as_arrow_become_ids_again(qwen_folder: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "token_cache": False}
    turns = [[*user(text), {"role": "assistant", "content": text * 2}] for text in ("a", "one two", "x" * 50)]
    prompts = gpuload.load(pa.table({"prompt": [each[:1] for each in turns]}), qwen_folder, **options)
    chats = gpuload.load_chats(pa.table({"messages": turns}), qwen_folder, **options)
    assert chats.loss_tokens > 0
    for kind, rows in ((PromptKind(), prompts), (ChatKind(), chats)):
        found = kind.from_arrow(rows.to_arrow().read_all())
        assert found.to_lists() == rows.token_store.to_host().to_lists()
    answers = {"chosen": [each[1:] for each in turns], "rejected": [[{**each[1], "content": "no"}] for each in turns]}
    for objective in ("dpo", "rm"):
        given = {"objective": objective} | options
        pairs = gpuload.load_pairs(pa.table({"prompt": [each[:1] for each in turns], **answers}), qwen_folder, **given)
        found = PairKind(objective=objective).from_arrow(pairs.to_arrow().read_all())
        for other in (CHOSEN, REJECTED):
            one, same = (sequence(rows, other) for rows in (found, pairs.parts))
            if objective == "rm":  # whose completions do not count
                one, same = split(one)[0], split(same)[0]
            assert one.to_lists() == same.to_lists()


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
    place = SourceFile("/data.parquet", "data", "parquet")
    pieces = []
    for rows in (range(0, 2), range(2, 5)):
        piece = Piece(FilePart(place, 0, None, rows, len(rows), b""), b"", f"piece-{rows.start}")
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

    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(StoreError, match=message):
        store.put(Path(__file__), "tokens/a.arrow")
    assert list((tmp_path / "store" / "tokens").iterdir()) == []


# -- S3 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges of bytes that are asked for, in order."""
    asked: list[tuple[int, int]] = []
    real = S3File._fetch_range

    def fetch(self: Any, start: int, end: int) -> bytes:
        asked.append((start, end))
        return bytes(real(self, start, end))

    monkeypatch.setattr(S3File, "_fetch_range", fetch)
    return asked


def in_place(url: str) -> SourceFile:
    (found,) = find(url, 60.0)
    file = here(pickle.loads(pickle.dumps(found)), None, read_in_place=True)
    assert file.remote is not None
    return file


def test_some_row_groups_are_read_in_place(
    s3: Any, urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: list[tuple[int, int]]
) -> None:
    content = _content(s3, "data/a.parquet")
    (tmp_path / "whole.parquet").write_bytes(content)
    whole, local = pq.ParquetFile(io.BytesIO(content)), SourceFile(str(tmp_path / "whole.parquet"), "a", "parquet")
    file = in_place(urls[0])
    for block in (1 << 14, remote._BLOCK):
        monkeypatch.setattr(remote, "_BLOCK", block)
        requests.clear()
        assert pa.concat_tables(open_file(file, groups=range(4, 6)).batches()).equals(whole.read_row_groups([4, 5]))
        rows = [(start, end) for start, end in requests if end < len(content)]  # others are of the footer
        if block == 1 << 14:  # how many requests there are depends on which thread asks first
            assert 0 < sum(end - start for start, end in rows) < len(content) / 4
        else:
            assert len(requests) <= 8
        source = open_file(file, groups=range(2, 9), only="prompt")
        expected = whole.read_row_groups(range(2, 9), columns=["prompt"])
        assert pa.concat_tables(source.batches()).equals(expected)
        digests = [column_digest(each.file, "prompt", groups=range(2, 9)) for each in (source, open_file(local))]
        assert digests[0] == digests[1]


def test_columns_that_are_read_in_turns_are_few_requests(
    s3: Any, monkeypatch: pytest.MonkeyPatch, requests: list[tuple[int, int]]
) -> None:
    random = np.random.default_rng(0)
    table = pa.table({f"c{number}": random.random(400_000) for number in range(8)})
    content = io.BytesIO()
    pq.write_table(table, content, use_dictionary=False, compression="none", row_group_size=400_000)
    s3.put_object(Bucket="bucket", Key="wide/a.parquet", Body=content.getvalue())
    size = len(content.getvalue())
    assert size > 24 << 20
    monkeypatch.setattr(remote, "_BLOCK", 1 << 20)
    source = open_file(in_place("s3://bucket/wide/a.parquet"), groups=range(0, 1))
    requests.clear()
    assert pa.concat_tables(source.batches()).equals(table)
    assert len(requests) <= size / (1 << 20) + 8 + 2
    assert sum(end - start for start, end in requests) < size + (10 << 20)


def test_files_that_are_no_parquet_files_disappear_or_change(
    s3: Any, urls: list[str], tmp_path: Path, warm_cache: Path
) -> None:
    s3.put_object(Bucket="bucket", Key="data/c.parquet", Body=b"nothing")
    (found,) = find("s3://bucket/data/c.parquet", 60.0)
    with pytest.raises(SourceError, match=r"c.parquet: not a parquet file"):
        open_file(here(found, None, read_in_place=True))
    s3.delete_object(Bucket="bucket", Key="data/c.parquet")
    with pytest.raises(SourceError, match="no such file"):
        here(found, None, read_in_place=True)
    s3.put_object(Bucket="bucket", Key="other/a.parquet", Body=_content(s3, "data/a.parquet"))
    parts = all_parts(open_files("s3://bucket/other/a.parquet", Options()), 300)
    assert part_digests(parts, "prompt", None) == part_digests(pickle.loads(pickle.dumps(parts)), "prompt", None)
    assert open_part(parts[1], None).num_rows == 300
    s3.put_object(Bucket="bucket", Key="other/a.parquet", Body=_content(s3, "data/b.parquet"))
    for read in (lambda: open_part(parts[1], None), lambda: part_digests(parts, "prompt", None)):
        with pytest.raises(SourceError, match="the file was changed while it was loaded"):
            read()


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
