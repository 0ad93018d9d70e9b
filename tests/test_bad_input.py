"""Bad input: every message says what, where and what to do; a bad row never takes a good one with it."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user

import gpuload
from gpuload.core.errors import DataError, DeviceError, OptionError, SourceError, TokenizerError
from gpuload.core.options import Options
from gpuload.engines.host import encode as host_encode
from gpuload.kinds.prompts import PromptKind
from gpuload.pipeline.run import open_job, run
from gpuload.sources.fetch import SourceFile, _is_whole
from gpuload.sources.open import open_all
from gpuload.sources.read import open_file

REJECTING = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users here') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def test_no_such_column(write: Callable[..., str], qwen: Any) -> None:
    file = write({"promt": ["a"], "answer": ["b"]})
    with pytest.raises(
        DataError, match=r"data.parquet: no column 'prompt': did you mean promt\? The columns are promt, answer$"
    ):
        gpuload.load(file, qwen)
    file = write({"conversation": [user("a")], "answer": ["b"]})
    with pytest.raises(DataError, match=r"did you mean prompt_key='conversation'\? The columns are conversation"):
        gpuload.load(file, qwen)
    with pytest.raises(DataError, match=r"no column 'prompt'\. The columns are x: prompt_key=... names the one"):
        gpuload.load(write({"x": [1]}), qwen)


def test_no_such_column_in_the_second_file(write: Callable[..., str], qwen: Any) -> None:
    files = [write([user("a")], "a.parquet"), write({"messages": [user("a")]}, "b.parquet")]
    with pytest.raises(DataError, match=r"b.parquet: no column 'prompt'.*did you mean prompt_key='messages'"):
        gpuload.load(files, qwen)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1, 2], r"column 'prompt' has type int64; expected list<struct<role, content>> or string"),
        ([["a"], ["b"]], "has type list<.*; expected"),
        ([[{"from": "user", "value": "a"}]], "messages have the fields from, value; expected role and content"),
    ],
)
def test_a_column_of_another_type(column: list[Any], message: str, write: Callable[..., str], qwen: Any) -> None:
    with pytest.raises(DataError, match=message):
        gpuload.load(write(column), qwen)


def test_damaged_parquet(tmp_path: Path, gsm8k: str, qwen: Any) -> None:
    whole = Path(gsm8k).read_bytes()
    for content, message in (
        (b"", "the file is empty"),
        (b"<html>not found</html>", r"not a parquet file: it starts with b'<htm'"),
        (whole[:100_000], "truncated parquet file.*download it again"),
        (whole[:1000] + bytes(50_000) + whole[51_000:], "damaged"),
    ):
        file = tmp_path / "bad.parquet"
        file.write_bytes(content)
        with pytest.raises(SourceError, match=rf"bad.parquet: .*{message}"):
            gpuload.load(file, qwen)


def test_damaged_json(tmp_path: Path, qwen: Any) -> None:
    file = tmp_path / "bad.jsonl"
    for content, message in (
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not valid JSON"),
        ('{"prompt": "a"}\n3\n', "line 2: expected an object"),
        ('[{"prompt": "a"}, 3]', "item 1: expected an object"),
        ('[{"prompt": "a"}', "not valid JSON"),
        ("", "no rows"),
    ):
        file.write_text(content)
        with pytest.raises(gpuload.GpuloadError, match=message):
            gpuload.load(file, qwen)


BAD_ROWS: list[tuple[Any, str]] = [
    (None, "prompt is null"),
    ([], "prompt is an empty list"),
    (user(None), "content of message 0 is null"),
    ([*user("a"), {"role": "assistant", "content": None}], "content of message 1 is null"),
    ([None], "message 0 is null"),
    ([{"role": "wizard", "content": "a"}], "only users here"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS, ids=[reason for _, reason in BAD_ROWS])
def test_a_bad_row_is_dropped_and_counted(bad: Any, reason: str, write: Callable[..., str], qwen: Any) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    file = write({"prompt": pa.array([user("before"), bad, user("after")], kind), "n": [0, 1, 2]})
    prompts = gpuload.load(file, qwen, chat_template=REJECTING)
    assert prompts.report.rejected == {reason: 1}
    assert prompts.report.examples[reason] == [f"{file} row 1"]
    assert reason in str(prompts.report)
    assert prompts.tokens.to_lists() == [qwen("before")["input_ids"], qwen("after")["input_ids"]]
    assert [prompts[i]["n"] for i in range(2)] == [0, 2]
    with pytest.raises(DataError, match=rf"data.parquet row 1: {reason}"):
        gpuload.load(file, qwen, chat_template=REJECTING, strict=True)


def test_bytes_that_are_not_text(tmp_path: Path, qwen: Any) -> None:
    """Arrow reads strings unchecked; neither the row with bad bytes nor its neighbours may come out wrong."""
    texts = pa.array([b"good", b"\xff\xfe bad", "também".encode()], pa.binary()).view(pa.string())
    file = tmp_path / "bytes.parquet"
    messages = pa.StructArray.from_arrays([pa.array(["user"] * 3), texts], names=["role", "content"])
    for column in (texts, pa.ListArray.from_arrays([0, 1, 2, 3], messages)):
        pq.write_table(pa.table({"prompt": column, "n": [0, 1, 2]}), file)
        prompts = gpuload.load(file, qwen, return_full_prompt=True)
        assert [prompts[i]["n"] for i in range(len(prompts))] == [0, 2]
        (reason,) = prompts.report.rejected
        assert reason.endswith("is not valid UTF-8 (byte 0)")
        assert prompts.report.rows_rejected == 1
        assert prompts[1]["full_prompts"].count("também") == 1
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "other": texts}), file)
    prompts = gpuload.load(file, qwen)
    assert prompts.report.rejected == {"column 'other' is not valid UTF-8": 1}
    assert [prompts[i]["other"] for i in range(2)] == ["good", "também"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_text_of_a_dictionary_that_is_not_utf8(nested: bool, qwen: Any, tmp_path: Path) -> None:
    """Only rows that have it are dropped: a dictionary has the values of all rows, and more of a slice."""
    offsets, data = pa.py_buffer(np.array([0, 1, 4], np.int32)), pa.py_buffer(b"\xffweb")
    texts = pa.StringArray.from_buffers(2, offsets, data)
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int32()), texts)
    other = pa.StructArray.from_arrays([column], ["text"]) if nested else column
    table = pa.table({"prompt": ["a", "b", "c"], "other": other})
    pq.write_table(table, tmp_path / "rows.parquet")
    for given, dropped in ((table, 1), (str(tmp_path / "rows.parquet"), 1), (table.slice(1), 0)):
        prompts = gpuload.load(given, qwen)
        assert prompts.report.rejected == ({"column 'other' is not valid UTF-8": 1} if dropped else {})
        assert [row["other"] for row in prompts] == [{"text": "web"} if nested else "web"] * 2


def test_a_lone_surrogate_in_json(tmp_path: Path, qwen: Any) -> None:
    file = tmp_path / "surrogate.jsonl"
    file.write_text('{"prompt": "good"}\n{"prompt": "bad \\ud800"}\n' + json.dumps({"prompt": "pair 😀"}))
    prompts = gpuload.load(file, qwen, chat_template=None)
    assert prompts.tokens.to_lists() == [qwen("good")["input_ids"], qwen("pair 😀")["input_ids"]]
    assert prompts.report.rejected == {"prompt contains a lone surrogate, '\\ud800', which UTF-8 cannot encode": 1}
    with pytest.raises(DataError, match="surrogate.jsonl row 1: prompt contains a lone surrogate"):
        gpuload.load(file, qwen, strict=True)


def test_no_rows(write: Callable[..., str], qwen: Any) -> None:
    empty = write({"prompt": pa.array([], pa.string())}, "empty.parquet")
    with pytest.raises(DataError, match=r"empty.parquet: no rows"):
        gpuload.load(empty, qwen)
    assert len(gpuload.load([empty, write(["a"])], qwen)) == 1


def test_all_rows_filtered(write: Callable[..., str], qwen: Any) -> None:
    file = write([user("word " * n) for n in (10, 20, 30)] + [[]])
    shortest = len(
        qwen.apply_chat_template(user("word " * 10), add_generation_prompt=True, return_dict=True)["input_ids"]
    )
    with pytest.raises(
        DataError,
        match=rf"(?s)all 4 rows were dropped.*3 rows.*=5; the shortest has {shortest} tokens.*1 row: prompt is",
    ):
        gpuload.load(file, qwen, max_prompt_length=5)


def test_tokenizers_that_cannot_serve(write: Callable[..., str], qwen_folder: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = write([user("a")])
    with pytest.raises(TokenizerError, match="no tokenizer given"):
        gpuload.load(file)
    with pytest.raises(TokenizerError, match="no-such-tokenizer"):
        gpuload.load(file, str(tmp_path / "no-such-tokenizer"))
    with pytest.raises(TokenizerError, match="tokenizer has the unsupported type int"):
        gpuload.load(file, 5)
    silent = AutoTokenizer.from_pretrained(qwen_folder)
    silent.chat_template = None
    with pytest.raises(TokenizerError, match="no usable chat template .*pass the text of one as chat_template="):
        gpuload.load(file, silent)
    assert len(gpuload.load(file, silent, chat_template="{{ messages[0].content }}")) == 1
    assert len(gpuload.load(write(["a"]), silent, chat_template=None)) == 1
    unpadded = AutoTokenizer.from_pretrained(qwen_folder)
    unpadded.pad_token = None
    assert gpuload.load(file, unpadded).pad_token_id == unpadded.eos_token_id
    unpadded.eos_token = None
    with pytest.raises(TokenizerError, match="neither a pad token nor an eos token.*pad_token_id="):
        gpuload.load(file, unpadded)
    assert gpuload.load(file, unpadded, pad_token_id=3)[0]["input_ids"][0] == 3
    last = len(unpadded) - 1
    assert gpuload.load(file, unpadded, pad_token_id=last)[0]["input_ids"][0] == last
    with pytest.raises(TokenizerError, match=f"pad_token_id={last + 1}: tokenizer .* has ids from 0 to {last}: pass"):
        gpuload.load(file, unpadded, pad_token_id=last + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_promt_length": 5}, "unknown option max_promt_length: did you mean max_prompt_length"),
        ({"frobnicate": 5, "quux": 1}, "unknown options frobnicate, quux; expected one of "),
        ({"max_prompt_length": 0}, r"max_prompt_length=0: expected an integer > 0"),
        ({"max_prompt_length": "many"}, "max_prompt_length='many'"),
        ({"max_prompt_length": "1024"}, "max_prompt_length='1024': expected an integer > 0, got a string"),
        ({"pad_token_id": "0"}, "pad_token_id='0': expected an integer >= 0, or None, got a string"),
        ({"remote_timeout": "60"}, "remote_timeout='60': expected a number of seconds > 0, got a string"),
        ({"remote_timeout": 0}, "remote_timeout=0: expected a number of seconds > 0$"),
        ({"truncation": "centre"}, "truncation='centre': expected one of 'error', 'left', 'right', 'middle'"),
        ({"pad_token_id": -1}, "pad_token_id=-1: expected an integer >= 0, or None"),
        ({"verify": True}, "verify=True: expected one of 'sample', 'full', 'off'"),
        ({"max_samples": 0}, "max_samples=0"),
        ({"max_samples": -7}, "max_samples=-7"),
        ({"seed": -1}, "seed=-1"),
        ({"device": "gpu"}, "device='gpu': expected 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"strict": "yes"}, "strict='yes': expected True or False"),
        ({"apply_chat_template_kwargs": 5}, "apply_chat_template_kwargs=5: expected a mapping"),
        (
            {"apply_chat_template_kwargs": {"max_length": 5}},
            "max_length is set by the loader: use the option max_prompt",
        ),
        ({"prompt_key": ""}, "prompt_key=''"),
    ],
)
def test_nonsense_options(options: dict[str, Any], message: str, gsm8k: str, qwen: Any) -> None:
    with pytest.raises(OptionError, match=message):
        gpuload.load(gsm8k, qwen, **options)


@pytest.mark.parametrize("load", [gpuload.load, gpuload.load_chats, gpuload.load_pairs])
def test_two_tokenizers(load: Any, gsm8k: str, qwen: Any) -> None:
    with pytest.raises(OptionError, match="two tokenizers are given: pass one"):
        load(gsm8k, qwen, tokenizer=qwen)


def test_a_tokenizer_json_is_loaded_with_its_directory_or_alone(
    write: Callable[..., str], qwen: Any, qwen_folder: str, tmp_path: Path
) -> None:
    file = write([user("a b")])
    expected = gpuload.load(file, qwen).tokens.to_lists()
    assert gpuload.load(file, f"{qwen_folder}/tokenizer.json").tokens.to_lists() == expected
    alone = tmp_path / "tokenizer.json"
    shutil.copy(f"{qwen_folder}/tokenizer.json", alone)
    with pytest.raises(TokenizerError, match="no usable chat template"):
        gpuload.load(file, alone)
    loaded = gpuload.load(file, alone, chat_template=qwen.chat_template, pad_token_id=0)
    assert loaded.tokens.to_lists() == expected
    with pytest.raises(TokenizerError, match=r"data.parquet': not the JSON file of a tokenizer .*: pass its directory"):
        gpuload.load(file, file)


@pytest.mark.parametrize(
    ("columns", "options", "named"),
    [
        (["index", "answer"], {}, "index"),
        (["input_ids", "raw_prompt_ids", "raw_prompt"], {}, "input_ids, raw_prompt_ids"),
        (["raw_prompt", "full_prompts"], {"return_raw_chat": True, "return_full_prompt": True}, "full_prompts, raw_p"),
    ],
)
def test_columns_that_rows_replace_are_named_once(
    columns: list[str], options: dict[str, Any], named: str, write: Callable[..., str], qwen: Any
) -> None:
    data = {"prompt": [user("a")]} | {name: ["x"] for name in columns}
    files = [write(data, "a.parquet"), write(data, "b.parquet")]
    with pytest.warns(UserWarning, match=f"columns {named}.* are replaced or left out") as warned:
        gpuload.load(files, qwen, **options).batch([0, 1])
    assert len([one for one in warned if "are replaced" in str(one.message)]) == 1


@pytest.mark.parametrize(
    ("objective", "named"),
    [
        (None, "attention_mask, input_ids, labels, position_ids, seq_lengths"),
        ("dpo", "attention_mask, chosen_ids, input_ids, position_ids, prompt_ids, seq_lengths"),
        ("rm", "attention_mask, chosen_ids, input_ids, position_ids, seq_lengths"),
        ("kto", "KL_input_ids, attention_mask, input_ids, position_ids, prompt_ids, seq_lengths"),
    ],
)
def test_columns_that_rows_to_train_on_replace(objective: Any, named: str, qwen: Any) -> None:
    given = "input_ids attention_mask labels position_ids prompt_ids chosen_ids KL_input_ids seq_lengths other".split()
    data: dict[str, Any] = {name: [True, False] for name in given}
    answer = [{"role": "assistant", "content": "a"}]
    if objective is None:
        load = partial(gpuload.load_chats, pa.table({**data, "messages": [[*user("q"), *answer]] * 2}))
    else:
        data |= {"prompt": [user("q")] * 2, "chosen": [answer] * 2, "rejected": [answer] * 2, "label": [1, 0]}
        load = partial(gpuload.load_pairs, pa.table(data), objective=objective)
    with pytest.warns(UserWarning, match=rf"columns {named} are replaced or left out: .* Rename these") as warned:
        rows = load(tokenizer=qwen)
    (one,) = [one for one in warned if "are replaced" in str(one.message)]
    assert one.filename == __file__
    # A mask of other tokens is in no row: trainers would apply it.
    assert not {"attention_mask", "position_ids", "seq_lengths"} & {
        *rows.to_arrow().schema.names,
        *rows.passed_through.table().schema.names,
        *rows[0],
    }
    with pytest.raises(OptionError, match="'seq_lengths' is not a column"):
        rows.to_arrow(columns=["seq_lengths"])


def test_columns_of_other_names_give_no_warning(write: Callable[..., str], qwen: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpuload.load(write({"raw_prompt": ["a"], "extra_info": [{"index": 3}]}), qwen, prompt_key="raw_prompt")


def test_two_columns_of_one_name(write: Callable[..., str], qwen: Any, tmp_path: Path) -> None:
    for names in (["prompt", "a", "a"], ["prompt", "prompt", "a"]):
        table = pa.table([pa.array(["x"]), pa.array(["y"]), pa.array(["z"])], names=names)
        pq.write_table(table, tmp_path / "twice.parquet")
        for data in (str(tmp_path / "twice.parquet"), table):
            with pytest.raises(DataError, match=f"two columns have the name '{names[1]}': rename one of them"):
                gpuload.load(data, qwen)


@pytest.mark.parametrize("twice", ["i", "messages", "rejected", "tools"])
def test_two_columns_of_one_name_in_data_to_train_on(twice: str, qwen: Any, write: Callable[..., str]) -> None:
    answer = [{"role": "assistant", "content": "a"}]
    for load, columns in (
        (gpuload.load_chats, {"messages": [[*user("q"), *answer]]}),
        (gpuload.load_pairs, {"prompt": [user("q")], "chosen": [answer], "rejected": [answer]}),
    ):
        table = pa.table({**columns, "tools": ["[]"], "i": [1]})
        if twice not in table.schema.names:
            continue
        table = table.append_column(twice, table[twice])
        pq.write_table(table, file := write(columns))
        for data in (file, table):
            with pytest.raises(DataError, match=f"two columns have the name '{twice}': rename one of them"):
                load(data, qwen)


@pytest.mark.parametrize("as_file", [True, False])
def test_views_are_read_as_plain_strings(as_file: bool, qwen: Any, tmp_path: Path) -> None:
    texts = ["a", "b" * 30, "c"]
    plain = pa.table({"prompt": texts, "text": texts, "raw": [text.encode() for text in texts]})
    views = pa.schema([("prompt", pa.string_view()), ("text", pa.string_view()), ("raw", pa.binary_view())])
    data: Any = plain.cast(views)
    if as_file:
        pq.write_table(data, tmp_path / "views.parquet")
        assert pq.read_schema(tmp_path / "views.parquet").field("text").type == pa.string_view()
        data = str(tmp_path / "views.parquet")
    prompts = gpuload.load(data, qwen)
    assert prompts.tokens.to_lists() == gpuload.load(plain, qwen).tokens.to_lists()
    assert prompts.take(["text", "raw"], [2, 0]) == {"text": ["c", "a"], "raw": [b"c", b"a"]}
    assert len(gpuload.load(data, qwen, max_prompt_length=len(prompts.tokens[0]))) == 2, "rows can be filtered"


def test_views_in_messages_are_read_as_plain_strings(qwen: Any) -> None:
    fields = [pa.array(["user", "user"], pa.string_view()), pa.array(["hello", "y" * 30], pa.string_view())]
    messages = pa.StructArray.from_arrays(fields, names=["role", "content"])
    table = pa.table({"prompt": pa.ListArray.from_arrays([0, 1, 2], messages)})
    expected = gpuload.load(pa.table({"prompt": ["hello", "y" * 30]}), qwen).tokens.to_lists()
    assert gpuload.load(table, qwen).tokens.to_lists() == expected


@pytest.mark.parametrize("nested", ["list", "list of structs", "map"])
def test_views_inside_of_values_are_read_as_plain_strings(nested: str, qwen: Any) -> None:
    views = pa.array(["a", "b" * 30, "c", "d"], pa.string_view())
    column: Any = pa.array([[("a", "b" * 30)], [("c", "d")]], pa.map_(pa.string_view(), pa.string_view()))
    if nested != "map":
        inner = views if nested == "list" else pa.StructArray.from_arrays([views], ["text"])
        column = pa.FixedSizeListArray.from_arrays(inner, 2)
    prompts = gpuload.load(pa.table({"prompt": ["a", "b " * 30], "x": column}), qwen, max_prompt_length=40)
    assert prompts.take(["x"]) == {"x": column.to_pylist()[:1]}, "rows can be filtered"


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**30], pa.date32()),
        pa.array([2**60], pa.timestamp("s")),
        pa.array([2**62], pa.duration("s")),
        pa.array([{"x": 2**60}], pa.struct([("x", pa.timestamp("ms"))])),
        pa.array([10], pa.timestamp("us", tz="Nowhere/Land")),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]),
    ],
    ids=str,
)
def test_a_value_without_a_python_equivalent_is_named_on_access(column: Any, qwen: Any) -> None:
    prompts = gpuload.load(pa.table({"prompt": ["a"], "fine": [1], "when": column}), qwen)
    assert prompts.take(["fine"]) == {"fine": [1]}
    with pytest.raises(DataError, match="column 'when' of type .* has a value without a Python equivalent"):
        prompts[0]


def test_nanoseconds_are_kept(qwen: Any) -> None:
    instant, span = pa.array([1_700_000_000_000_000_001], pa.timestamp("ns")), pa.array([1], pa.duration("ns"))
    row = gpuload.load(pa.table({"prompt": ["a"], "instant": instant, "span": span}), qwen)[0]
    assert (row["instant"].value, row["span"].value) == (1_700_000_000_000_000_001, 1)


@pytest.mark.parametrize("form", ["{}\n", "[{}]"])
def test_json_that_is_nested_too_deeply(form: str, qwen: Any, tmp_path: Path) -> None:
    row = '{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (tmp_path / "deep.json").write_text(form.format(row))
    with pytest.raises(SourceError, match="deep.json(, line 1)?: JSON that is nested too deeply: flatten it"):
        gpuload.load(tmp_path / "deep.json", qwen)


@pytest.mark.parametrize("encoder", ["gigatoken", "each different word once"])
def test_a_panic_of_an_encoder_falls_back_to_the_tokenizer(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch, encoder: str
) -> None:
    if encoder == "gigatoken":
        monkeypatch.setattr(host_encode, "MOST_BY_WORDS", -1)
    # Opening it, and the hostile texts; and those of them that tokenizers encodes.
    works: Any = (str, list) if encoder == "gigatoken" else str
    most = 2 if encoder == "gigatoken" else 40

    class PanicException(BaseException):
        """As PyO3 raises it: not an Exception."""

    expected = gpuload.load(write(["a b", "c"]), qwen).tokens.to_lists()
    real = host_encode._without_panic

    def panicking(function: Any, argument: Any) -> Any:
        if isinstance(argument, works) or len(argument) > most:
            return real(function, argument)

        def panic(_: Any) -> Any:
            raise PanicException("index out of bounds")

        return real(panic, argument)

    monkeypatch.setattr(host_encode, "_without_panic", panicking)
    with pytest.warns(UserWarning, match="panicked: index out of bounds. Encoding 2 rows with the tokenizer itself"):
        prompts = gpuload.load(write(["a b", "c"]), qwen, token_cache=False, device="cpu")
    assert encoder in prompts.report.engine
    assert prompts.tokens.to_lists() == expected


def test_cuda_where_there_is_none(gsm8k: str, qwen: Any) -> None:
    with pytest.raises(DeviceError, match="use device='cpu' or 'auto'"):
        gpuload.load(gsm8k, qwen, device="cuda:1")


def test_rejected_rows_can_be_kept_without_tokens(write: Any, qwen: Any) -> None:
    prompts = [user("a"), None, user("b " * 50), []]
    options = Options(max_prompt_length=40)
    job = open_job(PromptKind(), open_all(write(prompts), options), qwen, options, time.perf_counter())
    dataset = run(replace(job, keep_rejected=True))
    assert [dataset.origin(row)[1] for row in range(len(dataset))] == [0, 1, 3]  # row 2 is too long
    assert (dataset.tokens.lengths > 0).tolist() == [True, False, False]
    assert dataset.report.rows_rejected == 2


def test_index_columns_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "indexed.parquet"
    pd.DataFrame({"prompt": ["a", "b"]}, index=[7, 3]).to_parquet(path)
    file = SourceFile(str(path), "indexed", "parquet")
    assert open_file(file).schema.names == ["prompt"]
    source = open_file(file, index_columns=True)
    assert pa.concat_tables(source.batches())["__index_level_0__"].to_pylist() == [7, 3]


def test_a_tokenizer_whose_directory_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may read all: the call that asks is refused."""

    def refused(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(TokenizerError, match="no permission to read this directory: change its mode or owner"):
        gpuload.load(pa.table({"prompt": ["a"]}), str(tmp_path))


@pytest.mark.parametrize("name", ["a\0b", "\ud800", ""])
def test_cache_directories_that_cannot_be(name: str, qwen: Any) -> None:
    with pytest.raises(OptionError, match="^cache_dir='.*': expected a path, or None"):
        gpuload.load(pa.table({"prompt": ["a"]}), qwen, cache_dir=name)


@pytest.mark.parametrize("name", ["/nosuch/tok", "./tok", "~/no/such/tok", "a/b/c", "tok/"])
def test_a_tokenizer_at_a_path_that_does_not_exist(name: str, gsm8k: str) -> None:
    with pytest.raises(TokenizerError, match="tokenizer '.*': no such directory: check the path$"):
        gpuload.load(gsm8k, name)


def test_a_hub_that_does_not_answer_is_asked_once(gsm8k: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(TokenizerError, match=r"the hub cannot be reached \(http://127.0.0.1:9: .*check the network"):
        gpuload.load(gsm8k, "no-such-owner/no-such-tokenizer")
    assert time.monotonic() - started < 20


def test_the_answer_of_the_hub_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    from gpuload.reference import hub

    asked: list[str] = []

    class Session:
        @staticmethod
        def head(url: str, timeout: float) -> None:
            asked.append(url)
            if "bad" in url:
                raise OSError("no route")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(hub, "_known", {})
    for endpoint, problem in (("http://bad", "http://bad: OSError: no route"), ("http://good", None)):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        assert [hub.hub_problem() for _ in range(3)] == [problem] * 3
    assert asked == ["http://bad", "http://good"]
    monkeypatch.setattr(hub, "_REMEMBERED_SECONDS", -1.0)  # the network may have come back
    assert hub.hub_problem() is None
    assert asked == ["http://bad", "http://good", "http://good"]


DOWNLOADED = """
import sys
import gpuload
from gpuload.reference import hub
assert "127.0.0.1:9" in hub.hub_problem()
print(len(gpuload.load(sys.argv[1], "an-owner/a-model")))
"""


def test_a_downloaded_model_opens_though_the_hub_is_unreachable(gsm8k: str, qwen_folder: str, tmp_path: Path) -> None:
    model, commit = tmp_path / "models--an-owner--a-model", "0" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    shutil.copytree(qwen_folder, model / "snapshots" / commit)
    (model / "snapshots" / commit / "config.json").write_text('{"model_type": "qwen2"}')
    environment = {name: value for name, value in os.environ.items() if not name.endswith("OFFLINE")}
    environment |= {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, "-W", "ignore", "-c", DOWNLOADED, gsm8k]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == str(len(pq.read_table(gsm8k)))


@pytest.mark.parametrize("text", ['[{"prompt": "a"}]', ' \n[{"prompt": "a"}]', '{"prompt": "a"}\n'])
def test_a_byte_order_mark_before_json(text: str, qwen: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert len(gpuload.load(file, qwen)) == 1
    assert _is_whole(file, "json")


@pytest.mark.parametrize("name", ["question", "problem", "text"])
def test_columns_with_prompts_of_other_names(name: str, write: Callable[..., str], qwen: Any) -> None:
    file = write({"answer": ["b"], name: ["a"]}, "qa.parquet")
    with pytest.raises(DataError, match=rf"qa.parquet: no column 'prompt': did you mean prompt_key='{name}'\?"):
        gpuload.load(file, qwen)


def test_a_dataset_that_was_saved_to_disk(qwen: Any, tmp_path: Path) -> None:
    rows = [{"prompt": user(f"number {n}"), "n": n} for n in range(40)]
    saved = datasets.Dataset.from_list(rows).filter(lambda row: row["n"] % 2 == 0)
    saved.save_to_disk(tmp_path / "data", num_shards=2)
    pq.write_table(pa.table({"prompt": ["another file"]}), tmp_path / "data" / "x.parquet")
    (tmp_path / "data" / "cache-123.arrow").write_bytes(b"result of map")
    loaded = gpuload.load(tmp_path / "data", qwen)
    assert loaded.take(["n"]) == {"n": list(range(0, 40, 2))}
    assert loaded.tokens.to_lists() == gpuload.load(pa.Table.from_pylist(rows[::2]), qwen).tokens.to_lists()
    assert [Path(name).name for name in loaded.report.files] == [f"data-0000{k}-of-00002.arrow" for k in range(2)]
    again = gpuload.load(tmp_path / "data", qwen, max_samples=3)
    assert again.origin(2) == (loaded.report.files[0], 2)


def test_a_saved_dataset_that_cannot_be_read(qwen: Any, tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"prompt": ["a", "b"]})
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "splits")
    with pytest.raises(
        SourceError, match="a dataset with the splits test, train: pass one of them, such as .*splits/test"
    ):
        gpuload.load(tmp_path / "splits", qwen)
    train = tmp_path / "splits" / "train"
    (file,) = train.glob("*.arrow")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=f"{file.name}: not a whole file of Arrow's stream format"):
        gpuload.load(train, qwen)
    file.unlink()
    with pytest.raises(SourceError, match=f"{file.name} is missing: save the dataset again"):
        gpuload.load(train, qwen)
    (train / "state.json").write_text("{}")
    with pytest.raises(SourceError, match="state.json is damaged"):
        gpuload.load(train, qwen)
