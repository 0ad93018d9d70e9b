"""gpuload's RLHFDataset returns the same rows as verl's: real data, tokenizers, tools, template arguments."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user
from same import VERL, assert_same, assert_same_row, gpuload_dataset, verl_dataset
from tiers import SHARED, name_of, shared, shared_files, shared_tokenizers, with_shared
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from gpuload.core.errors import DataError

MAX_ROWS = 400


@cache
def tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)


def tokenizers_with_template() -> list[str]:
    """Names of the shared tokenizers whose files contain a chat template."""
    directories = [SHARED / "tokenizers" / name for name in shared_tokenizers()]
    texts = {path.name: "".join(file.read_text() for file in path.glob("*config.json")) for path in directories}
    return [name for name, text in texts.items() if "chat_template" in text]


def files_with_prompts(pattern: str) -> list[Path]:
    return [file for file in shared_files(pattern) if "prompt" in pq.read_schema(file).names]


def test_shipped_data(gsm8k: str, qwen: Any) -> None:
    found = gpuload_dataset(gsm8k, qwen, max_prompt_length=120)
    expected = verl_dataset(gsm8k, qwen, max_prompt_length=120)
    assert 0 < len(expected) < pq.read_metadata(gsm8k).num_rows
    assert_same(found, expected)
    assert "rows compared with the tokenizer" in found.report


def test_without_the_filter(gsm8k: str, qwen: Any) -> None:
    found = gpuload_dataset(gsm8k, qwen, max_prompt_length=5, filter_overlong_prompts=False)
    assert_same(found, verl_dataset(gsm8k, qwen, max_prompt_length=5, filter_overlong_prompts=False))
    assert "No prompts were tokenized" in found.report


@pytest.mark.parametrize("file", with_shared(lambda: files_with_prompts("*.parquet")), ids=name_of)
def test_real_data(qwen: Any, file: Path) -> None:
    data = {"max_samples": MAX_ROWS, "shuffle": True, "seed": 7, "max_prompt_length": 256}
    expected = verl_dataset(file, qwen, **data)
    assert len(expected)
    assert_same(gpuload_dataset(file, qwen, **data), expected)


@pytest.mark.parametrize("file", with_shared(lambda: files_with_prompts("wild/*.parquet")), ids=name_of)
def test_wild_data(qwen: Any, file: Path) -> None:
    data = {"max_samples": MAX_ROWS, "max_prompt_length": 180}
    expected = verl_dataset(file, qwen, **data)
    if not len(expected):
        with pytest.raises(DataError, match="all [0-9]+ rows were dropped"):
            gpuload_dataset(file, qwen, **data)
        data["max_prompt_length"] = 10_000
        expected = verl_dataset(file, qwen, **data)
    found = gpuload_dataset(file, qwen, **data)
    assert len(expected)
    # Plain strings fall back to verl's class, which renders them as if they were messages: Qwen's template accepts it.
    strings = pa.types.is_large_string(pq.read_schema(file).field("prompt").type)
    assert bool(found.report) != strings
    assert_same(found, expected)


@pytest.mark.parametrize("name", with_shared(tokenizers_with_template))
def test_tokenizers(name: str) -> None:
    for file in shared_files("sgd_multiturn.parquet") + shared_files("xquad_12lang.parquet"):
        data = {"max_samples": 150, "shuffle": True, "seed": 1, "max_prompt_length": 400}
        expected = verl_dataset(file, tokenizer(name), **data)
        assert len(expected)
        assert_same(gpuload_dataset(file, tokenizer(name), **data), expected)


@pytest.fixture
def function_tools(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(
        "from verl.tools.function_tool import function_tool\n\n\n"
        "@function_tool\n"
        "def weather(city: str) -> str:\n"
        '    """Looks up the weather.\n\n    Args:\n        city: which city\n    """\n'
        "    return 'fine'\n"
    )
    return str(path)


@pytest.fixture
def tool_config(tmp_path: Path) -> str:
    path = tmp_path / "tools.yaml"
    path.write_text(
        "tools:\n"
        "- class_name: verl.tools.base_tool.BaseTool\n"
        "  config: {type: native}\n"
        "  tool_schema:\n"
        "    type: function\n"
        "    function:\n"
        "      name: score\n"
        "      description: Scores an answer.\n"
        "      parameters: {type: object, properties: {answer: {type: string, description: the answer}}, "
        "required: [answer]}\n"
    )
    return str(path)


def test_tools_change_the_length(gsm8k: str, qwen: Any, function_tools: str, tool_config: str) -> None:
    data = {"max_prompt_length": 330, "max_samples": MAX_ROWS}
    count_without_tools = len(gpuload_dataset(gsm8k, qwen, **data))
    with_functions = [
        {"function_tool_path": function_tools},
        {"function_tool_path": function_tools, "tool_config_path": tool_config},
    ]
    for more in ({"tool_config_path": tool_config}, *(with_functions if VERL >= (0, 8) else [])):
        limit = 180 + 60 * len(more)
        found = gpuload_dataset(gsm8k, qwen, **{**data, **more, "max_prompt_length": limit})
        assert found.tool_schemas
        assert len(found) < count_without_tools
        assert_same(found, verl_dataset(gsm8k, qwen, **{**data, **more, "max_prompt_length": limit}))


def test_missing_tool_file(gsm8k: str, qwen: Any) -> None:
    data = {"function_tool_path": "/nowhere.py", "max_samples": 50}
    assert_same(gpuload_dataset(gsm8k, qwen, **data), verl_dataset(gsm8k, qwen, **data))


def test_template_arguments(gsm8k: str, qwen: Any) -> None:
    longer = "{% for m in messages %}{{ m.content }}{{ '' if enable_thinking else ' no' * 60 }}{% endfor %}"
    data = {"max_prompt_length": 160, "max_samples": MAX_ROWS}
    counts = []
    for thinking in (True, False):
        kwargs = {"chat_template": longer, "enable_thinking": thinking, "tokenize": False, "return_dict": False}
        found = gpuload_dataset(gsm8k, qwen, apply_chat_template_kwargs=kwargs, **data)
        assert_same(found, verl_dataset(gsm8k, qwen, apply_chat_template_kwargs=kwargs, **data))
        counts.append(len(found))
    assert counts[1] < counts[0]


@shared
@pytest.mark.parametrize("thinking", [True, False])
def test_enable_thinking(thinking: bool) -> None:
    for file in shared_files("math_eval_suites.parquet"):
        data = {"apply_chat_template_kwargs": {"enable_thinking": thinking}, "max_samples": MAX_ROWS}
        found = gpuload_dataset(file, tokenizer("qwen3"), max_prompt_length=80, **data)
        assert_same(found, verl_dataset(file, tokenizer("qwen3"), max_prompt_length=80, **data))


@pytest.mark.parametrize("kwargs", [{"truncation": True, "max_length": 50}, {"continue_final_message": True}])
def test_unsupported_template_arguments_fall_back(gsm8k: str, qwen: Any, kwargs: dict[str, Any], caplog: Any) -> None:
    data = {"apply_chat_template_kwargs": kwargs, "max_prompt_length": 60, "max_samples": 50}
    found, expected = gpuload_dataset(gsm8k, qwen, **data), verl_dataset(gsm8k, qwen, **data)
    assert "falls back to verl's own dataset class: apply_chat_template_kwargs." in caplog.text
    assert found.dataframe[:] == expected.dataframe[:]


def test_max_samples(gsm8k: str, qwen: Any) -> None:
    for data in (
        {"max_samples": 40},
        {"max_samples": 40, "shuffle": True, "seed": 3},
        {"max_samples": 10**9, "shuffle": True, "seed": 3},
        {"max_samples": 0, "filter_overlong_prompts": False},
        {"max_samples": 40, "shuffle": True, "seed": 3, "filter_overlong_prompts": False},
    ):
        assert_same(gpuload_dataset(gsm8k, qwen, **data), verl_dataset(gsm8k, qwen, **data))


def test_files_with_different_columns(write: Any, qwen: Any) -> None:
    first = write({"prompt": [user("a"), user("b")], "answer": ["1", "2"], "extra_info": [{"index": 5}, None]})
    second = write({"prompt": [user("c " * 90), user("d")], "level": [1, 2], "answer": [None, None]}, "second.parquet")
    third = write({"prompt": [user("e")], "extra_info": [{"index": 9}], "ability": ["x"]}, "third.parquet")
    files = [first, second, third]
    for data in (
        {"max_prompt_length": 60},
        {"filter_overlong_prompts": False},
        {"max_samples": 3, "shuffle": True, "seed": 0},
    ):
        assert_same(gpuload_dataset(files, qwen, **data), verl_dataset(files, qwen, **data))


def test_column_types_that_verl_cannot_concatenate(write: Any, qwen: Any) -> None:
    files = [write({"prompt": [user("a")], "level": [1]}), write({"prompt": [user("b")], "level": ["2"]}, "b.parquet")]
    with pytest.raises(ValueError, match="aligned"):
        verl_dataset(files, qwen)
    assert [row["level"] for row in gpuload_dataset(files, qwen).__getitems__([0, 1])] == [1, "2"]


def test_pandas_index_columns(tmp_path: Path, qwen: Any) -> None:
    path = tmp_path / "indexed.parquet"
    pd.DataFrame({"prompt": [user("a"), user("b")]}, index=[7, 3]).to_parquet(path)
    found = gpuload_dataset(path, qwen)
    assert_same(found, verl_dataset(path, qwen))
    assert found[1]["__index_level_0__"] == 3


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_json(tmp_path: Path, qwen: Any, ending: str) -> None:
    path = tmp_path / f"data.{ending}"
    frame = pd.DataFrame(
        {
            "prompt": [user("a"), user("b " * 99), [{"role": "system", "content": "s"}, *user("c")]],
            "extra_info": [{"index": 1}, {"day": "2024-01-02"}, None],
            "day": ["2024-01-02", "2024-01-03", None],
        }
    )
    frame.to_json(path, orient="records", lines=ending == "jsonl")
    for data in ({"max_prompt_length": 60}, {"filter_overlong_prompts": False}):
        assert_same(gpuload_dataset(path, qwen, **data), verl_dataset(path, qwen, **data))


def test_arrow_types(write: Any, qwen: Any) -> None:
    message = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    rows = {
        "prompt": [user("a"), user("b")],
        "size": [1.5, None],
        "tags": [["x"], []],
        "nested": [{"a": [{"b": None}]}, {"a": None}],
        "raw": [b"\xff", None],
        "nothing": [None, None],
    }
    schema = pa.schema(
        [
            ("prompt", pa.large_list(message)),
            ("size", pa.float32()),
            ("tags", pa.list_(pa.string())),
            ("nested", pa.struct([("a", pa.list_(pa.struct([("b", pa.int8())])))])),
            ("raw", pa.binary()),
            ("nothing", pa.null()),
        ]
    )
    path = write(rows, schema=schema)
    assert_same(gpuload_dataset(path, qwen), verl_dataset(path, qwen))


ODD = [
    None,
    [],
    [None],
    [{"role": "user", "content": None}],
    [{"role": None, "content": "no role"}],
    [*user("a"), *user("b")],
    [*user("a"), {"role": "system", "content": "late"}],
    *[user("word " * n) for n in (1, 20, 60, 100)],
]
LENIENT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.content + ';' }}{% endfor %}"
)


@pytest.mark.parametrize("template", [LENIENT, STRICT, None], ids=["lenient", "strict", "qwen"])
def test_prompts_that_the_template_rejects(write: Any, qwen: Any, template: str | None) -> None:
    path = write({"prompt": ODD, "extra_info": [{"index": i} for i in range(len(ODD))]})
    kwargs = {"chat_template": template} if template else {}
    for limit in (9, 70, 1000):
        data = {"max_prompt_length": limit, "apply_chat_template_kwargs": kwargs}
        expected = verl_dataset(path, qwen, **data)
        if len(expected):
            assert_same(gpuload_dataset(path, qwen, **data), expected)
        else:
            with pytest.raises(ValueError, match="all 11 rows were dropped"):
                gpuload_dataset(path, qwen, **data)


def test_token_cache(write: Any, gsm8k: str, qwen: Any, tmp_path: Path) -> None:
    odd = write({"prompt": ODD, "extra_info": [{"index": i} for i in range(len(ODD))]})
    files, cached = [gsm8k, odd], {"cache_dir": str(tmp_path), "gpuload": {"token_cache": True, "reuse_ids": True}}
    kwargs = {"apply_chat_template_kwargs": {"chat_template": LENIENT}}
    reports = []
    for limit in (90, 70, 60):
        expected = verl_dataset(files, qwen, max_prompt_length=limit, **kwargs)
        plain = gpuload_dataset(files, qwen, max_prompt_length=limit, gpuload={"reuse_ids": True}, **kwargs)
        found = gpuload_dataset(files, qwen, max_prompt_length=limit, **cached, **kwargs)
        reports.append(found.report)
        assert len(found) == len(expected)
        assert found.dataframe.take(range(len(found))) == plain.dataframe.take(range(len(plain)))
    assert "cache" in reports[2]


def test_rejected_rows_are_reported(write: Any, qwen: Any) -> None:
    found = gpuload_dataset(write([user("a"), None]), qwen)
    assert len(found) == 1
    assert "rejected   1 row: prompt is null" in found.report
    lenient = {"chat_template": LENIENT}
    found = gpuload_dataset(
        write([user("a"), [{"role": "user", "content": None}]]), qwen, apply_chat_template_kwargs=lenient
    )
    assert len(found) == 2
    assert "1 of the rejected rows are kept" in found.report


@pytest.mark.parametrize(
    "data",
    [
        {"max_prompt_length": 120}, {"filter_overlong_prompts": False}, {"max_samples": 90, "shuffle": True, "seed": 3},
        {"max_samples": 90, "shuffle": True, "seed": 3, "filter_overlong_prompts": False},
    ],
    ids=str,
)  # fmt: skip
def test_a_store_on_disk(data: dict[str, Any], gsm8k: str, qwen: Any, tmp_path: Path) -> None:
    """The same rows, also in the workers of a loader and in a second load."""
    expected = verl_dataset(gsm8k, qwen, **data)
    for _ in range(2):
        more: dict[str, Any] = {"gpuload": {"store": "disk", "token_cache": True}, "cache_dir": str(tmp_path)}
        found = gpuload_dataset(gsm8k, qwen, **data, **more)
        assert list((tmp_path / "store").iterdir())
        assert_same(found, expected)
        loader = DataLoader(found, 50, num_workers=2, collate_fn=list)
        for number, row in enumerate(row for rows in loader for row in rows):
            if number % 10 == 0:
                assert_same_row(row, expected[number], number)


def test_ids_on_disk(gsm8k: str, qwen: Any, tmp_path: Path) -> None:
    """Rows carry the same prompt ids; those that verl accepts and gpuload cannot render have none."""
    data: dict[str, Any] = {"max_prompt_length": 120, "cache_dir": str(tmp_path)}
    one, other = (
        gpuload_dataset(gsm8k, qwen, gpuload={"reuse_ids": True, "store": where}, **data)
        for where in ("memory", "disk")
    )
    assert one.dataframe.take(range(len(one))) == other.dataframe.take(range(len(other)))
    rows = range(5, len(one), 7)
    assert one.dataframe.select(rows).take([3, 1]) == other.dataframe.select(rows).take([3, 1])
    assert one.state_dict() == other.state_dict()


def test_json_on_disk(tmp_path: Path, qwen: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": user(f"question {i}"), "n": i}) + "\n" for i in range(60)))
    found = gpuload_dataset(file, qwen, gpuload={"store": "disk"}, cache_dir=str(tmp_path / "cache"))
    assert_same(found, verl_dataset(file, qwen))
