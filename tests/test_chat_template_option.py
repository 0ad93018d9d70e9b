"""The option `chat_template`: names, texts and files of templates; and what the report says of each."""

import warnings
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pyarrow as pa
import pytest
from conftest import user
from transformers import AutoTokenizer

import gpuload
from gpuload.core.errors import OptionError, TokenizerError
from gpuload.reference.reference import Reference
from gpuload.reference.template_call import TemplateCall
from gpuload.reference.template_source import vendor_environment
from gpuload.template.probe import WHITE_SPACE

TABLE = pa.table({"prompt": [user("Hello"), user("there")]})
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


class Text(NamedTuple):
    first: str
    second: str


def load(tokenizer: Any, **options: Any) -> gpuload.PromptDataset:
    return gpuload.load(TABLE, tokenizer, **options)


@pytest.fixture
def named(qwen_folder: str) -> Any:
    """A tokenizer with two named templates."""
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "tools:" + TEMPLATE}
    return tokenizer


def test_a_name_that_no_template_has_is_an_error(qwen: Any, named: Any) -> None:
    with pytest.raises(TokenizerError, match=r"chat_template='tool_use': .* is not a template: pass one of 'default',"):
        load(qwen, chat_template="tool_use")
    with pytest.raises(TokenizerError, match="pass one of 'default', 'tool_use', the text of a template"):
        load(named, chat_template="rag")
    texts = load(named, chat_template="tool_use", return_full_prompt=True)
    assert texts[0]["full_prompts"] == "tools:<user>Hello"


@pytest.mark.parametrize("text", ["", "no template", "{ not a template }", "one.txt"])
def test_text_that_is_no_template_is_an_error(text: str, qwen: Any) -> None:
    with pytest.raises(TokenizerError, match="is not a template"):
        load(qwen, chat_template=text)


def test_a_template_from_a_file(qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = load(qwen, chat_template=TEMPLATE)
    for given in (str(file), file, "~/own.jinja"):
        found = load(qwen, chat_template=given)
        assert found.tokens.to_lists() == expected.tokens.to_lists()
        assert found.fingerprint == expected.fingerprint
        assert (
            Reference(qwen, chat_template=given).fingerprint() == Reference(qwen, chat_template=TEMPLATE).fingerprint()
        )


def test_a_file_that_cannot_be_read(qwen: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"chat_template='.*missing.jinja': no such file: check the path"):
        load(qwen, chat_template=str(tmp_path / "missing.jinja"))
    with pytest.raises(OptionError, match="no such file"):
        load(qwen, chat_template=tmp_path / "missing.txt")
    folder = tmp_path / "folder.jinja"
    folder.mkdir()
    with pytest.raises(OptionError, match="cannot read the file"):
        load(qwen, chat_template=folder)
    (tmp_path / "latin.jinja").write_bytes(b"{{ '\xe9' }}")
    with pytest.raises(OptionError, match="cannot read the file"):
        load(qwen, chat_template=tmp_path / "latin.jinja")


def test_the_token_cache_depends_on_the_text_of_a_template(
    warm_cache: Path, qwen: Any, gsm8k: str, tmp_path: Path
) -> None:
    one, other = tmp_path / "one.jinja", tmp_path / "other.jinja"
    one.write_text(TEMPLATE)
    other.write_text(TEMPLATE)
    options: dict[str, Any] = {"max_prompt_length": 512, "verify": "off"}
    assert not gpuload.load(gsm8k, qwen, chat_template=one, **options).report.from_cache
    assert gpuload.load(gsm8k, qwen, chat_template=other, **options).report.from_cache
    one.write_text("x" + TEMPLATE)
    assert not gpuload.load(gsm8k, qwen, chat_template=one, **options).report.from_cache


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages }}\n{% if x %}\n", "line 2: Unexpected end of template"),
        ("{{ messages }}\n\n{{ 1 + }}", "line 3: "),
        ("{{ messages | no_filter }}", "line 1: No filter named 'no_filter'"),
    ],
)
def test_a_syntax_error_is_one_error(template: str, message: str, qwen: Any) -> None:
    with pytest.raises(TokenizerError, match=message):
        load(qwen, chat_template=template)


def test_a_constant_is_not_evaluated_by_the_check_of_the_syntax(qwen: Any) -> None:
    assert Reference(qwen, chat_template="{{ 'x' * 10**10 }}").call.syntax_error() is None


def test_plain_text_is_not_a_compiled_template(qwen: Any) -> None:
    prompts = gpuload.load(pa.table({"prompt": ["a", "b"]}), qwen, chat_template=None)
    assert "template" not in str(prompts.report)
    assert "prompts are plain text, encoded by" in prompts.report.engine


def test_a_template_that_cannot_be_compiled_is_not_called_compiled(qwen: Any) -> None:
    prompts = load(qwen, apply_chat_template_kwargs={"function": len})
    assert "template compiled" not in prompts.report.engine
    assert "chat template rendered by transformers, row by row" in prompts.report.engine


@pytest.mark.parametrize(
    "given",
    [range(3), (1, (2, 3)), OrderedDict(a=[1]), deque([1, 2]), Text("a", "b"), {"a": {"b": [None, True]}}],
    ids=lambda given: type(given).__name__,
)
@pytest.mark.parametrize("rows", [1, 100])
def test_an_argument_is_printed_as_transformers_prints_it(qwen: Any, given: Any, rows: int) -> None:
    template = "{{ given }}|{% for message in messages %}{{ message.content }}{% endfor %}"
    data = pa.table({"prompt": [[{"role": "user", "content": f"Question {row}"}] for row in range(rows)]})
    arguments = {"chat_template": template, "apply_chat_template_kwargs": {"given": given}}
    prompts = gpuload.load(data, qwen, **arguments, return_full_prompt=True, verify="off")
    expected = [
        qwen.apply_chat_template(messages, chat_template=template, given=given, tokenize=False)
        for messages in data["prompt"].to_pylist()
    ]
    assert [prompts[row]["full_prompts"] for row in range(rows)] == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ [1, 2] | random }}", "the chat template contains randomness"),
        ("{{ [[1, 2]] | map('random') | first }}", "the chat template contains randomness"),
        ("{{ lipsum(1) | length }}", "the chat template contains randomness"),
        ("{{ strftime_now('%H:%M') }}", "the chat template prints the time of day"),
        ("{{ strftime_now('%d %b %Y') }}", None),
        ("", None),
    ],
)
def test_prompts_that_differ_from_run_to_run_are_reported(template: str, reason: str | None, qwen: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # two calls that differ are not a wrong token
        report = load(qwen, chat_template=template + TEMPLATE, verify="full", strict=True).report
    assert [note for note in report.notes if "run to run" in note] == (
        [f"prompts differ from run to run: {reason}"] if reason else []
    )
    assert report.check.rows == (0 if reason and "random" in reason else 2)


@pytest.mark.parametrize(
    "template",
    [
        "{{ x|nothing }}",
        "{{ x is nothing }}",
        "{% if x %}{{ x|nothing }}{% endif %}",
        "{% for loop in x %}{{ loop }}{% endfor %}",
        "{% for a in x %}{{ loop.index }}{% set loop = 1 %}{% endfor %}",
        "{% block a %}{% endblock %}{% block a %}{% endblock %}",
        "{% if x %}{% extends 'y' %}{% endif %}",
        "{% macro m(caller, b) %}{{ caller() }}{% endmacro %}",
        "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1) }}",
        "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = m.content|trim %}{{ ns.a }}{% endfor %}",
    ],
)
def test_errors_that_only_the_compiler_finds_are_found(template: str, qwen: Any) -> None:
    """Most templates are not compiled to look for them."""
    try:
        vendor_environment().compile(template, raw=True)  # type: ignore[union-attr]
        expected = None
    except jinja2.TemplateSyntaxError as error:
        expected = f"line {error.lineno}: {error.message}"
    assert TemplateCall(qwen, template).syntax_error() == expected


def test_white_space_is_that_of_python() -> None:
    assert "".join(filter(str.isspace, map(chr, range(0x110000)))) == WHITE_SPACE
