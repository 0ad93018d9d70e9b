"""read_prompts(), read_chats() and read_pairs() on a Ray cluster of three nodes: rows, order, batches and report are
those of `load`."""

import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("ray.data", reason="Ray is not installed: make ray-test")

import gpuload
from gpuload.core.errors import DataError, DeviceError, OptionError, PromptTooLongError, SourceError
from gpuload.core.keywords import LoadKeywords, WorkerKeywords
from gpuload.integrations.ray import collate_fn, read_chats, read_pairs, read_prompts, report
from tests.ray_cases import cluster_of, origins, rows_of, split_file
from tests.test_pairs import EXPLICIT as PAIRS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(2) as started:
        yield started


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, gsm8k: str) -> list[str]:
    """Three files of 400, 30 and 170 rows, in row groups of 50."""
    return split_file(gsm8k, tmp_path_factory.mktemp("few"), [400, 30, 170], 50)


def same_rows(table: pa.Table, expected: gpuload.PromptDataset) -> None:
    assert origins(table) == [tuple(place) for place in expected.origins.tolist()]
    passed = [name for name in expected.passed_through.names if name in table.schema.names]
    assert set(table.schema.names) >= set(expected.passed_through.names)
    taken = expected.take(passed)
    for name in passed:
        assert gpuload.sources.columns.to_python(table[name].combine_chunks()) == taken[name], name


def same_batch(found: Any, expected: Any) -> None:
    assert set(found) - {"origin"} == set(expected)
    for name, values in expected.items():
        if isinstance(values, torch.Tensor):
            assert found[name].dtype == values.dtype
            assert torch.equal(found[name], values), name
        else:
            assert found[name].dtype == object
            assert found[name].tolist() == values.tolist(), name


def same_report(found: Any, expected: Any) -> None:
    for name in (
        "files max_prompt_length limit_name rows_read rows_kept overlong overlong_dropped rejected rows_compiled "
        "by_reference control_rows sanitized source_bytes text_bytes tokens shortest longest"
    ).split():
        assert getattr(found, name) == getattr(expected, name), name
    assert found.check.rows > 0
    assert found.check.mismatches == []


def test_rows_order_batches_and_report_are_those_of_load(cluster: Any, few: list[str], qwen_folder: str) -> None:
    options: dict[str, Any] = {"max_prompt_length": 100, "device": "cpu"}
    dataset = read_prompts(few, qwen_folder, rows_per_task=100, **options)
    with pytest.raises(OptionError, match="expected the result of read_prompts"):
        report(dataset.limit(3))
    before = report(dataset)
    assert (before.rows_read, before.files) == (0, few)
    expected = gpuload.load(few, qwen_folder, **options)
    table = rows_of(dataset)
    assert table["raw_prompt_ids"].type == pa.list_(pa.int32())
    assert table["raw_prompt_ids"].to_pylist() == expected.tokens.to_lists()
    same_rows(table, expected)
    same_report(report(dataset), expected.report)
    # A second epoch: each part is counted once.
    collate = pickle.loads(pickle.dumps(collate_fn(dataset)))
    batches = dataset.iter_torch_batches(batch_size=64, collate_fn=collate)
    for found, wanted in zip(batches, expected.loader(64), strict=True):
        same_batch(found, wanted)
    same_report(report(dataset), expected.report)
    assert "7 of 7 parts have been tokenized" in str(report(dataset))


def test_streaming_split_has_each_row_once(cluster: Any, few: list[str], qwen_folder: str) -> None:
    import ray

    dataset = read_prompts(few, qwen_folder, rows_per_task=50, max_prompt_length=128, device="cpu")
    collate = collate_fn(dataset, padding="longest")

    def consume(shard: Any) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
        rows = []
        for batch in shard.iter_torch_batches(batch_size=32, collate_fn=collate):
            assert batch["input_ids"].shape[1] == batch["attention_mask"].sum(1).max()
            rows += [tuple(ids) for ids in batch["raw_prompt_ids"]]
        return rows

    shards = dataset.streaming_split(2)
    found = ray.get([ray.remote(num_cpus=0)(consume).remote(shard) for shard in shards])
    expected = gpuload.load(few, qwen_folder, max_prompt_length=128, device="cpu")
    assert all(found)
    assert sorted(found[0] + found[1]) == sorted(map(tuple, expected.tokens.to_lists()))


def test_files_of_different_columns_rejected_and_overlong_rows(
    cluster: Any, files: list[str], qwen_folder: str
) -> None:
    options: dict[str, Any] = {"max_prompt_length": 50, "device": "cpu", "return_raw_chat": False}
    expected = gpuload.load(files, qwen_folder, **options)
    dataset = read_prompts(files, qwen_folder, rows_per_task=1, **options)
    table = rows_of(dataset)
    assert table["raw_prompt_ids"].to_pylist() == expected.tokens.to_lists()
    same_rows(table, expected)
    found = report(dataset)
    same_report(found, expected.report)
    assert found.examples == expected.report.examples
    batches = list(dataset.iter_torch_batches(batch_size=100, collate_fn=collate_fn(dataset)))
    for batch, wanted in zip(batches, expected.loader(100), strict=True):
        same_batch(batch, wanted)


def test_truncation_max_samples_and_text(cluster: Any, few: list[str], qwen_folder: str) -> None:
    options: dict[str, Any] = {
        "max_prompt_length": 60,
        "filter_overlong_prompts": False,
        "truncation": "middle",
        "return_full_prompt": True,
        "return_raw_chat": True,
        "max_samples": 425,
        "device": "cpu",
    }
    expected = gpuload.load(few, qwen_folder, **options)
    dataset = read_prompts(few, qwen_folder, rows_per_task=150, **options)
    same_rows(rows_of(dataset), expected)
    (batch,) = dataset.iter_torch_batches(batch_size=500, collate_fn=collate_fn(dataset))
    same_batch(batch, expected.batch(range(425)))
    dataset = read_prompts(few, qwen_folder, **options | {"truncation": "error", "return_full_prompt": False})
    assert max(map(len, rows_of(dataset)["raw_prompt_ids"].to_pylist())) > 60
    with pytest.raises(Exception, match=r"row \d+ has \d+ tokens, which exceeds max_prompt_length=60"):
        list(dataset.iter_torch_batches(batch_size=500, collate_fn=collate_fn(dataset)))
    assert issubclass(PromptTooLongError, ValueError)


def test_a_file_that_changes_before_its_task_is_an_error(
    cluster: Any, few: list[str], qwen_folder: str, tmp_path: Path
) -> None:
    (file,) = split_file(few[0], tmp_path, [100], 50)
    dataset = read_prompts(file, qwen_folder, device="cpu")
    pq.write_table(pq.read_table(few[0]).slice(100, 100), file)
    with pytest.raises(Exception, match="the file was changed while it was loaded"):
        dataset.take_all()


def test_chats_are_those_of_load_chats(cluster: Any, tmp_path: Path, gsm8k: str, qwen_folder: str) -> None:
    table = pq.read_table(gsm8k).slice(0, 300)
    chats = [
        [*row["prompt"], {"role": "assistant", "content": row["reward_model"]["ground_truth"] * (1 + n % 9)}]
        for n, row in enumerate(table.to_pylist())
    ]
    file = str(tmp_path / "chats.parquet")
    pq.write_table(pa.table({"messages": chats, "n": range(300)}), file, row_group_size=64)
    for options in ({"max_length": 120}, {"max_length": 90, "overlong": "keep_end", "loss_on": "last"}):
        expected = gpuload.load_chats(file, qwen_folder, device="cpu", **options)
        dataset = read_chats(file, qwen_folder, device="cpu", rows_per_task=100, **options)
        found = rows_of(dataset)
        same_rows(found, expected)
        assert found.select(["input_ids", "labels"]).equals(expected.to_arrow(columns=[]).read_all())
        same_report(report(dataset), expected.report)
        for padding in (None, "max_length"):
            batches = dataset.iter_torch_batches(batch_size=50, collate_fn=collate_fn(dataset, padding))
            for batch, wanted in zip(batches, expected.loader(50, padding=padding or "longest"), strict=True):
                same_batch(batch, wanted)


@pytest.mark.parametrize("options", [{}, {"drop_nulls": True}, {"normalize_messages": "auto"}], ids=str)
def test_chats_with_marks_and_nulls(cluster: Any, tmp_path: Path, qwen_folder: str, options: dict[str, Any]) -> None:
    """Workers know what the driver has found, and change messages as `load_chats` does."""

    def answer(n: int) -> dict[str, Any]:
        arguments = {"x": n} if n % 2 else {"y": n}
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {"role": "assistant", "content": None if n % 3 else "", "tool_calls": calls, "train": n % 4 > 0}

    chats = [[{"role": "user", "content": "q"}, answer(n), {"role": "assistant", "content": "a"}] for n in range(60)]
    file = str(tmp_path / "chats.parquet")
    pq.write_table(pa.table({"messages": chats}), file, row_group_size=20)
    expected = gpuload.load_chats(file, qwen_folder, device="cpu", **options)
    assert expected.report.notes[0] == "format: messages, loss on marked"
    found = rows_of(read_chats(file, qwen_folder, device="cpu", rows_per_task=20, **options))
    assert found.select(["input_ids", "labels"]).equals(expected.to_arrow(columns=[]).read_all())


def test_rows_as_served_are_those_of_load_chats(cluster: Any, tmp_path: Path, gsm8k: str, qwen_folder: str) -> None:
    """`test_served_parts.py` has the options."""
    messages = [message for row in pq.read_table(gsm8k).slice(0, 40).to_pylist() for message in row["prompt"]]
    answers = [{"role": "assistant", "content": text} for text in ("4.", "\n\nSo.", "")]
    chats = [[messages[n], answers[n % 3], messages[n + 1], answers[n % 2]] for n in range(39)]
    file = str(tmp_path / "chats.parquet")
    pq.write_table(pa.table({"messages": chats * 3, "n": range(117)}), file, row_group_size=20)
    options: dict[str, Any] = {"turns": "served", "max_samples": 90}
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role == 'user' }}<|im_end|>"
    )
    options["chat_template"] = template + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    expected = gpuload.load_chats([file, file], qwen_folder, **options)
    dataset = read_chats([file, file], qwen_folder, rows_per_task=40, **options)
    found = rows_of(dataset)
    same_rows(found, expected)
    assert len(found) > report(dataset).rows_kept == expected.report.rows_kept
    batches = dataset.iter_torch_batches(batch_size=50, collate_fn=collate_fn(dataset))
    for batch, each in zip(batches, expected.loader(50, padding="longest"), strict=True):
        same_batch(batch, each)
    same_report(report(dataset), expected.report)
    options = {"turns": "served", "prompt_key": "messages", "device": "cpu"}
    wanted = gpuload.load(file, qwen_folder, **options).to_arrow().read_all()
    assert rows_of(read_prompts(file, qwen_folder, **options)).select(wanted.schema.names).equals(wanted)


def test_chats_with_weights(cluster: Any, tmp_path: Path, qwen_folder: str) -> None:
    """The weights are those of all files, in each worker and in batches."""
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b" * n, "weight": n % 20 / 8}]
        for n in range(1, 60)
    ]
    file = str(tmp_path / "chats.parquet")
    pq.write_table(pa.table({"messages": chats}), file, row_group_size=20)
    expected = gpuload.load_chats(file, qwen_folder, device="cpu")
    dataset = read_chats(file, qwen_folder, device="cpu", rows_per_task=20)
    found = rows_of(dataset).select(["input_ids", "labels", "loss_weight"])
    assert found.equals(expected.to_arrow(columns=[]).read_all())
    batches = dataset.iter_torch_batches(batch_size=25, collate_fn=collate_fn(dataset))
    for batch, wanted in zip(batches, expected.loader(25), strict=True):
        assert "loss_weight" in batch
        same_batch(batch, wanted)


@pytest.mark.parametrize("objective", ["dpo", "rm"])
def test_pairs_are_those_of_load_pairs(cluster: Any, tmp_path: Path, qwen_folder: str, objective: Any) -> None:
    file = str(tmp_path / "pairs.parquet")
    rows = [{**PAIRS[n % len(PAIRS)], "margin": n / 7} for n in range(90)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=30)
    options: dict[str, Any] = {"objective": objective, "device": "cpu", "overlong": "keep_end", "max_length": 40}
    expected = gpuload.load_pairs(file, qwen_folder, **options)
    dataset = read_pairs(file, qwen_folder, rows_per_task=30, **options)
    found = rows_of(dataset)
    same_rows(found, expected)
    wanted = expected.to_arrow().read_all()
    assert found.select(wanted.schema.names).to_pylist() == wanted.to_pylist()
    same_report(report(dataset), expected.report)
    batches = dataset.iter_torch_batches(batch_size=32, collate_fn=collate_fn(dataset))
    for batch, each in zip(batches, expected.loader(32), strict=True):
        same_batch(batch, each)


@pytest.mark.parametrize("source", ["labels", "tags", "pairs"])
def test_kto_rows_are_those_of_load_pairs(
    cluster: Any, tmp_path: Path, qwen_folder: str, source: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Single answers, of which the files say which are good ones, and pairs; with rows that are dropped."""
    file, name = str(tmp_path / "rows.parquet"), {"labels": "label", "tags": "kto_tag"}.get(source)
    rows = [{**PAIRS[n % len(PAIRS)], "n": n} for n in range(90)]
    if name is not None:
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen"], "n": row["n"], name: row["n"] % 3 == 0}
            for row in rows
        ]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=30)
    options: dict[str, Any] = {"device": "cpu", "max_length": 34} | ({} if name else {"objective": "kto"})
    dataset = read_pairs(file, qwen_folder, rows_per_task=30, **options)
    found = rows_of(dataset)
    assert "KL_completion_ids" not in found.schema.names
    # Pairs become single completions task by task: all good ones of its rows, then the others.
    parts = [gpuload.load_pairs(pq.read_table(file).slice(k, 30), qwen_folder, **options) for k in (0, 30, 60)]
    tables = [each.to_arrow().read_all().drop_columns("KL_completion_ids") for each in parts]
    wanted = pa.concat_tables(tables)
    assert found.select(wanted.schema.names).to_pylist() == wanted.to_pylist()
    whole = gpuload.load_pairs(file, qwen_folder, **options)
    assert len(whole) == len(found) < 90 * (1 + (name is None))
    names = ["prompt_ids", "completion_ids", "label", "n"]
    if name is not None:
        same_rows(found, whole)
    assert sorted(map(repr, found.select(names).to_pylist())) == sorted(
        map(repr, whole.to_arrow().read_all().select(names).to_pylist())
    )
    assert report(dataset).rows_kept == len(found)
    # Completions are exchanged in the groups of a batch, as TRL's trainer does it.
    for batch in dataset.iter_torch_batches(batch_size=16, collate_fn=collate_fn(dataset)):
        numbers = [row for start in range(0, len(batch["n"]), 8) for row in group_of(start, len(batch["n"]))]
        answers = [answer_of(batch, row) for row in range(len(numbers))]
        assert [answer_of(batch, row, "KL_") for row in range(len(numbers))] == [answers[row] for row in numbers]
        assert batch["label"].dtype == torch.bool
    if name is not None:  # in the order of the files, batches are those of `load_pairs`
        batches = dataset.iter_torch_batches(batch_size=16, collate_fn=collate_fn(dataset))
        for batch, each in zip(batches, whole.loader(16), strict=True):
            same_batch(batch, each)
    assert not [each for each in recwarn if "are replaced" in str(each.message)]


def group_of(start: int, count: int) -> list[int]:
    """The rows whose completions the rows of a group have."""
    rows = list(range(start, min(start + 8, count)))
    return [rows[-1], *rows[:-1]]


def answer_of(batch: Any, row: int, prefix: str = "") -> list[int]:
    ids, mask = batch[f"{prefix}input_ids"][row], batch[f"{prefix}completion_mask"][row]
    return ids[mask.bool()].tolist()


def test_all_three_have_one_signature() -> None:
    """What all loads and all workers take has one name, one default and one place in the three of them."""
    signatures = [inspect.signature(each).parameters for each in (read_prompts, read_chats, read_pairs)]
    own = [WorkerKeywords, LoadKeywords]
    shared = [name for name in signatures[0] if any(name in each.__annotations__ for each in own)]
    assert {"concurrency", "device", "verify", "apply_chat_template_kwargs", "max_samples"} <= set(shared)
    for each in signatures:
        assert list(each)[:2] == ["files", "tokenizer"]
        assert [name for name in each if name in shared] == shared
    for name in ["files", "tokenizer", *shared]:
        assert len({str(each[name]) for each in signatures}) == 1, name


def test_what_cannot_be_done_is_an_error_at_once(
    cluster: Any, few: list[str], qwen_folder: str, tmp_path: Path, write: Callable[..., str]
) -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (DeviceError, "the Ray cluster has no GPU", {"device": "cuda"}),
        (OptionError, "Ray chooses the GPU", {"device": "cuda:0"}),
        (OptionError, "random_shuffle", {"shuffle": True}),
        (OptionError, "spills to disk", {"store": "disk"}),
        (OptionError, "did you mean max_prompt_length", {"max_promt_length": 3}),
        (OptionError, "rows_per_task=0: expected an integer", {"rows_per_task": 0}),
        (DataError, "no column 'messages'", {"prompt_key": "messages"}),
    ]
    for kind, message, options in cases:
        with pytest.raises(kind, match=message):
            read_prompts(few, qwen_folder, **options)
    with pytest.raises(SourceError, match="no file matches"):
        read_prompts(str(tmp_path / "none*.parquet"), qwen_folder)
    with pytest.raises(OptionError, match="workers read files"):
        read_prompts(pa.table({"prompt": ["a"]}), qwen_folder)
    one = write({"prompt": ["a"], "n": [1]}, "one.parquet")
    other = write({"prompt": ["a"], "n": [["x"]]}, "other.parquet")
    with pytest.raises(DataError, match="column 'n' has no common Arrow type"):
        read_prompts([one, other], qwen_folder)
    with pytest.raises(OptionError, match="unknown option max_lenght: did you mean max_length"):
        read_chats(few, qwen_folder, max_lenght=3)
    with pytest.raises(OptionError, match="is text that no template renders"):
        read_chats(few, qwen_folder, turns="served", format="text", messages_key="data_source")
    with pytest.raises(OptionError, match="padding='no'"):
        collate_fn(read_prompts(one, qwen_folder, chat_template=None), "no")  # type: ignore[arg-type]


def test_a_tokenizer_that_differs_in_a_worker_is_an_error(few: list[str], qwen: Any) -> None:
    from dataclasses import replace

    from gpuload.core.errors import GpuloadError
    from gpuload.integrations.ray.dataset import work_of
    from gpuload.integrations.ray.worker import Tokenizing
    from gpuload.kinds.prompts import PromptKind
    from gpuload.pipeline.run import Job

    options = gpuload.Options()
    kind = PromptKind()
    work = work_of(Job(kind, [], kind.reference(qwen, options), options, 0.0), "cpu", pa.schema([]))
    Tokenizing(work)
    with pytest.raises(GpuloadError, match="is another one in a Ray worker"):
        Tokenizing(replace(work, fingerprint="other"))
    assert np.all(np.array(work.schema.names) == ["raw_prompt_ids", "origin"])
