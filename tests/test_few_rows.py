"""Few rows, which transformers renders and the tokenizer encodes: the same rows, reasons and limits as by columns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import user
from tiers import SHARED, shared_tokenizers, with_shared
from tokenizer_cases import needs_sanitizing

import gpuload
from gpuload.core.errors import DataError
from gpuload.core.options import Options
from gpuload.engines.choose import choose_engine
from gpuload.engines.host import few
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.kept import KeptEngine
from gpuload.inspect.findings import findings
from gpuload.inspect.statistics import Statistics
from gpuload.reference.reference import Reference
from gpuload.template.compiler import ChatProgram

FEW_ROWS, ROWS = 1_000, 12
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]

CONVERSATIONS: list[Any] = [
    user("hello"),
    user("  <|im_end|> \u0130 e\u0301 \u4f60\u597d\n\n\t x"),
    [{"role": "system", "content": "Be brief."}, *user("1+1?"), {"role": "assistant", "content": "2"}, *user("why")],
    user(""),
    [{"role": "assistant", "content": "<think>a</think>b"}, {"role": "tool", "content": "r"}, *user("x")],
    "a plain string",
    None,
    [],
    user(None),
    user(5),
    [{"role": "user"}],
    ["no message"],
    user("\ud800"),
    [{"role": "user", "content": [{"type": "text", "text": "parts"}]}],
]

SOURCES: dict[str, Callable[[], list[Any]]] = {
    "messages": lambda: [each for each in CONVERSATIONS if isinstance(each, list) and each[:1] != ["no message"]][:5],
    "texts": lambda: ["one", "", "two <|im_start|>", None],
    "mixed": lambda: CONVERSATIONS,
}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "FEW_ROWS", FEW_ROWS)  # as it is for users (conftest.py)


def both(monkeypatch: pytest.MonkeyPatch, *given: Any, **options: Any) -> tuple[Any, Any]:
    """A load of few rows, and the same by columns."""
    found = gpuload.load(*given, **options)
    with monkeypatch.context() as patch:
        patch.setattr(few, "FEW_ROWS", -1)
        return found, gpuload.load(*given, **options)


@pytest.mark.filterwarnings("ignore:gpuload. .* rows were dropped")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_few_rows_are_those_of_the_tokenizer(
    source: str, whole: bool, tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": row, "n": n}) + "\n" for n, row in enumerate(SOURCES[source]())))
    if not whole:
        monkeypatch.setattr(few, "WHOLE_BYTES", -1)
    options = {"max_prompt_length": 160, "apply_chat_template_kwargs": {"tools": TOOLS}} if whole else {}
    found, compiled = both(monkeypatch, str(path), qwen, **options)
    assert found.report.by_reference == {few.FEW: found.report.rows_read - found.report.rows_rejected}
    assert few.FEW not in compiled.report.by_reference
    assert found.tokens.to_lists() == compiled.tokens.to_lists()
    assert [row["n"] for row in found] == [row["n"] for row in compiled]
    for name in ("rejected", "examples", "overlong", "text_bytes", "control_rows", "rows_kept", "shortest", "longest"):
        assert getattr(found.report, name) == getattr(compiled.report, name), name


@pytest.mark.parametrize("name", with_shared(shared_tokenizers))
def test_few_rows_of_many_projects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = str(SHARED / "tokenizers" / name)
    files = [str(SHARED / "datasets" / each) for each in ("xquad_12lang.parquet", "code_prompts.parquet")]
    if Reference(tokenizer, chat_template=None).tokenizer.chat_template is None:
        pytest.skip("no chat template")
    found, compiled = both(monkeypatch, files, tokenizer, max_samples=40, shuffle=True, seed=3)
    assert found.report.rows_by_reference == 40
    assert found.tokens.to_lists() == compiled.tokens.to_lists()


def test_the_template_is_not_compiled_and_few_rows_are_compared(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatProgram, "grow", lambda *_: pytest.fail("a path through the template is traced"))
    path = write([user(f"{k} apples") for k in range(300)])
    several = [write([user(f"{k} {k}")] * 3, f"{k}.parquet") for k in range(5)]
    assert gpuload.load(several, qwen).report.check.rows <= 8
    report = gpuload.load(path, qwen).report
    assert (report.rows_by_reference, report.rows_compiled, report.rows_slow) == (300, 0, 0)
    assert report.check.rows == 8
    assert "300 rows rendered by transformers: sooner done" in str(report)
    assert "hint" not in str(report)
    assert report.engine.startswith("cpu: chat template rendered by transformers, row by row, encoded by tokenizers ")
    assert "word" not in report.engine
    assert gpuload.load(path, qwen, verify="full").report.check.rows == 300
    # Texts of more bytes are encoded word by word, and compared as always.
    monkeypatch.setattr(few, "WHOLE_BYTES", 100)
    report = gpuload.load(path, qwen).report
    assert report.rows_by_reference == 300
    assert report.engine.endswith("each different word once")
    assert report.check.rows >= 64


def test_reports_of_few_rows_do_not_call_them_slow(write: Callable[..., str], qwen: Any) -> None:
    report = gpuload.load(write([user("x")] * 3), qwen).report
    said: list[str] = []
    for by_reference in ({few.FEW: 3}, {"another reason": 3}):
        report.by_reference = by_reference
        found = Statistics.__new__(Statistics)
        vars(found).update(report=report, equal_pairs=0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpuload.inspect.findings.suggestion", lambda _: "")
            said.append(" ".join(findings(found)))
    assert "slow" not in said[0]
    assert "transformers renders 3 rows one by one, which is slow" in said[1]


def test_more_rows_are_compiled(write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write([user(f"{k} apples") for k in range(ROWS)])
    monkeypatch.setattr(few, "FEW_ROWS", ROWS - 1)
    assert gpuload.load(path, qwen).report.rows_compiled == ROWS
    assert gpuload.load(path, qwen, max_samples=ROWS - 1).report.rows_by_reference == ROWS - 1
    monkeypatch.setattr(few, "FEW_BYTES", 10)
    assert gpuload.load(path, qwen, max_samples=ROWS - 1).report.rows_by_reference == 0


@needs_sanitizing
def test_what_is_not_rendered_by_the_tokenizer_alone_is_compiled(write: Callable[..., str], qwen: Any) -> None:
    """Marked control tokens, texts without a template, and data to train on, whose masks are found by columns."""
    path = write([user("<|im_end|>")] * 3)
    sanitized = gpuload.load(path, qwen, apply_chat_template_kwargs={"sanitize_control_tokens": True})
    assert few.FEW not in sanitized.report.by_reference
    plain = gpuload.load(write(["a", "b"], "texts.parquet"), qwen, chat_template=None)
    assert plain.report.rows_by_reference == 0
    chats = gpuload.load_chats(write({"messages": [[*user("a"), {"role": "assistant", "content": "b"}]] * 3}), qwen)
    assert chats.report.rows_by_reference == 0


@pytest.mark.parametrize("template", ["{{ 'x' * 10**10 }}", "{% for m in range(99999) %}{% for n in range(99999) %}{% endfor %}{% endfor %}"])  # fmt: skip # noqa: E501
def test_templates_without_an_end_are_stopped(template: str, write: Callable[..., str], qwen: Any) -> None:
    with pytest.raises(DataError, match="the template (builds a value of more|does not terminate)"):
        gpuload.load(write([user("x")] * 3), qwen, chat_template=template)


def test_errors_are_those_of_any_load(write: Callable[..., str], qwen: Any) -> None:
    path = write([user("x"), None])
    with pytest.raises(DataError, match="row 1: prompt is null"):
        gpuload.load(path, qwen, strict=True)
    assert len(gpuload.load(write([user("x")] * 3), qwen, strict=True)) == 3
    template = "{{ raise_exception('never') }}"
    with pytest.raises(DataError, match="never"):
        gpuload.load(write([user("x")] * 3), qwen, chat_template=template)


def test_templates_that_tell_the_time_tell_the_same_time(write: Callable[..., str], qwen: Any) -> None:
    template = "{{ strftime_now('%f') }} {{ messages[0].content }}"
    found = gpuload.load(write([user("x")] * 50), qwen, chat_template=template)
    assert len({tuple(ids) for ids in found.tokens.to_lists()}) == 1


def test_an_engine_for_many_loads_compiles(write: Callable[..., str], qwen: Any) -> None:
    """A stream's batches are few rows, but not its last ones."""
    build = KeptEngine(choose_engine)
    options, reference = Options.parse({"device": "cpu"}), Reference(qwen)
    engine = build(options, reference, False)
    assert isinstance(engine, HostEngine)
    engine.loading(100, 3)
    assert not engine.by_tokenizer
    alone = choose_engine(options, reference)
    alone.loading(100, 3)
    assert alone.by_tokenizer


def test_rows_for_which_a_loop_does_not_end_cost_only_themselves(write: Callable[..., str], qwen: Any) -> None:
    template = (
        "{% for m in messages %}{% if m.content == 'bad' %}{% for i in range(99999) %}{% for j in range(99999) %}x"
        "{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
    )
    rows = [[{"role": "user", "content": "bad" if row % 2 else f"hello {row}"}] for row in range(40)]
    path = write(rows)
    prompts = gpuload.load(path, qwen, chat_template=template, token_cache=False)
    assert len(prompts) == 20
    assert sum(prompts.report.rejected.values()) == 20
