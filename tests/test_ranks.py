"""Loads that ranks share: real processes, which communicate by gloo."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from conftest import user
from simulator import engine_on, load_with
from simulator.host_kernels import COMPILER, HostKernels
from tokenizer_cases import small_tokenizer

import gpuload
from gpuload.cache import directory
from gpuload.core.errors import OptionError
from gpuload.engines.host import few
from gpuload.engines.host.engine import HostEngine
from gpuload.pipeline import room
from gpuload.sources import batches

Answer = dict[str, Any]
Run = Callable[..., list[Answer]]
RANKS = 3
ROWS = 400  # of the shipped prompts, in several row groups
BATCH = 128
LIMIT = 110  # tokens; some prompts of `files` are longer
SAMPLE: dict[str, Any] = {"max_samples": 200, "shuffle": True, "seed": 1, "token_cache": False}


def contents(prompts: gpuload.PromptDataset) -> Answer:
    """All of a dataset that does not depend on how it was made."""
    report = prompts.report
    return {
        "tokens": prompts.tokens.to_lists(),
        "columns": prompts.take(prompts.passed_through.names),
        "names": prompts.passed_through.names,
        "origin": [prompts.origin(row) for row in range(len(prompts))],
        "tensors": [row["input_ids"].tolist() for row in prompts.__getitems__(range(min(3, len(prompts))))],
        "fingerprint": prompts.fingerprint,
        "counts": (report.rows_read, report.rows_kept, report.overlong, report.rejected, report.examples),
        "more": (report.tokens, report.shortest, report.longest, report.text_bytes, report.control_rows),
        "rendered": (report.rows_compiled, report.by_reference),
    }


def _serve(rank: int, parent: Connection) -> None:
    """Takes part in the scenarios that arrive, until there are no more."""
    batches.BATCH_ROWS = BATCH
    few.FEW_ROWS = -1  # as in this process: templates are compiled for few rows, too
    while True:
        try:
            count, store, cache, work, arguments = parent.recv()
        except EOFError:
            return
        os.environ["GPULOAD_CACHE"] = cache
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        try:
            dist.barrier()  # the group is complete on all ranks before one leaves it
            answer = work(rank, *arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        finally:
            dist.destroy_process_group()
        parent.send(answer)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """run(count, work, *arguments) → what `work(rank, *arguments)` returns on each of the first `count` ranks.

    Processes are started once, as their imports take longer than most scenarios: each of these has a process group of
    its own, and undoes what it patches.
    """
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[Any, Connection]] = []

    def start() -> None:
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()  # without the process, nothing more arrives
            ranks.append((process, ours))

    def stop() -> None:
        for process, connection in ranks:
            connection.close()
            process.kill()
            process.join()
        ranks.clear()

    def on_ranks(count: int, work: Callable[..., Answer], *arguments: Any) -> list[Answer]:
        if not ranks:
            start()
        store = tmp_path_factory.mktemp("store") / "store"
        try:
            for _, connection in ranks[:count]:
                connection.send((count, str(store), os.environ["GPULOAD_CACHE"], work, arguments))
            for number, (_, connection) in enumerate(ranks[:count]):
                assert connection.poll(300), f"rank {number} hangs"
            return [connection.recv() for _, connection in ranks[:count]]
        except BaseException:
            stop()  # the next scenario has new ranks
            raise

    yield on_ranks
    stop()


@pytest.fixture(scope="module")
def prompts(gsm8k: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some of the shipped prompts."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.parquet"
    pq.write_table(pq.read_table(gsm8k).slice(0, ROWS), file, row_group_size=BATCH)
    return str(file)


@pytest.fixture(scope="module")
def small_folder(qwen: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer that is opened sooner than Qwen's, for scenarios in which it does not matter which one it is."""
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer(qwen.chat_template, ["You are Qwen, created by Alibaba Cloud.", "number long"]).save_pretrained(
        folder
    )
    return str(folder)


def chats_of(rank: int, file: str, tokenizer: str) -> Answer:
    chats = gpuload.load_chats(file, tokenizer, distributed=True, token_cache=False)
    rows = chats.__getitems__(range(len(chats)))
    packs = [batch["labels"].tolist() for batch in chats.loader(batch_size=2, packing="bfd", pack_length=256)]
    report = chats.report
    return {"rows": rows, "packs": packs, "counts": (report.rows_read, report.rows_kept, report.examples)}


def test_ranks_share_a_load_for_sft(run: Run, small_folder: str, tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": "four"}]
    table = pa.table({"messages": [user(f"What is {k}?") + answers * (k % 5 != 0) for k in range(3 * BATCH)]})
    file = tmp_path / "chats.parquet"
    pq.write_table(table, file)
    alone = gpuload.load_chats(str(file), small_folder, token_cache=False)
    expected = {
        "rows": alone.__getitems__(range(len(alone))),
        "packs": [batch["labels"].tolist() for batch in alone.loader(batch_size=2, packing="bfd", pack_length=256)],
        "counts": (alone.report.rows_read, alone.report.rows_kept, alone.report.examples),
    }
    assert run(2, chats_of, str(file), small_folder) == [expected, expected]


def pairs_of(rank: int, files: list[str], tokenizer: str, cases: list[dict[str, Any]], shared: bool = True) -> Answer:
    found = []
    for options in cases:
        pairs = gpuload.load_pairs(files, tokenizer, distributed=shared, token_cache=False, **options)
        batches = [batch["input_ids"].tolist() for batch in pairs.loader(batch_size=3)]
        report = pairs.report
        counts = (report.rows_read, report.rows_kept, report.examples, report.overlong)
        found.append((pairs.__getitems__(range(len(pairs))), batches, counts))
    return {"found": found}


def test_ranks_share_a_load_of_pairs(run: Run, small_folder: str, tmp_path: Path) -> None:
    files = []
    for part in range(2):
        rows = [
            {
                "prompt": user(f"{part} {k} " + "long " * (k % 40)),
                "chosen": [{"role": "assistant", "content": "four"}] if k % 5 else [],
                "rejected": [{"role": "assistant", "content": str(k)}],
            }
            for k in range(2 * BATCH - part)
        ]
        files.append(str(tmp_path / f"{part}.parquet"))
        pq.write_table(pa.Table.from_pylist(rows), files[-1])
    cases: list[dict[str, Any]] = [{"objective": name, "max_length": 90} for name in ("dpo", "rm", "kto")]
    cases.append({"objective": "kto", "max_samples": 7, "shuffle": True, "seed": 1, "kl_batch_size": 3})
    expected = pairs_of(0, files, small_folder, cases, shared=False)
    assert all(rows and counts[-1] for rows, _, counts in expected["found"][:3])  # some are overlong
    assert run(2, pairs_of, files, small_folder, cases) == [expected, expected]


def load(rank: int, files: Any, tokenizer: str, options: dict[str, Any]) -> Answer:
    prompts = gpuload.load(files, tokenizer, distributed=True, progress=False, **options)
    return contents(prompts) | {"into_cache": len(prompts.report.into_cache), "notes": prompts.report.notes}


def load_several(rank: int, cases: list[tuple[Any, str, dict[str, Any]]]) -> Answer:
    return {str(number): load(rank, *case) for number, case in enumerate(cases)}


def same(found: Answer, expected: Answer) -> None:
    for key, value in expected.items():
        assert found[key] == value, key


def test_every_rank_has_what_one_process_loads(
    run: Run, files: list[str], prompts: str, small_folder: str, qwen_folder: str
) -> None:
    options: list[dict[str, Any]] = [
        {"max_prompt_length": LIMIT},
        {"max_prompt_length": LIMIT, "return_raw_chat": True, "return_full_prompt": True, "token_cache": False},
        {"max_samples": 100, "shuffle": True, "seed": 3, "filter_overlong_prompts": False, "truncation": "middle"},
        {"max_samples": 2},  # fewer rows than ranks
    ]
    options = [{"token_cache": False} | more for more in options]  # a sample of cached rows has no count of `untrusted`
    cases: list[tuple[Any, str, dict[str, Any]]] = [(files, small_folder, more) for more in options]
    cases.append((prompts, qwen_folder, {"token_cache": False}))
    answers = run(3, load_several, cases)
    for number, (source, tokenizer, more) in enumerate(cases):
        expected = contents(gpuload.load(source, tokenizer, **more))
        assert (expected["counts"][2] > 0) == ("max_prompt_length" in more)
        for answer in answers:
            assert "error" not in answer, answer
            same(answer[str(number)], expected)
            assert "the work was shared by 3 ranks" in answer[str(number)]["notes"]


def shapes_of(rank: int, file: str, tokenizer: str, shared: bool = True) -> Answer:
    check = gpuload.load(file, tokenizer, distributed=shared, token_cache=False, verify="sample").report.check
    return {"shapes": check.shapes, "not compared": check.shapes_not_compared}


@pytest.mark.parametrize("mixed", [False, True])  # rows of mixed forms are Python objects
def test_a_shape_that_several_ranks_see_is_one(mixed: bool, run: Run, small_folder: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "text" if mixed and k % 3 == 0 else user("x") * (1 + k % 3)} for k in range(60)]
    file.write_text("\n".join(map(json.dumps, rows)))
    expected = shapes_of(0, str(file), small_folder, shared=False)
    assert expected == {"shapes": 3, "not compared": 0}
    assert run(2, shapes_of, str(file), small_folder) == [expected, expected]


def load_on_device(rank: int, files: list[str], tokenizer: str) -> Answer:
    return contents(load_with(engine_on(HostKernels()), files, tokenizer, distributed=True, **SAMPLE))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_ids_on_a_device(run: Run, files: list[str], small_folder: str) -> None:
    expected = contents(gpuload.load(files, small_folder, **SAMPLE))
    for answer in run(2, load_on_device, files, small_folder):
        assert "error" not in answer, answer
        same(answer, expected)


def count_encoded(rank: int, files: list[str], tokenizer: str) -> Answer:
    rows = 0
    encode = HostEngine.encode

    def counted(self: HostEngine, text: Any) -> Any:
        nonlocal rows
        rows += len(text)
        return encode(self, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostEngine, "encode", counted)
        prompts = gpuload.load(files, tokenizer, distributed=True, token_cache=False)
    return {"encoded": rows, "rows": len(prompts)}


def test_each_prompt_is_tokenized_once(run: Run, prompts: str, small_folder: str) -> None:
    total = len(gpuload.load(prompts, small_folder))
    answers = run(3, count_encoded, [prompts], small_folder)
    assert [answer["rows"] for answer in answers] == [total] * 3
    encoded = [answer["encoded"] for answer in answers]
    assert sum(encoded) == total
    assert max(encoded) <= -(-total // 3)


def test_files_that_one_rank_reads_are_cached(run: Run, tmp_path: Path, qwen_folder: str, warm_cache: Path) -> None:
    files = []
    for number, rows in enumerate((40, 35, 45)):
        files.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(pa.table({"prompt": [user(f"{number} {row}") for row in range(rows)]}), files[-1])
    answers = run(2, load, files[:2], qwen_folder, {})
    assert [answer["into_cache"] for answer in answers] == [2, 2]
    assert gpuload.load(files[:2], qwen_folder).report.from_cache == files[:2]
    answers = run(2, load, files, qwen_folder, {})
    same(answers[1], contents(gpuload.load(files, qwen_folder, token_cache=False)))


def with_seed_of_chance(rank: int, file: str, tokenizer: str) -> Answer:
    template = "{{ strftime_now('%H:%M:%S.%f') }}{{ messages[0].content }}"
    options = {"max_samples": 7, "shuffle": True, "chat_template": template}
    return contents(gpuload.load(file, tokenizer, distributed=True, **options))


def test_chance_and_time_of_day_are_those_of_rank_0(run: Run, prompts: str, small_folder: str) -> None:
    first, *others = run(2, with_seed_of_chance, prompts, small_folder)
    for other in others:
        same(other, first)


def fails_on_one(rank: int, file: str, tokenizer: str) -> Answer:
    def wrong(*arguments: Any) -> None:
        raise RuntimeError("no more electricity")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(HostEngine, "encode", wrong)
        return load(rank, file, tokenizer, {"token_cache": False})


def other_options(rank: int, file: str, tokenizer: str) -> Answer:
    return load(rank, file, tokenizer, {"max_prompt_length": 100 + rank})


def other_rows(rank: int, file: str, tokenizer: str) -> Answer:
    """As a `datasets.Dataset` that each rank has shuffled without a seed."""
    table = pq.read_table(file)
    return load(rank, table if rank == 0 else table.take(list(reversed(range(len(table))))), tokenizer, {})


def all_overlong(rank: int, file: str, tokenizer: str) -> Answer:
    return load(rank, file, tokenizer, {"max_prompt_length": 1})


def test_all_ranks_raise(run: Run, prompts: str, small_folder: str) -> None:
    first, second = run(2, fails_on_one, prompts, small_folder)
    assert second["error"] == "RuntimeError: no more electricity"
    assert "another rank failed: rank 1: RuntimeError: no more electricity" in first["error"]
    for answer in run(2, other_options, prompts, small_folder):
        assert "OptionError: distributed=True: max_prompt_length is 100 on rank 0 and 101 on rank 1" in answer["error"]
    for answer in run(2, other_rows, prompts, small_folder):
        assert "OptionError: distributed=True: the content of the files is " in answer["error"]
        assert "call load with the same arguments on every rank" in answer["error"]
    for answer in run(2, all_overlong, prompts, small_folder):
        assert f"NoRowsError: all {ROWS} rows were dropped" in answer["error"]


def differs(rank: int, file: str, tokenizer: str, strict: bool) -> Answer:
    """One rank's fast path is wrong in its first row, which is always compared."""
    fetch = HostEngine.fetch

    def wrong(ids: Any, rows: Any) -> Any:
        found = fetch(ids, rows)
        found.values[:] += 1
        return found

    wrong_once = iter([wrong])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(HostEngine, "fetch", staticmethod(lambda *given: next(wrong_once, fetch)(*given)))
        return load(rank, file, tokenizer, {"strict": strict, "token_cache": False, "max_samples": 40})


def test_a_token_that_differs_on_one_rank(run: Run, prompts: str, small_folder: str) -> None:
    for answer in run(2, differs, prompts, small_folder, True):
        assert answer["error"].startswith("MismatchError: the fast path differs from the tokenizer")
    expected = contents(gpuload.load(prompts, small_folder, max_samples=40, token_cache=False))
    for answer in run(2, differs, prompts, small_folder, False):
        assert answer["tokens"] == expected["tokens"]
        assert any("the fast path differs" in note for note in answer["notes"])


def test_without_a_process_group(prompts: str, small_folder: str) -> None:
    with pytest.raises(OptionError, match="init_process_group before load"):
        gpuload.load(prompts, small_folder, distributed=True)


def test_a_store_on_disk(run: Run, files: list[str], qwen_folder: str, warm_cache: Path) -> None:
    """One rank makes it, and the others use its files."""
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (files, qwen_folder, {"store": "disk", "max_prompt_length": 60}),
        (files, qwen_folder, {"store": "disk", "max_samples": 50, "shuffle": True, "seed": 1}),
    ]
    answers = run(3, load_several, cases)
    assert not [answer for answer in answers if "error" in answer], answers
    assert sorted(answer["0"]["into_cache"] for answer in answers) == [0, 0, len(files)]
    expected = contents(gpuload.load(files, qwen_folder, max_prompt_length=60, token_cache=False))
    sample = contents(gpuload.load(files, qwen_folder, max_samples=50, shuffle=True, seed=1, store="memory"))
    for answer in answers:
        same(answer["0"], expected)
        same(answer["1"], sample)


def load_auto(rank: int, full: int, files: list[str], tokenizer: str) -> Answer:
    """With little memory everywhere, and a full disk on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "free_memory", lambda: 10**4)
        if rank == full:
            patch.setattr(directory, "_free", lambda _: 0)
        return load(rank, files, tokenizer, {})


@pytest.mark.parametrize(("full", "entries"), [(1, 0), (-1, 6)])
def test_auto_is_memory_if_a_disk_is_full(
    run: Run, full: int, entries: int, files: list[str], small_folder: str, warm_cache: Path
) -> None:
    expected = contents(gpuload.load(files, small_folder, token_cache=False))
    for answer in run(2, load_auto, full, files, small_folder):
        same(answer, expected)
    assert len(list((warm_cache.parent / "store").glob("*"))) == entries


def test_a_store_on_disk_that_fails(run: Run, files: list[str], small_folder: str, warm_cache: Path) -> None:
    Path(warm_cache.parent).write_text("not a directory")
    for rank, answer in enumerate(run(2, load, files, small_folder, {"store": "disk"})):
        assert answer["error"].startswith("StoreError: " if rank == 0 else "GpuloadError: "), answer
        assert "cannot write the store" in answer["error"]
