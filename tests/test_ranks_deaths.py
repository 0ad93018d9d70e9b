"""Loads that ranks share, and of which one fails, dies, comes late or never: the others must not wait for it.

Real processes, which communicate by gloo. The intervals are short, so that a death is noticed within seconds.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from conftest import user
from torch import multiprocessing

import gpuload
from gpuload.core.errors import OptionError
from gpuload.pipeline import heartbeat

Answer = dict[str, Any]
BEAT, SILENCE = 0.1, 3.0
LONG_SILENCE, HELD = 12.0, 17  # in a fifth of the first it is noticed that a rank does not beat; then torch is imported
PATIENCE = "GPULOAD_RANKS_TIMEOUT"


def _rank(
    rank: int, count: int, store: str, answers: Any, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    heartbeat._BEAT, heartbeat._SILENCE, heartbeat._LOG = BEAT, SILENCE, 0.3
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    heartbeat.logger.addHandler(handler)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    answer: Answer = {}
    started = time.monotonic()
    try:
        answer = {"rows": len(work(rank, *arguments))}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.put((rank, answer | {"seconds": time.monotonic() - started, "logged": logged}))
    answers.close()
    answers.join_thread()
    os._exit(0)  # the process group cannot be destroyed without the dead


def run(
    work: Callable[..., Any], *arguments: Any, dead: tuple[int, ...] = (), count: int = 2, at: Path
) -> list[Answer]:
    """What `work(rank, *arguments)` returns on each rank that does not die."""
    context = multiprocessing.get_context("forkserver")  # imports once for all processes
    context.set_forkserver_preload(["gpuload.pipeline.run", "transformers.models.auto.tokenization_auto", "awkward"])
    answers = context.Queue()
    store = f"file://{at}/store"  # a store in no rank's process
    processes = [
        context.Process(target=_rank, args=(rank, count, store, answers, work, arguments)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=120) for _ in range(count - len(dead)))
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not set(found) & set(dead)
    return [found.get(rank, {}) for rank in range(count)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": [user(f"What is {k}?") for k in range(30)]}), path)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small tokenizer, which opens in milliseconds."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="!")
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    made.save_pretrained(folder)
    return folder


def load(file: str, tokenizer: str, **options: Any) -> gpuload.PromptDataset:
    return gpuload.load(file, tokenizer, distributed=True, progress=False, token_cache=False, **options)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- inside of the load ------------------------------------------------------------------------------------------------


def missing_on_one(rank: int, file: str, tokenizer: str) -> Any:
    if rank == 1:
        time.sleep(0.5)  # the others wait by then
        file = f"{file}.nowhere"
    return load(file, f"{tokenizer}/nowhere" if rank == 2 else tokenizer)


def test_a_missing_file_or_tokenizer_on_one_rank(file: str, tokenizer: str, tmp_path: Path) -> None:
    first, second, third = run(missing_on_one, file, tokenizer, count=3, at=tmp_path)
    assert "SourceError" in second["error"] or "another rank failed: rank 2" in second["error"]
    assert "TokenizerError" in third["error"]
    assert "distributed=True: another rank failed: rank" in first["error"]
    assert "nowhere" in first["error"]


def killed_in_the_middle(rank: int, dying: int, file: str, tokenizer: str, kind: str) -> Any:
    from gpuload.engines.host.engine import HostEngine

    if rank == dying:
        HostEngine.encode = lambda *_: die()  # type: ignore[method-assign,assignment]
    return load(file, tokenizer, store=kind)


@pytest.mark.parametrize(("dying", "kind"), [(0, "memory"), (1, "memory"), (0, "disk")])
def test_a_rank_that_is_killed(dying: int, kind: str, file: str, tokenizer: str, tmp_path: Path) -> None:
    answers = run(killed_in_the_middle, dying, file, tokenizer, kind, dead=(dying,), at=tmp_path)
    for rank, answer in enumerate(answers):
        if rank != dying:
            assert f"GpuloadError: distributed=True: another rank failed: rank {dying}: no sign" in answer["error"]
            assert answer["seconds"] < 30


def killed_in_the_exchange(rank: int, file: str, tokenizer: str) -> Any:
    if rank == 1:
        dist.broadcast = lambda *_: die()
    return load(file, tokenizer)


def test_a_rank_that_is_killed_while_rows_are_exchanged(file: str, tokenizer: str, tmp_path: Path) -> None:
    first, _, third = run(killed_in_the_exchange, file, tokenizer, dead=(1,), count=3, at=tmp_path)
    for answer in (first, third):
        assert answer["error"].startswith("GpuloadError: distributed=True: another rank failed: rank"), answer


def stopped(rank: int, file: str, tokenizer: str) -> Any:
    """A rank whose machine stops, without its connections being closed."""
    from gpuload.engines.host.engine import HostEngine

    if rank == 1:
        HostEngine.encode = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign,assignment]
    return load(file, tokenizer)


def test_a_rank_that_stands_still(file: str, tokenizer: str, tmp_path: Path) -> None:
    first, _ = run(stopped, file, tokenizer, dead=(1,), at=tmp_path)
    assert "another rank failed: rank 1: no sign of life" in first["error"]


def slow(rank: int, file: str, tokenizer: str) -> Any:
    from gpuload.engines.host.engine import HostEngine

    encode = HostEngine.encode

    def slowly(*given: Any) -> Any:
        time.sleep(3 * SILENCE)
        return encode(*given)

    if rank == 1:
        HostEngine.encode = slowly  # type: ignore[method-assign]
    os.environ[PATIENCE] = "30"
    return load(file, tokenizer)


def test_a_slow_share_is_waited_for(file: str, tokenizer: str, tmp_path: Path) -> None:
    answers = run(slow, file, tokenizer, at=tmp_path)
    assert [answer.get("rows") for answer in answers] == [30, 30], answers
    assert min(answer["seconds"] for answer in answers) > 3 * SILENCE


def holds_the_lock(rank: int, busy: int, file: str, tokenizer: str) -> Any:
    """No other Python thread of a rank runs while it works, for longer than a dead one would be silent."""
    from gpuload.engines.host.engine import HostEngine

    heartbeat._SILENCE = LONG_SILENCE
    encode = HostEngine.encode

    def without_releasing_it(*given: Any) -> Any:
        ctypes.PyDLL(None).sleep(HELD)
        return encode(*given)

    if rank == busy:
        HostEngine.encode = without_releasing_it  # type: ignore[method-assign]
    return load(file, tokenizer)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_that_holds_the_interpreter_lock_is_alive(busy: int, file: str, tokenizer: str, tmp_path: Path) -> None:
    answers = run(holds_the_lock, busy, file, tokenizer, at=tmp_path)
    assert [answer.get("rows") for answer in answers] == [30, 30], answers
    assert min(answer["seconds"] for answer in answers) > HELD


HOLDER = """
import ctypes, sys, time
import torch.distributed as dist
from gpuload.pipeline import heartbeat
heartbeat._BEAT, heartbeat._SILENCE = 0.1, 2.0
beats = heartbeat.Heartbeat(dist.TCPStore("localhost", int(sys.argv[1])), 1, 2)
time.sleep(1.0)
ctypes.PyDLL(None).sleep(600)
"""


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_a_rank_that_holds_the_lock_is_stopped_or_killed() -> None:
    """Another process beats for it exactly as long as it runs, and does not outlive it."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(store.port)])
    try:
        key = f"{dist.PrefixStore('gpuload/1', store).get('name').decode()}/beats/1"

        def beaten(seconds: float) -> int:
            before = store.add(key, 0)
            time.sleep(seconds)
            return store.add(key, 0) - before

        until(lambda: store.add(key, 0) > 0)
        time.sleep(2.0)  # the lock is held from here on
        until(lambda: beaten(0.5) > 1)
        (stand_in,) = children(process.pid)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        assert beaten(1.0) == 0
        process.send_signal(signal.SIGCONT)
        until(lambda: beaten(0.5) > 1)
        process.kill()  # a zombie, until it is waited for
        until(lambda: not Path(f"/proc/{stand_in}").exists())
        assert beaten(0.5) == 0
    finally:
        process.kill()
        process.wait()


def until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)


def again(rank: int, file: str, tokenizer: str) -> Any:
    """After an error on all ranks, the same ranks load again."""
    with pytest.raises(gpuload.GpuloadError, match="nowhere"):
        load(f"{file}.nowhere" if rank == 1 else file, tokenizer)
    return load(file, tokenizer)


def test_ranks_can_load_again_after_an_error(file: str, tokenizer: str, tmp_path: Path) -> None:
    answers = run(again, file, tokenizer, at=tmp_path)
    assert [answer.get("rows") for answer in answers] == [30, 30], answers


def exits_at_once(rank: int, port: Path, file: str, tokenizer: str) -> Any:
    """The store is in the process of rank 0, which fails, or is done, and exits."""
    dist.barrier()  # a rank whose group is not complete yet would fail when the other one leaves it
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    del store  # the group's is the last reference
    try:
        return load(f"{file}.nowhere" if rank == 0 and "fails" in file else file, tokenizer)
    finally:
        if rank == 0:
            dist.destroy_process_group()


@pytest.mark.parametrize("name", ["data", "fails"])
def test_the_rank_with_the_store_exits_at_once(name: str, file: str, tokenizer: str, tmp_path: Path) -> None:
    file = str(Path(file).rename(tmp_path / f"{name}.parquet"))
    first, second = run(exits_at_once, tmp_path / "port", file, tokenizer, at=tmp_path)
    if name == "data":
        assert (first.get("rows"), second.get("rows")) == (30, 30), (first, second)
    else:
        assert "SourceError" in first["error"]
        assert "another rank failed: rank 0: SourceError" in second["error"]


# -- before ------------------------------------------------------------------------------------------------------------


def late(rank: int, patience: str, file: str, tokenizer: str) -> Any:
    os.environ[PATIENCE] = patience
    if rank == 1:
        time.sleep(4.0)
    return load(file, tokenizer)


def test_missing_ranks_are_named_and_waited_for(file: str, tokenizer: str, tmp_path: Path) -> None:
    answers = run(late, "60", file, tokenizer, at=tmp_path)
    assert [answer.get("rows") for answer in answers] == [30, 30], answers
    assert len(answers[0]["logged"]) > 1
    assert "gpuload: distributed=True: 1 of 2 ranks have not begun this load after" in answers[0]["logged"][0]
    assert answers[0]["logged"][0].endswith(" s: 1")


def never(rank: int, file: str, tokenizer: str) -> Any:
    os.environ[PATIENCE] = "1"
    if rank == 1:
        die()
    return load(file, tokenizer)


def test_patience_for_missing_ranks_ends(file: str, tokenizer: str, tmp_path: Path) -> None:
    first, _, third = run(never, file, tokenizer, dead=(1,), count=3, at=tmp_path)
    for answer in (first, third):
        assert "1 of 3 ranks have not begun this load within" in answer["error"]
    assert any("set GPULOAD_RANKS_TIMEOUT to more seconds" in answer["error"] for answer in (first, third))


@pytest.mark.parametrize("value", ["soon", "0", "-3", "inf", "nan"])
def test_a_patience_that_is_no_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, value)
    with pytest.raises(OptionError, match=f"GPULOAD_RANKS_TIMEOUT='{value}': expected a number of seconds > 0"):
        heartbeat.patience()
