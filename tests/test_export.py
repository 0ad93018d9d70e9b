"""save_to_disk and `gpuload prepare --export`: what `datasets` and TRL make of the directories."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiers import core, exhaustive
from transformers import Qwen2ForCausalLM

import gpuload
from gpuload import export
from gpuload.cli.main import main
from gpuload.core import files as files_module
from gpuload.core.errors import DataError, ExportError, GpuloadError, OptionError
from gpuload.dataset import arrow as row_reader
from gpuload.sources import footer

datasets = pytest.importorskip("datasets", reason="the format is that of datasets")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from export_cases import five_steps, opened, small_model  # noqa: E402
from tokenizer_cases import small_tokenizer  # noqa: E402

QWEN3 = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"

ROWS = 45


def rows_of(count: int = ROWS, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of different lengths, with other columns."""
    rng = np.random.default_rng(seed)
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {row} " * int(rng.integers(1, 6))},
                {"role": "assistant", "content": f"answer {row} " * int(rng.integers(1, 40))},
            ],
            "number": row,
            "source": ["wiki", "code"][row % 2],
        }
        for row in range(count)
    ]


@pytest.fixture(scope="module")
def chats(qwen: Any) -> gpuload.ChatDataset:
    table = pa.Table.from_pylist(rows_of())
    return gpuload.load_chats(table, qwen, chat_template=QWEN3.read_text(), max_length=200)


def has_no_leftovers(directory: Path) -> bool:
    return not list(directory.glob("*.partial"))


# -- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_dataset(chats: gpuload.ChatDataset, tmp_path: Path) -> None:
    gpuload.save_to_disk({"train": chats}, tmp_path / "new" / "sft")
    store = opened(tmp_path / "new" / "sft")
    assert list(store) == ["train"]
    assert store["train"].features["input_ids"] == store["train"].features["labels"]
    assert store["train"].features["input_ids"].feature.dtype == "int32"
    assert list(store["train"]) == [chats[k] for k in range(len(chats))]
    assert has_no_leftovers(tmp_path / "new")
    about = json.loads((tmp_path / "new" / "sft" / "gpuload.json").read_text())
    assert about["splits"]["train"]["rows"] == len(chats) == ROWS
    assert about["splits"]["train"]["fingerprint"] == chats.fingerprint
    assert about["splits"]["train"]["report"]["rows_kept"] == ROWS


@pytest.mark.parametrize(
    ("least", "most", "groups"),
    [(64 << 20, 128 << 20, [ROWS]), (1, 1 << 20, [9] * 5), (1, 400, [1] * ROWS), (12_000, 1 << 20, [18, 18, 9])],
)
def test_row_groups_are_of_a_size(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, most: int, groups: list[int]
) -> None:
    """Batches are joined until they are large enough, and one that is too large is divided."""
    monkeypatch.setattr(row_reader, "_ROWS", 9)
    monkeypatch.setattr(export, "LEAST_GROUP_BYTES", least)
    monkeypatch.setattr(footer, "_MOST_GROUP_BYTES", most)
    messages = [{"role": "user", "content": "question " * 5}, {"role": "assistant", "content": "answer " * 60}]
    table = pa.table({"messages": [messages] * ROWS, "n": range(ROWS)})
    gpuload.save_to_disk({"train": gpuload.load_chats(table, qwen)}, tmp_path / "sft")
    file = pq.ParquetFile(tmp_path / "sft" / "train.parquet")
    assert [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)] == groups
    assert file.read()["n"].to_pylist() == list(range(ROWS))


@pytest.mark.parametrize("overlong", ["keep_start", "keep_end"])
def test_truncated_rows(qwen: Any, tmp_path: Path, overlong: Any) -> None:
    chats = gpuload.load_chats(pa.Table.from_pylist(rows_of()), qwen, max_length=40, overlong=overlong)
    gpuload.save_to_disk({"train": chats}, tmp_path / "sft", columns=["number"])
    rows = list(opened(tmp_path / "sft")["train"])
    assert rows == [{key: chats[k][key] for key in ("input_ids", "labels", "number")} for k in range(len(chats))]
    assert max(len(row["input_ids"]) for row in rows) == 40


@pytest.mark.parametrize("tokens", [1, 300, 10**6])
@pytest.mark.parametrize("most", [7, 10**6])
def test_record_batches(
    chats: gpuload.ChatDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, most: int
) -> None:
    """They are bounded, and the columns of each have the same rows, with the same offsets."""
    monkeypatch.setattr(row_reader, "_TOKENS", tokens)
    monkeypatch.setattr(row_reader, "_ROWS", most)
    for options in ({}, {"packing": "bfd"}, {"packing": "wrapped", "pack_length": 64}):
        batches = list(chats.to_arrow(**options))
        for batch in batches:
            assert batch["input_ids"].offsets.equals(batch["labels"].offsets)
            assert len(batch["input_ids"].values) <= max(tokens + 200, 200)
            assert 0 < len(batch) <= most
        whole = pa.Table.from_batches(batches)
        monkeypatch.undo()
        assert whole.combine_chunks().equals(chats.to_arrow(**options).read_all().combine_chunks())
        monkeypatch.setattr(row_reader, "_TOKENS", tokens)
        monkeypatch.setattr(row_reader, "_ROWS", most)
    gpuload.save_to_disk({"train": chats}, tmp_path / "sft")
    table = opened(tmp_path / "sft")["train"].data.table
    layout = {tuple(len(chunk) for chunk in column.chunks) for column in table.columns}
    assert len(layout) == 1


def test_other_columns_of_files_that_differ(qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "_ROWS", 2)
    messages = rows_of(3)[0]["messages"]
    pq.write_table(pa.table({"messages": [messages] * 2, "n": pa.array([1, 2], pa.int32())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"messages": [messages] * 3}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"messages": [messages], "n": [2**40], "s": [{"x": 1}]}), tmp_path / "c.parquet")
    dictionary = pa.array(["u", "v"]).dictionary_encode()
    pq.write_table(pa.table({"messages": [messages] * 2, "d": dictionary}), tmp_path / "d.parquet")
    (tmp_path / "e.json").write_text(json.dumps([{"messages": messages, "j": 1}, {"messages": messages, "j": [2]}]))
    files = [str(tmp_path / name) for name in ("a.parquet", "b.parquet", "c.parquet", "d.parquet", "e.json")]
    chats = gpuload.load_chats(files, qwen, shuffle=True, seed=1, max_samples=9)
    gpuload.save_to_disk({"train": chats}, tmp_path / "sft")
    expected = [chats[k] for k in range(len(chats))]
    assert len({repr(row["n"]) for row in expected}) > 2
    for found, row in zip(opened(tmp_path / "sft")["train"], expected, strict=True):
        row["j"] = None if row["j"] is None else json.dumps(row["j"])  # values that Arrow has no type for
        assert found == row


def test_columns_that_cannot_be_written(qwen: Any, tmp_path: Path) -> None:
    messages = rows_of(1)[0]["messages"]
    pairs = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32()))
    chats = gpuload.load_chats(pa.table({"messages": [messages], "m": pairs}), qwen)
    with pytest.raises(DataError, match=r"column 'm' of type map.* cannot be stored by datasets .*columns="):
        gpuload.save_to_disk({"train": chats}, tmp_path / "sft")
    assert not list(tmp_path.iterdir())
    gpuload.save_to_disk({"train": chats}, tmp_path / "sft", columns=[])
    pq.write_table(pa.table({"messages": [messages], "x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"messages": [messages], "x": [[1]]}), tmp_path / "b.parquet")
    chats = gpuload.load_chats([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], qwen)
    with pytest.raises(DataError, match=r"column 'x' has no common Arrow type .*columns="):
        chats.to_arrow()


def test_types_that_have_not_all_values_of_each_other(qwen: Any, tmp_path: Path) -> None:
    """An integer of 64 bits in one file, and fractions in another."""
    messages = rows_of(1)[0]["messages"]
    values = [2**60 + 1, 0.5]
    for name, value in zip("ab", values, strict=True):
        pq.write_table(pa.table({"messages": [messages], "x": [value], "y": [1]}), tmp_path / f"{name}.parquet")
    chats = gpuload.load_chats([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], qwen)
    assert [row["x"] for row in chats] == values
    for read, instead in (
        (lambda: chats.columns["x"], "access rows with"),
        (chats.to_pandas, "columns="),
        (lambda: chats.to_arrow().read_all(), "columns="),
        (lambda: gpuload.save_to_disk({"train": chats}, tmp_path / "sft"), "columns="),
    ):
        with pytest.raises(DataError, match=f"column 'x' has no common Arrow type .*not in range.*{instead}"):
            read()
    assert chats.to_arrow(columns=["y"]).read_all().column("y").to_pylist() == [1, 1]


# -- the directory ---------------------------------------------------------------------------------------------------


def test_overwriting(chats: gpuload.ChatDataset, tmp_path: Path) -> None:
    place = tmp_path / "sft"
    place.mkdir()  # an empty directory is no obstacle
    gpuload.save_to_disk({"train": chats}, place)
    first = opened(place)["train"]
    with pytest.raises(OptionError, match="exists: choose another directory, or overwrite it"):
        gpuload.save_to_disk({"train": chats}, place, columns=[])
    gpuload.save_to_disk({"test": chats}, place, overwrite=True, columns=["number"])
    second = opened(place)
    assert list(second) == ["test"]
    assert second["test"].column_names == ["input_ids", "labels", "number"]
    # `datasets` caches what is made of a dataset under its fingerprint.
    assert second["test"]._fingerprint != first._fingerprint
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("precious")
    for other in (tmp_path / "notes", tmp_path / "notes" / "mine.txt"):
        with pytest.raises(OptionError, match="exists and was not written by gpuload"):
            gpuload.save_to_disk({"train": chats}, other, overwrite=True)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "precious"
    assert has_no_leftovers(tmp_path)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("in_one_step", [True, False])
def test_interrupted_while_overwriting(
    in_one_step: bool, how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after any step: the old directory is complete, or the new one, and the next run removes neither."""
    real = {"rename": os.replace, "exchange": files_module.exchanged, "remove": shutil.rmtree}
    for at in range(6):
        place = tmp_path / f"{at}" / "sft"
        place.mkdir(parents=True)
        (place / "old").write_text("whole")
        child = os.fork()
        if not child:
            steps = iter(range(9))

            def step(name: str, *paths: Any, steps: Any = steps, at: int = at, **more: Any) -> Any:
                if next(steps) == at:
                    os.kill(os.getpid(), how)
                if name == "exchange" and not in_one_step:
                    return False
                result = real[name](*paths, **more)
                if next(steps) == at:
                    os.kill(os.getpid(), how)
                return result

            monkeypatch.setattr(os, "replace", functools.partial(step, "rename"))
            monkeypatch.setattr(export, "exchanged", functools.partial(step, "exchange"))
            monkeypatch.setattr(export.shutil, "rmtree", functools.partial(step, "remove"))
            try:
                partial = export.PartialDirectory(place.parent)
                try:
                    (partial.path / "made").mkdir()
                    (partial.path / "made" / "new").write_text("whole")
                    export._put(partial.path / "made", place, True)
                finally:
                    partial.remove()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        files_module.remove_orphans(place.parent)
        there = sorted(path.name for path in place.parent.glob("sft*/*"))
        assert there in (["new"], ["old"]) if in_one_step else there, at
        assert in_one_step <= place.exists()
        assert how == signal.SIGKILL or place.exists()
        assert has_no_leftovers(place.parent)


def test_exchanging_directories(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / path.name).touch()
    if not files_module.exchanged(one, other):
        pytest.skip("this file system cannot exchange directories")
    assert [path.name for path in (*one.iterdir(), *other.iterdir())] == ["other", "one"]
    with pytest.raises(FileNotFoundError, match="missing"):
        files_module.exchanged(one, tmp_path / "missing")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_nothing_behind(chats: gpuload.ChatDataset, tmp_path: Path, overwrite: bool) -> None:
    if overwrite:
        gpuload.save_to_disk({"train": chats}, tmp_path / "sft", columns=[])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # bytes of a file, as a disk has bytes
    try:
        with pytest.raises(ExportError, match=r"cannot write .*sft: .*: free disk space") as raised:
            gpuload.save_to_disk({"train": chats}, tmp_path / "sft", overwrite=overwrite)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert isinstance(raised.value, OSError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sft"] * overwrite
    if overwrite:
        assert opened(tmp_path / "sft")["train"].column_names == ["input_ids", "labels"]


@pytest.mark.parametrize(
    ("splits", "options", "message"),
    [
        ([], {}, "no dataset given"),
        (["../train"], {}, "split '../train': expected letters"),
        (["train"], {"columns": ["numbers"]}, "'numbers' is not a column .* did you mean number"),
        (["train"], {"columns": ["labels"]}, "'labels' is not a column"),
        (["train"], {"packing": "bfd", "columns": ["number"]}, "a pack has several rows"),
        (["train"], {"packing": "best"}, "packing='best'"),
        (["train"], {"pack_length": 9}, "pack_length is for packs"),
        (["train"], {"columns": "number"}, r"columns='number': expected a list of names, such as \['number'\]"),
        (["train.parquet", "train"], {}, "'train.parquet' is the file of split 'train'"),
    ],
)
def test_invalid_arguments(
    chats: gpuload.ChatDataset, tmp_path: Path, splits: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        gpuload.save_to_disk(dict.fromkeys(splits, chats), tmp_path / "sft", **options)
    assert not list(tmp_path.iterdir())


def test_datasets_that_are_no_splits(chats: gpuload.ChatDataset, qwen: Any, tmp_path: Path) -> None:
    pairs = gpuload.load_pairs(pa.table({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}), qwen)
    prompts = gpuload.load(pa.table({"prompt": ["a"]}), qwen)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"train": prompts}, {}, "split 'train' is a PromptDataset: expected what load_chats or load_pairs returns"),
        ({"train": chats, "test": pairs}, {}, "some have conversations and others pairs"),
        ({"train": pairs}, {"packing": "bfd"}, "packing='bfd': split 'train' has pairs, which are not packed"),
        ({"train": pairs}, {"pack_length": 9, "trainer": "llamafactory"}, "pack_length=9: split 'train' has pairs"),
    ]
    for splits, options, message in cases:
        with pytest.raises(OptionError, match=message):
            gpuload.save_to_disk(splits, tmp_path / "sft", **options)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="/ exists and was not written by gpuload"):
        gpuload.save_to_disk({"train": chats}, "/", overwrite=True)
    gpuload.save_to_disk({"train": chats}, tmp_path / "sft", columns=["number", "number"])
    assert opened(tmp_path / "sft")["train"].column_names == ["input_ids", "labels", "number"]


@pytest.mark.parametrize(
    ("name", "reason"), [("n" * 300, "too long"), ("a\0b", "null"), ("\ud800", "surrogates"), ("loop", "[Ll]ink")]
)
def test_names_that_no_directory_can_have(chats: gpuload.ChatDataset, tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OptionError, match=f"directory='.*: cannot be used: .*{reason}"):
        gpuload.save_to_disk({"train": chats}, tmp_path / name)


def test_places_that_cannot_be_written(
    chats: gpuload.ChatDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found before the work."""
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and real(path, mode))
    for place, reason in (
        ("s3://bucket/data", "a URL: write into a local directory"),
        (str(tmp_path / "file" / "data"), "cannot be used: .*file is a file"),
        (str(tmp_path / "closed" / "more" / "data"), "cannot be used: .*closed cannot be written"),
    ):
        with pytest.raises(OptionError, match=reason):
            export.check_destination(place, overwrite=False)
        with pytest.raises(OptionError, match=reason):
            gpuload.save_to_disk({"train": chats}, place)


def test_a_directory_that_another_process_has_made_meanwhile(
    chats: gpuload.ChatDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = export._put

    def put(made: Path, place: Path, overwrite: bool) -> None:
        place.mkdir()
        (place / "file").touch()
        real(made, place, overwrite)

    monkeypatch.setattr(export, "_put", put)
    with pytest.raises(ExportError, match="cannot write .*data: it exists now: choose another directory"):
        gpuload.save_to_disk({"train": chats}, tmp_path / "data")


@pytest.mark.parametrize("value", [{}, {"a": {}}, [{}]])
def test_objects_without_keys(qwen: Any, tmp_path: Path, value: Any) -> None:
    """Parquet does not have them."""
    rows = [{"messages": [{"role": "assistant", "content": "a"}], "info": value} for _ in range(2)]
    made = gpuload.load_chats(pa.Table.from_pylist(rows), qwen, progress=False)
    assert made[0]["info"] == value
    with pytest.raises(DataError, match=r"column 'info' of type .* no objects without keys\): leave it out with"):
        gpuload.save_to_disk({"train": made}, tmp_path / "data")
    gpuload.save_to_disk({"train": made}, tmp_path / "data", columns=[])
    assert not list(tmp_path.glob("*.partial"))


def test_without_the_package_datasets(
    chats: gpuload.ChatDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(GpuloadError, match=r"pip install 'gpuload\[export\]'"):
        gpuload.save_to_disk({"train": chats}, tmp_path / "sft")


# -- TRL -------------------------------------------------------------------------------------------------------------


def trained(dataset: Any, output: Path, **settings: Any) -> tuple[Any, list[float]]:
    """What TRL's trainer makes of a dataset, and the losses of its first five steps with two layers."""
    tokenizer = small_tokenizer(QWEN3.read_text())
    model = small_model(Qwen2ForCausalLM, tokenizer)
    return five_steps(trl.SFTTrainer, trl.SFTConfig, model, dataset, tokenizer, output, **settings)


def to_train_on() -> tuple[Any, gpuload.ChatDataset]:
    """Rows as TRL takes them, and the same rows tokenized; the longest has 512 tokens at most."""
    rows = [{"messages": row["messages"]} for row in rows_of(20)]
    chats = gpuload.load_chats(pa.Table.from_pylist(rows), small_tokenizer(QWEN3.read_text()), max_length=512)
    return datasets.Dataset.from_list(rows), chats


@exhaustive
def test_training_on_rows_as_on_what_trl_prepares(tmp_path: Path) -> None:
    raw, chats = to_train_on()
    theirs, expected = trained(raw, tmp_path, assistant_only_loss=True, max_length=512)
    gpuload.save_to_disk({"train": chats}, tmp_path / "sft")
    own = datasets.load_from_disk(str(tmp_path / "sft"))["train"]
    for more in ({}, {"dataset_kwargs": {"skip_prepare_dataset": True}}):
        ours, losses = trained(own, tmp_path, max_length=512, **more)
        assert list(ours["input_ids"]) == list(theirs["input_ids"])
        assert list(ours["labels"]) == list(theirs["labels"])
        assert losses == expected


def test_training_on_rows_as_served(tmp_path: Path) -> None:
    """TRL's trainer, with the exported rows and with rows that are made turn by turn."""
    tokenizer = small_tokenizer(QWEN3.with_name("qwen3.jinja").read_text())
    conversations = [
        [
            message
            for turn in range(2)
            for message in (
                {"role": "user", "content": f"question {row} {turn}"},
                {"role": "assistant", "content": f"answer {row}", "reasoning_content": f"because {turn}"},
            )
        ]
        for row in range(5)
    ]
    by_hand = []
    for messages in conversations:
        for number in (1, 3):
            prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, tokenize=False)
            whole = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False).removesuffix("\n")
            first, ids = len(tokenizer(prompt)["input_ids"]), tokenizer(whole)["input_ids"]
            by_hand.append({"input_ids": ids, "labels": [-100] * first + ids[first:]})
    table = pa.table({"messages": conversations})
    chats = gpuload.load_chats(table, tokenizer, turns="served", max_length=512)
    gpuload.save_to_disk({"train": chats}, tmp_path / "sft")
    own = datasets.load_from_disk(str(tmp_path / "sft"))["train"]
    theirs, expected = trained(datasets.Dataset.from_list(by_hand), tmp_path, max_length=512)
    ours, losses = trained(own, tmp_path, max_length=512)
    assert list(ours["input_ids"]) == list(theirs["input_ids"]) == [row["input_ids"] for row in by_hand]
    assert list(ours["labels"]) == list(theirs["labels"])
    assert losses == expected


@pytest.mark.parametrize("strategy", core(["bfd", "bfd_split"], "bfd_split"))
def test_training_on_packs_as_on_what_trl_packs(tmp_path: Path, strategy: Any) -> None:
    raw, chats = to_train_on()
    assert chats.report.longest > 300  # some rows are split, or truncated
    settings: dict[str, Any] = {"packing": True, "packing_strategy": strategy, "shuffle_dataset": False}
    theirs, expected = trained(raw, tmp_path, assistant_only_loss=True, max_length=300, **settings)
    gpuload.save_to_disk({"train": chats}, tmp_path / "packed", packing=strategy, pack_length=300)
    own = opened(tmp_path / "packed")["train"]
    names = ["input_ids", "labels", "seq_lengths"]
    assert own.column_names == names
    ours, losses = trained(own, tmp_path, padding_free=True, max_length=None)
    assert all(list(ours[name]) == list(theirs[name]) for name in names)
    assert losses == expected


def test_trl_packs_the_rows_itself(chats: gpuload.ChatDataset, tmp_path: Path) -> None:
    """Its packing needs columns with equal offsets."""
    gpuload.save_to_disk({"train": chats}, tmp_path / "sft", columns=[])
    own = datasets.load_from_disk(str(tmp_path / "sft"))["train"]
    packs = list(trl.pack_dataset(own, 100, "bfd_split"))
    assert packs == chats.to_arrow(packing="trl_bfd_split", pack_length=100).read_all().to_pylist()


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Conversations for training and for tests."""
    for name, count, seed in (("a", ROWS, 0), ("b", 7, 1)):
        pq.write_table(pa.Table.from_pylist(rows_of(count, seed)), tmp_path / f"{name}.parquet")
    return str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")


def test_the_command(
    files: tuple[str, str], qwen: Any, qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "sft"
    command = ["prepare", files[0], "--tokenizer", qwen_folder, "--export", "sft", str(place)]
    command += ["--split", f"test={files[1]}", "--max-length", "60", "--columns", "source,number"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert f"train: {files[0]}: {ROWS} rows read" in shown.out
    assert f"test: {files[1]}: 7 rows read" in shown.out
    assert shown.out.endswith(f"written to {place}\n")
    store = opened(place)
    for name, file in (("train", files[0]), ("test", files[1])):
        chats = gpuload.load_chats(file, qwen, max_length=60)
        assert 0 < len(chats) < chats.report.rows_read
        assert list(store[name]) == [
            {key: chats[k][key] for key in ("input_ids", "labels", "source", "number")} for k in range(len(chats))
        ]
    assert main(command) == 1
    assert "exists: choose another directory" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0


def test_the_command_packs(files: tuple[str, str], qwen: Any, qwen_folder: str, tmp_path: Path) -> None:
    place = tmp_path / "packed"
    command = ["prepare", "--tokenizer", qwen_folder, "--export", "packed", str(place), "--max-length", "100"]
    command += ["--split", f"train={files[0]}", "--split", f"train={files[1]}", "--chat-template", str(QWEN3)]
    assert main([*command, "--overlong", "keep_start", "--loss-on", "last", "--messages-key", "messages"]) == 0
    options: dict[str, Any] = {"max_length": 100, "overlong": "keep_start", "loss_on": "last"}
    chats = gpuload.load_chats(list(files), qwen, chat_template=QWEN3.read_text(), **options)
    assert list(opened(place)["train"]) == chats.to_arrow(packing="bfd").read_all().to_pylist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--export", "sftt", "OUT", "x"], "--export sftt: expected one of sft, packed, rm, dpo"),
        (["--overlong", "drop", "x"], "--overlong is an argument of --export"),
        (["--export", "sft", "OUT"], "files and --tokenizer are required"),
        (["--export", "sft", "OUT", "--split", "test"], "--split test: expected NAME=FILES"),
        (["--export", "dpo", "OUT", "x", "--loss-on", "all"], "are for sft and packed"),
        (["--export", "sft", "OUT", "x", "--prompt-key", "p"], "are not for --export"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, qwen_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["prepare", "--tokenizer", qwen_folder, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_directory_that_exists_stops_the_command_before_the_work(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", files[0], "--tokenizer", "no-such-tokenizer", "--export", "sft", str(tmp_path)]
    assert main(command) == 1
    assert f"{tmp_path} exists" in capsys.readouterr().err
