"""`prepare` on a Ray cluster of three nodes, some of whose processes are killed: its store has the entries
that a load on one machine would make."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.data", reason="Ray is not installed: make ray-test")

import gpuload
from gpuload.cache.entry import read_entry
from gpuload.cli.main import main
from gpuload.core.errors import DeviceError, GpuloadError, SourceError, StoreError
from gpuload.integrations.ray import prepare
from gpuload.integrations.ray.fill import check_prepared
from gpuload.integrations.ray.pieces import PieceActor, PieceTask
from tests.cache_cases import same
from tests.ray_cases import ROOT, cluster_of, split_file


@pytest.fixture
def cluster() -> Iterator[Any]:
    with cluster_of(2) as started:
        yield started


@pytest.fixture
def many(tmp_path: Path, gsm8k: str) -> list[str]:
    """Three files of 3,000, 30 and 3,000 rows, in row groups of 250."""
    return split_file(gsm8k, tmp_path, [3000, 30, 3000], 250)


def pieces(store: Path) -> list[Path]:
    return list(store.glob("pieces/*/*.arrow"))


def check_store(store: Path, files: list[str], tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads find all files in the store, and get what they would make themselves."""
    cold = gpuload.load(files, tokenizer, max_prompt_length=100, device="cpu", token_cache=False)
    warm = gpuload.load(files, tokenizer, max_prompt_length=100, device="cpu", cache_dir=str(store))
    assert warm.report.from_cache == files
    same(warm, cold)
    assert not any((store / "pieces").rglob("*.arrow"))
    assert [path for path in store.rglob("*") if path.name.endswith(".partial")] == []


def wait_for(condition: Any, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def kill_when(condition: Any, kill: Any) -> threading.Thread:
    def run() -> None:
        wait_for(condition)
        kill()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_store_has_the_entries_of_a_load(
    cluster: Any,
    many: list[str],
    qwen_folder: str,
    tmp_path: Path,
    warm_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "store"
    done = prepare(many, qwen_folder, str(store), rows_per_task=1000, device="cpu")
    assert (done.files, done.rows, done.found, done.pieces, done.rows_made) == (3, 6030, 0, 7, 6030)
    assert done.errors == {}
    check_store(store, many, qwen_folder, monkeypatch)
    # Again: all are there. With another way to verify they are made again.
    assert main(["prepare", *many, "--tokenizer", qwen_folder, "--cache-dir", str(store), "--ray"]) == 0
    assert "found      3 files" in capsys.readouterr().out
    assert prepare(many[1:2], qwen_folder, str(store), device="cpu", verify="full").pieces == 1
    check_store(store, many, qwen_folder, monkeypatch)
    (entry,) = [path for path in (store / "verified").iterdir() if path.read_bytes() == b"full"]
    found = read_entry(store / "tokens" / f"{entry.name}.arrow", entry.name, 30)
    assert found is not None
    assert (found.verified, found.compared) == ("full", 30)


def test_a_node_that_dies_loses_nothing(
    cluster: Any, many: list[str], qwen_folder: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    victim = sorted(cluster.worker_nodes, key=lambda node: node.node_id)[0]
    killer = kill_when(lambda: len(pieces(store)) >= 2, lambda: cluster.remove_node(victim, allow_graceful=False))
    done = prepare(many, qwen_folder, str(store), rows_per_task=250, device="cpu", concurrency=2)
    killer.join()
    assert done.errors == {}
    assert done.pieces + done.pieces_found == 25
    check_store(store, many, qwen_folder, monkeypatch)


def test_a_worker_that_dies_loses_nothing(
    cluster: Any, many: list[str], qwen_folder: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    store = tmp_path / "store"

    def kill() -> None:
        workers = [p for p in psutil.process_iter(["cmdline"]) if "MapWorker(MapBatches(PieceActor" in str(p.info)]
        ours = [p for p in workers if str(os.getpid()) in {str(parent.pid) for parent in p.parents()}]
        ours[0].kill()

    killer = kill_when(lambda: len(pieces(store)) >= 2, kill)
    done = prepare(many, qwen_folder, str(store), rows_per_task=250, device="cpu", concurrency=2)
    killer.join()
    assert done.errors == {}
    check_store(store, many, qwen_folder, monkeypatch)


DRIVER = """
import os, sys, time
from gpuload.integrations.ray import prepare
from gpuload.integrations.ray.cluster import connect
address, tokenizer, store, runs, ready, *files = sys.argv[1:]
connect(address)
open(os.path.join(ready, str(os.getpid())), "w").close()
while len(os.listdir(ready)) < int(runs):  # then all of them begin
    time.sleep(0.01)
print(vars(prepare(files, tokenizer, store, address=address, rows_per_task=250, device="cpu", concurrency=1)))
"""


def driver(cluster: Any, tokenizer: str, store: Path, files: list[str], runs: int = 1) -> subprocess.Popen[str]:
    """A process that fills a store; it begins when so many of them are ready."""
    ready = store.with_name("ready")
    ready.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.address, tokenizer, str(store), str(runs), str(ready), *files],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_driver_that_dies_is_continued_where_it_stopped(
    cluster: Any, many: list[str], qwen_folder: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    first = driver(cluster, qwen_folder, store, many)
    wait_for(lambda: len(pieces(store)) >= 3)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    made = {path.name: path.stat().st_mtime_ns for path in pieces(store)}
    done = prepare(many, qwen_folder, str(store), rows_per_task=250, device="cpu")
    assert done.errors == {}
    assert done.pieces <= 25 - len(made)
    check_store(store, many, qwen_folder, monkeypatch)


def test_pieces_that_nobody_has_joined_are_joined(
    cluster: Any, many: list[str], qwen_folder: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unfinished(PieceActor):
        """A worker that dies after each piece, before it joins them."""

        def _make(self, task: PieceTask) -> str:
            if task.number is None:
                return super()._make(task)
            self._write(task.plan.pieces[task.number], task.plan)
            return "made"

    store = tmp_path / "store"
    monkeypatch.setattr("gpuload.integrations.ray.fill.PieceActor", Unfinished)
    done = prepare(many, qwen_folder, str(store), rows_per_task=1000, device="cpu")
    assert (done.errors, done.pieces, done.pieces_found) == ({}, 7, 0)
    check_store(store, many, qwen_folder, monkeypatch)


def test_two_runs_at_once_share_the_work(
    cluster: Any, many: list[str], qwen_folder: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    runs = [driver(cluster, qwen_folder, store, many, runs=2) for _ in range(2)]
    counts = []
    for run in runs:
        out, errors = run.communicate(timeout=600)
        assert run.returncode == 0, f"{run.returncode}: {errors[-3000:]}"
        counts.append(eval(out.splitlines()[-1]))
    assert all(count["errors"] == {} for count in counts)
    assert all(count["pieces"] > 0 for count in counts)
    # A piece that both begin at the same time is made twice.
    assert 25 <= sum(count["pieces"] for count in counts) < 40
    assert sum(count["pieces"] + count["pieces_found"] for count in counts) >= 25
    check_store(store, many, qwen_folder, monkeypatch)


def test_a_store_that_disappears_is_an_error_and_its_pieces_remain(
    cluster: Any, many: list[str], qwen_folder: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    mover = kill_when(lambda: len(pieces(store)) >= 2, lambda: os.rename(store, elsewhere))
    done = prepare(many, qwen_folder, str(store), rows_per_task=250, device="cpu", concurrency=2)
    mover.join()
    assert done.errors
    for error in done.errors.values():
        assert "the store is not there on this node" in error or "check that the storage is there" in error
    assert not store.exists()
    os.rename(elsewhere, store)
    made = len(pieces(store))
    done = prepare(many, qwen_folder, str(store), rows_per_task=250, device="cpu")
    assert done.errors == {}
    assert 0 < done.pieces <= 25 - made
    check_store(store, many, qwen_folder, monkeypatch)


def test_problems_are_clear_sentences(
    cluster: Any, many: list[str], qwen_folder: str, tmp_path: Path, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match="the Ray cluster has no GPU"):
        prepare(many, qwen_folder, str(tmp_path / "store"), device="cuda")
    with pytest.raises(SourceError, match="no file matches"):
        prepare(str(tmp_path / "x*.parquet"), qwen_folder, str(tmp_path / "store"))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match="cannot .* the store .*file"):
        prepare(many, qwen_folder, str(blocked / "store"))
    with pytest.raises(GpuloadError, match="tokens cannot be stored: .*random"):
        prepare(
            many, qwen_folder, str(tmp_path / "s"), chat_template="{{ range(9) | random }}{{ messages[0].content }}"
        )
    # What differs from the driver in a worker is one of gpuload's errors.
    with monkeypatch.context() as patch:
        patch.setattr("gpuload.cache.key._PACKAGES", ("pyarrow",))
        with pytest.raises(GpuloadError, match="^the cache keys of a Ray worker differ from the driver's"):
            prepare(many, qwen_folder, str(tmp_path / "keys"), device="cpu")
    # A file that is damaged is reported; the others are stored.
    content = bytearray(Path(many[0]).read_bytes())
    content[2000:4000] = os.urandom(2000)
    Path(many[0]).write_bytes(content)
    store = tmp_path / "store"
    done = prepare(many, qwen_folder, str(store), device="cpu")
    assert list(done.errors) == [many[0]]
    with pytest.raises(StoreError, match="1 of 3 files are not in the store"):
        check_prepared(done)
    warm = gpuload.load(many[1:], qwen_folder, device="cpu", cache_dir=str(store))
    assert warm.report.from_cache == many[1:]
