"""Templates that do not end or need too much memory: as traced, and as rendered by transformers."""

import threading
import time
from typing import Any

import pytest
from template_cases import column, compile, small_tokenizer

from gpuload.engines.host.render import render
from gpuload.reference import deadline
from gpuload.reference.deadline import Deadline, EndlessError
from gpuload.reference.reference import Reference
from gpuload.reference.template_call import rejection
from gpuload.template import trace
from gpuload.template.bounds import call_size, deep_size, filter_size, operator_size

ROWS = [[{"role": "user", "content": "x"}], [{"role": "user", "content": "yy"}]]
NOT_COMPILABLE = "{% set _ = messages[0].content | length + 1 %}"

NESTED = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"

TOO_LARGE = {
    "times": "{{ 'x' * 10**10 }}",
    "list times": "{{ [0] * 10**10 }}",
    "product": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}",
    "percent": "{{ '%1000000000s' % 'x' }}",
    "percent precision": "{{ '%.1000000000f' % 1.5 }}",
    "percent star": "{{ '%*s' % (10**10, 'x') }}",
    "format filter": "{{ '%1000000000s' | format('x') }}",
    "str.format": "{{ '{:1000000000}'.format('x') }}",
    "str.format nested": "{{ '{:{}}'.format('x', 10**10) }}",
    "center": "{{ 'x' | center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**10) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "tojson": "{{ [[1]] | tojson(indent=2000000000) }}",
    "indent": "{{ 'a\\nb' | indent(10**10) }}",
    "wordwrap": "{{ ('a ' * 10000) | wordwrap(1, wrapstring='y' * 10000) }}",
    "replace": "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
    "str.replace": "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
    "join": "{{ range(10000) | list | join('x' * 10000) }}",
    "str.join": "{{ ('x' * 10000).join(['a'] * 10000) }}",
    "translate": "{{ ('a' * 10000).translate({97: 'b' * 10000}) }}",
    "round": "{{ 1.5 | round(10**10, 'ceil') }}",
    "growth": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "escapes": "{% set n = namespace(x='\"') %}{% for i in range(99) %}{% set n.x = n.x | tojson %}{% endfor %}",
    "nested lists": NESTED + "{{ n.x }}",
    "nested lists as JSON": NESTED + "{{ n.x | tojson }}",
    "constant": "{% set x = 'x' | center(10**10) %}",
}  # fmt: skip


@pytest.mark.parametrize("before", ["", NOT_COMPILABLE], ids=["traced", "by transformers"])
@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_value_that_is_too_large_is_never_built(name: str, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_STEPS", 50_000)
    program = compile(small_tokenizer(), chat_template=before + TOO_LARGE[name] + "{{ messages[0].content }}")
    rendered = render(program, column(ROWS))
    assert set(rendered.rejected) == {0, 1}
    assert all("the template builds a value of more than" in why for why in rendered.rejected.values())


SMALL = (
    "'%5s' % 'x'", "'{:>5}|{}'.format('x', 2)", "'x' | center(9)", "'a\\nb' | indent(4)", "[1, [2, 3]]", "5 % 3",
    "[1, {'a': [2]}] | tojson(indent=2)", "'a b' | replace('a', 'bb')", "[1, 2] | join(', ')", "1.25 | round(1)",
    "2 ** 10", "'%(a)s' % {'a': 1}", "[3, 4] * 2", "'x'.ljust(3, '-')", "[1, 2, 3] | batch(2, 0) | list",
    "'a\\tb'.expandtabs(4)", "'abc' | upper",
)  # fmt: skip


@pytest.mark.parametrize("expression", SMALL)
def test_small_values_are_the_same_with_limits(expression: str) -> None:
    template = "{{ " + expression + " }}{{ messages[0].content }}"
    rendered = render(compile(small_tokenizer(), chat_template=template), column(ROWS))
    assert rendered.compiled_rows == 2
    expected = [small_tokenizer().apply_chat_template(r, chat_template=template, tokenize=False) for r in ROWS]
    assert rendered.text.to_pylist() == expected


def test_sizes_are_upper_bounds() -> None:
    value = [{"a": [1, "two", None]}, (3.5, True), "é" * 10]
    assert deep_size(value) >= len(str(value))
    assert operator_size("%", "%-30s|%5.3f", ("x", 2.0)) >= 36
    assert call_size("ab{:>9}".format, ("x",), {}) >= 11
    assert call_size("a\ta".expandtabs, (), {}) >= 9
    assert filter_size("tojson", (value,), {"indent": 8}) >= 100
    assert filter_size("unknown", (value,), {}) == 0


def test_joined_texts_of_messages_are_bounded() -> None:
    template = (
        "{% set n = namespace(x=messages[0].content) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    )
    began = time.monotonic()
    rendered = render(compile(small_tokenizer(), chat_template=template), column(ROWS))
    assert set(rendered.rejected) == {0, 1}
    assert time.monotonic() - began < 10


def test_a_long_row_that_transformers_renders_is_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.template.sandbox.MOST_CHARACTERS", 1000)
    rows = [[{"role": "user", "content": "long " * 1000}]]
    template = "{{ messages[0].content | length }}{{ messages[0].content }}"
    rendered = render(compile(small_tokenizer(), chat_template=template), column(rows))
    assert rendered.text.to_pylist() == ["5000" + "long " * 1000]


# -- time ------------------------------------------------------------------------------------------------------------

ENDLESS = NOT_COMPILABLE + "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "FIRST_SECONDS", 0.3)
    monkeypatch.setattr(deadline, "LATER_SECONDS", 0.1)


def test_a_loop_in_transformers_ends(short: None) -> None:
    """Rows by transformers, on any thread, and without the check before them."""
    found: list[Any] = []

    def work() -> None:
        call = compile(small_tokenizer(), chat_template=ENDLESS).call
        for _ in range(3):
            try:
                call.render(ROWS[0])
            except Exception as error:
                found.append(rejection(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert found == ["the template did not finish within 0.3 s", *["the template did not finish within 0.1 s"] * 2]


def test_a_loop_that_the_trace_has_not_reached_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_STEPS", 50_000)
    rows = [[{"role": "user", "content": "x"}], [{"role": "user", "content": "fine"}]]
    template = "{% if messages[0].content | length < 3 %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    rendered = render(compile(small_tokenizer(), chat_template=template), column(rows))
    assert list(rendered.rejected) == [0]
    assert "does not terminate" in rendered.rejected[0]
    assert rendered.text.to_pylist() == [None, "fine"]


def test_after_many_late_rows_no_more_are_tried(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "MOST_LATE", 2)
    watch = Deadline()

    def forever() -> None:
        while True:
            pass

    for _ in range(2):
        with pytest.raises(EndlessError, match="did not finish within"):
            watch.within(forever)
    with pytest.raises(EndlessError, match="for 2 other rows"):
        watch.within(lambda: 1)


def test_a_deadline_never_strikes_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that end about when their time is over either return or raise, and nothing is raised later."""
    monkeypatch.setattr(deadline, "FIRST_SECONDS", 0.002)
    monkeypatch.setattr(deadline, "_INTERVAL", 0.0005)
    monkeypatch.setattr(deadline, "_watching", [])  # a watching thread with this interval
    late = 0
    for i in range(300):
        until = time.monotonic() + 0.0005 * (i % 9)

        def spin(until: float = until) -> int:
            while time.monotonic() < until:
                pass
            return 7

        try:
            assert Deadline().within(spin) == 7
        except EndlessError:
            late += 1
        sum(range(50))
    assert 0 < late < 300


def test_encoding_a_long_row_is_not_the_template_s_time(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "FIRST_SECONDS", 0.3)
    messages = [{"role": "user", "content": "some words to encode " * 150_000}]
    reference = Reference(qwen)
    assert len(reference.ids(messages)) > 600_000


def test_exceptions_and_results_pass_through_a_deadline() -> None:
    assert Deadline().within(lambda: Deadline().within(lambda: 3)) == 3
    with pytest.raises(KeyError, match="mine"):
        Deadline().within(lambda: {}["mine"])


@pytest.mark.parametrize("error", [MemoryError(), ValueError(""), EndlessError(), KeyError()])
def test_a_reason_is_never_empty(error: Exception) -> None:
    assert rejection(error) == type(error).__name__


def test_a_template_that_raises_nothing_gives_a_reason() -> None:
    template = "{{ raise_exception('') }}"
    rendered = render(compile(small_tokenizer(), chat_template=template), column(ROWS))
    assert rendered.rejected == {0: "TemplateError", 1: "TemplateError"}
