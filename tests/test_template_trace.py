"""The tracer: laundered text, wrong traces caught by probes, templates that do not terminate, limits of growth."""

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from template_cases import TEXTS, assert_same, column, compile, conversations, small_tokenizer

from gpuload.engines.host.render import render
from gpuload.template import compiler, trace
from gpuload.template.program import TEXT, ByReference, Path, Rejected
from gpuload.template.rope import Rope

USER = ((("role", "user"), ("content", TEXT)),)
EACH = [[{"role": "user", "content": text}] for text in TEXTS]


def leaf_of(template: str) -> Any:
    """The leaf that one plain message reaches."""
    program = compile(small_tokenizer(), chat_template=template)
    render(program, column([[{"role": "user", "content": "plain text"}]]))
    (tree,) = program.trees.values()
    return next(leaf for _, leaf in tree.leaves() if leaf is not None)


# Each template joins a text with others in some indirect way, and then inspects the joined text: "laundered" text,
# which a tracer based on placeholder strings gets wrong.
LAUNDERED = {
    "macro": "{% macro show(x) %}{{ x }}{% endmacro %}{{ show(messages[0].content) | trim }}",
    "tilde": "{% set x = '' ~ messages[0].content ~ '' %}{{ x.strip() }}",
    "plus": "{% set x = ' ' + messages[0].content + '\\n' %}[{{ x.strip() }}]",
    "join": "{{ ['', messages[0].content, ' '] | join | trim }}",
    "str.join": "{{ ' '.join(['', messages[0].content]).strip() }}",
    "set block": "{% set x %}\n {{ messages[0].content }} {% endset %}{{ x.lstrip() }}",
    "namespace": "{% set n = namespace(t='') %}{% set n.t = n.t + messages[0].content %}{{ n.t | trim }}",
    "call": "{% macro f() %}{{ caller().strip() }}{% endmacro %}{% call f() %}{{ messages[0].content }}{% endcall %}",
    "filter block": "{% filter trim %} {{ messages[0].content }} {% endfilter %}",
    "percent": "{{ (' %s ' % messages[0].content).strip() }}{{ '%s|%s' | format(messages[0].content, 1) }}",
    "prefix of joined": "{% set x = '<' ~ messages[0].content %}{{ x.startswith('<think>') }}",
    "search of joined": "{% set x = '</thi' ~ messages[0].content %}{{ '</think>' in x }}",
    "split of joined": "{% set x = '<think>a</think>' ~ messages[0].content %}{{ x.split('</think>')[-1] }}",
    "first of joined": "{% set x = messages[0].content ~ '</think>' %}{{ x.split('</think>')[0] | trim }}",
    "replace": "{{ ('a' ~ messages[0].content) | replace('ap', 'x') }}",
    "generation": "{% set x %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}{{ x | trim }}",
    "repr": "{{ [messages[0].content] }}", "tojson": "{{ messages | tojson }}",
    "lookup": "{{ {'plain text': 1}.get(messages[0].content, 2) }}",
    "membership": "{{ messages[0].content in ['x', 'plain text'] }}{{ messages[0].content in 'some plain text' }}",
    "format": "{{ '{}'.format(messages[0].content) }}",
    "upper": "{{ messages[0].content | upper }}{{ messages[0].content.title() }}",
    "length minus": "{{ messages[0].content | length - 1 }}",
    "length": "{{ messages[0].content | length }}",
    "length above zero": "{% if messages[0].content | trim | length > 0 %}y{% else %}n{% endif %}",
    "slice": "{{ messages[0].content[1:] }}", "int": "{{ messages[0].content | int }}",
    "loop": "{% for c in messages[0].content %}{{ c }}-{% endfor %}",
    "loop over parts": "{% for c in messages[0].content.split('think') %}{{ c | trim }}-{% endfor %}",
    "white space": "{{ messages[0].content.split() | join('_') }}",
    "type": "{% set c = messages[0].content %}{{ c is string }}{{ c is mapping }}{{ c is sequence }}{{ c is number }}",
    "sort": "{{ [messages[0].content, 'm'] | sort | first }}",
    "unique": "{{ [messages[0].content, 'plain text'] | unique | list | length }}",
    "default": "{{ messages[0].content | default('none', true) }}{{ messages[0].missing | default('d') }}",
    "select": "{{ messages | selectattr('content', 'equalto', 'plain text') | list | length }}",
    "map": "{{ messages | map(attribute='content') | join(',') | trim }}",
    "safe": "{{ (messages[0].content | safe) + '<b>' }}",
    "escape": "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}{{ messages[0].content | e }}",
    "comparison": "{{ messages[0].content > 'b' }}", "times": "{{ messages[0].content * 2 }}",
    "not": "{% if not messages[0].content.strip() %}empty{% endif %}",
    "raise": "{{ raise_exception('no: ' ~ messages[0].content) }}",
    "random": "{{ messages[0].content }}{{ [1] | random }}",
    "attribute": "{% set c = messages[0].content %}{{ c.nothing }}{{ c._pieces }}{{ c['_oracle'] }}",
    "private": "{{ messages[0].content.__class__.__mro__ }}", "dict method": "{{ messages[0].items() | list }}",
    "counted": "{{ messages[0].content.count('a') }}",
    "rsplit": "{{ messages[0].content.rsplit('a', 1)[0] }}{{ messages[0].content.split('n', 1)[1] }}",
    "bordered": "{{ messages[0].content.split('\\n\\n')[-1] }}",
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNDERED)
def test_laundered_text_is_never_silently_wrong(name: str) -> None:
    template = LAUNDERED[name]
    prompts = column(EACH)
    rendered = render(compile(small_tokenizer(), chat_template=template), prompts)
    assert_same(rendered, prompts, small_tokenizer(), chat_template=template, add_generation_prompt=True)


@pytest.mark.parametrize(
    "name",
    [
        "macro",
        "tilde",
        "plus",
        "join",
        "str.join",
        "set block",
        "namespace",
        "call",
        "filter block",
        "percent",
        "generation",
    ],
)
def test_joined_text_stays_a_rope(name: str) -> None:
    assert isinstance(leaf_of(LAUNDERED[name]), Path)


@pytest.mark.parametrize("lie", ["strip", "__add__", "_cut", "__contains__"])
def test_probes_catch_a_tracer_that_is_wrong(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lies: dict[str, Any] = {
        "strip": lambda self, chars=None: self,
        "__add__": lambda self, other: self,
        "_cut": lambda self, mark, name: self,
        "__contains__": lambda self, needle: False,
    }
    monkeypatch.setattr(Rope, lie, lies[lie])
    template = (
        "{% set c = messages[0].content.strip() + '!' %}{% if 'x' in c %}{{ c.split('x')[0] }}{% else %}{{ c }}"
        "{% endif %}{{ c.split('y')[0] }}"
    )
    leaf = leaf_of(template)
    assert isinstance(leaf, ByReference)
    assert "probe" in leaf.reason
    prompts = column(EACH)
    rendered = render(compile(small_tokenizer(), chat_template=template), prompts)
    assert_same(rendered, prompts, small_tokenizer(), chat_template=template, add_generation_prompt=True)
    assert rendered.compiled_rows == 0


def test_a_rejection_is_reported_with_the_templates_own_message() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    program = compile(small_tokenizer(), chat_template=template)
    rendered = render(program, column([[{"role": "system", "content": "a"}], [{"role": "user", "content": "b"}]]))
    assert rendered.rejected == {0: "no system"}
    assert rendered.text.to_pylist() == [None, "b"]
    assert any(leaf == Rejected("no system") for tree in program.trees.values() for _, leaf in tree.leaves())


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "list": "{% set x = range(99999) | list %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "growth": "{% set n = namespace(x='xxxx') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "tilde": "{% set n = namespace(x='xxxx') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "times": "{{ 'x' * 99999999999 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_STEPS", 50_000)
    began = time.monotonic()
    program = compile(small_tokenizer(), chat_template=ENDLESS[name] + "{{ messages[0].content }}")
    rendered = render(program, column([[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}] * 2]))
    assert len(rendered.rejected) == 2
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__ }}", "{% set _ = messages.append(1) %}", "{{ messages[0].content.__init__.__globals__ }}"],
)
def test_the_sandbox_holds(template: str) -> None:
    prompts = column(EACH[:3])
    rendered = render(compile(small_tokenizer(), chat_template=template), prompts)
    assert_same(rendered, prompts, small_tokenizer(), chat_template=template, add_generation_prompt=True)


PATHS = (
    "{% for m in messages %}{% if 'a' in m.content %}{{ m.content }}{% else %}{{ m.content | trim }}{% endif %}"
    "{% endfor %}"
)


def test_the_number_of_paths_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "FREE_LEAVES", 8)
    monkeypatch.setattr(compiler, "MOST_LEAVES", 20)
    rows = [[{"role": "user", "content": " a" if i >> k & 1 else " b"} for k in range(10)] for i in range(600)]
    rows += [rows[0]] * 20
    prompts = column(rows)
    program = compile(small_tokenizer(), chat_template=PATHS)
    rendered = render(program, prompts)
    assert program.leaves <= 20
    assert (rendered.compiled_rows, rendered.reasons) == (620, {})  # the others are rendered one by one
    assert rendered.text.to_pylist() == [
        "".join(m["content"] if "a" in m["content"] else m["content"].strip() for m in row) for row in rows
    ]


def test_only_paths_that_rows_take_are_traced() -> None:
    rows = [[{"role": "user", "content": "x a" if k == i else "x b"} for k in range(30)] for i in range(5)] * 4
    program = compile(small_tokenizer(), chat_template=PATHS)
    rendered = render(program, column(rows))
    assert rendered.compiled_rows == 20
    assert program.leaves == 5


def test_hundreds_of_predicates_on_one_path() -> None:
    rows = [[{"role": "user", "content": "xa"}] * 400]
    rendered = render(compile(small_tokenizer(), chat_template=PATHS), column(rows))
    assert rendered.text.to_pylist() == ["xa" * 400]


@pytest.mark.parametrize("kwargs", [{"continue_final_message": True}])
def test_arguments_that_change_what_rendering_means(kwargs: dict[str, Any]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    program = compile(small_tokenizer(), chat_template=template, kwargs=kwargs, add_generation_prompt=False)
    prompts = column(EACH[:4])
    rendered = render(program, prompts)
    assert rendered.compiled_rows == 0
    assert program.not_compilable == f"{next(iter(kwargs))} is set"
    assert_same(rendered, prompts, small_tokenizer(), chat_template=template, add_generation_prompt=False, **kwargs)


def test_a_tokenizer_that_overrides_apply_chat_template() -> None:
    class Own(type(small_tokenizer())):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
            return "own"

    program = compile(Own(tokenizer_object=small_tokenizer().backend_tokenizer), chat_template="{{ messages }}")
    rendered = render(program, column(EACH[:2]))
    assert rendered.text.to_pylist() == ["own", "own"]
    assert rendered.reasons == {"Own overrides apply_chat_template": 2}


def test_no_template_and_no_syntax() -> None:
    for template in (None, "{% for %}"):
        rendered = render(compile(small_tokenizer(), chat_template=template), column(EACH[:2]))
        assert len(rendered.rejected) == 2
    with pytest.raises(TypeError, match="add_generation_prompt"):
        compile(small_tokenizer(), kwargs={"add_generation_prompt": True})


def test_a_program_can_be_read() -> None:
    program = compile(small_tokenizer(), chat_template=PATHS)
    program.explore(USER)
    assert str(program) == (
        "user\n  if message 0 content contains 'a'\n    then [message 0 content]\n    else [message 0 content | strip]"
    )


def test_shapes_with_few_rows_each() -> None:
    rows = conversations(1, seed=4) * 2
    program = compile(small_tokenizer(), chat_template=PATHS)
    assert_same(
        render(program, column(rows)), column(rows), small_tokenizer(), chat_template=PATHS, add_generation_prompt=True
    )


def test_equal_hashes_are_not_equal_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from gpuload.engines.host.texts import HostTexts

    monkeypatch.setattr(HostTexts, "shape_hashes", lambda self, first, count, code: np.zeros(len(first), np.int64))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    prompts = column(conversations(2, seed=6))
    rendered = render(compile(small_tokenizer(), chat_template=template), prompts)
    assert_same(rendered, prompts, small_tokenizer(), chat_template=template, add_generation_prompt=True)
    assert rendered.reasons == {}


def _rows(count: int) -> Iterator[list[dict[str, str]]]:
    for i in range(count):
        yield [{"role": "user" if (i >> k) & 1 else "assistant", "content": f"text {i} {k}"} for k in range(30)]


def test_rows_of_thirty_turns_in_many_orders() -> None:
    rows = list(_rows(30)) * 20
    program = compile(small_tokenizer(), chat_template=PATHS)
    render(program, column(rows))
    began = time.perf_counter()
    rendered = render(program, column(rows))
    assert time.perf_counter() - began < 1
    assert rendered.compiled_rows == len(rows)
    assert isinstance(rendered.text, pa.LargeStringArray)
