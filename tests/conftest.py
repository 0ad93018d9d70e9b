"""What tests share: the shipped data and tokenizer, the folder of real data where it exists, small parquet files."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before any Hugging Face library is imported: nothing here may reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from simulator import link_slow_caches
from tiers import SHARED, choose, header, shared, shared_tokenizers

from gpuload.cache import store as cache
from gpuload.cache.entry import read_entry
from gpuload.demo_data import demo_files
from gpuload.engines.host import few
from gpuload.pipeline import parts
from gpuload.sources import batches
from gpuload.template.known import forget_templates

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

# tests/verl is for an environment of its own (make verl-test).
collect_ignore = [] if importlib.util.find_spec("tensordict") else ["verl"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    choose(config, items)


def pytest_report_header() -> list[str]:
    return header()


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """None of the tests writes into the user's cache, and none finds tokens in one: two loads that are compared must
    both have made theirs. Tests of the cache ask for `warm_cache`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULOAD_CACHE", link_slow_caches(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "read_entry", lambda *_, **__: None)
        patch.setattr(cache, "LEAST_BYTES", 0)  # tests of the cache have little data
        patch.setattr(few, "FEW_ROWS", -1)  # and those of templates few rows
        yield


@pytest.fixture(autouse=True)
def _templates_of_the_test() -> None:
    """None of the tests finds what others have learned of a template's loops."""
    forget_templates()


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    """None of the tests leaves a judgement of a file or a GPU to the tests that follow in its process."""
    yield
    for module, judgements in (("parts", "MISREAD"), ("verdict", "UNCHECKED")):
        found = getattr(sys.modules.get(f"gpuload.engines.device.{module}"), judgements, None)
        assert not found, f"{judgements} has {found}"


@pytest.fixture
def warm_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, empty at first, in which tokens are found; the folder of its entries."""
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "read_entry", read_entry)
    return tmp_path / "cache" / "tokens"


@pytest.fixture(scope="session")
def gsm8k() -> str:
    return demo_files()[0]


@pytest.fixture(scope="session")
def qwen_folder() -> str:
    return demo_files()[1]


@pytest.fixture(scope="session")
def qwen(qwen_folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(qwen_folder)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(prompts or {column: values}, name="data.parquet", schema=None) → the path of a parquet file."""

    def write_parquet(data: Any, name: str = "data.parquet", schema: pa.Schema | None = None) -> str:
        columns = data if isinstance(data, dict) else {"prompt": data}
        path = tmp_path / name
        pq.write_table(pa.table(columns, schema=schema), path)
        return str(path)

    return write_parquet


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by a number for each batch that is rendered, and for each encoder that is built."""
    calls: list[int] = []

    def counted(step: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            calls.append(len(calls))
            return step(*arguments, **more)

        return call

    from gpuload.engines.host import engine as cpu

    for name in ("render_column", "render_rows", "host_encoder"):
        monkeypatch.setattr(cpu, name, counted(getattr(cpu, name)))
    return calls


@pytest.fixture
def files(write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three files of different columns and types, with rejected, overlong and by-reference rows; the first one in
    several batches, the second one with nothing but prompts."""
    monkeypatch.setattr(batches, "BATCH_ROWS", 128)
    monkeypatch.setattr(parts, "_SMALL_ROWS", 0)  # which are not joined again
    rng = np.random.default_rng(0)
    chats: list[Any] = [user("number " * int(n)) for n in rng.integers(0, 60, 300)]
    chats[7], chats[20], chats[299] = None, [], [{"role": "tool", "content": "x"}]
    for row in range(0, 300, 11):
        chats[row] = [{"role": "system", "content": f"row {row} \u00e9"}, *user("<|im_end|> \u4f60\u597d")]
    first = str(tmp_path / "first.parquet")
    table = pa.table({"prompt": pa.array(chats, MESSAGES), "extra_info": [{"index": i} for i in range(300)]})
    pq.write_table(table, first, row_group_size=128)
    second = write([user("alone"), [{"role": "tool", "content": ""}], user("")], "second.parquet")
    third = tmp_path / "third.jsonl"
    third.write_text('{"prompt": "a string", "more": [1, 2]}\n{"prompt": null, "more": []}\n')
    return [first, second, str(third)]


def user(text: Any) -> list[dict[str, Any]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="session", params=["shipped", pytest.param("shared", marks=shared)])
def folders(request: pytest.FixtureRequest, qwen_folder: str) -> dict[str, Path]:
    """name → directory of the shipped tokenizer; in a second run of each test, of every shared one."""
    if request.param == "shipped":
        return {"shipped": Path(qwen_folder)}
    return {name: SHARED / "tokenizers" / name for name in shared_tokenizers()}


@pytest.fixture(scope="session")
def encoders(folders: dict[str, Path]) -> dict[str, Any]:
    """name → (encoder, reference) for each tokenizer of `folders`."""

    from gpuload.engines.host.encode import host_encoder
    from gpuload.reference.reference import Reference

    references = {name: Reference(folder, chat_template=None) for name, folder in folders.items()}
    return {name: (host_encoder(reference), reference) for name, reference in references.items()}


@pytest.fixture(scope="session")
def bpe(folders: dict[str, Path]) -> dict[str, tuple[Any, Any]]:
    """name → (spec, backend) for each tokenizer of `folders` that is byte-level BPE, from its file: classes that
    transformers rebuilds on loading lose parts of the pipeline that are worth testing."""
    from tokenizers import Tokenizer

    from gpuload.tokenizer.spec import bpe_spec

    backends = {name: Tokenizer.from_file(str(folder / "tokenizer.json")) for name, folder in folders.items()}
    specs = {name: bpe_spec(backend.to_str()) for name, backend in backends.items()}
    return {
        name: (spec, backends[name]) for name, spec in specs.items() if not isinstance(spec, str) and not spec.fallback
    }


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What `make exact` compared: the rows of each tokenizer, and those that fell back."""
    totals: dict[str, list[int]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, (rows, left) in report.user_properties:
            total = totals.setdefault(name, [0, 0])
            totals[name] = [total[0] + rows, total[1] + left]
    for name, (rows, left) in sorted(totals.items()):
        terminalreporter.write_line(f"{name}: {rows:,} rows, 0 differ; {left:,} fell back to the tokenizer itself")
