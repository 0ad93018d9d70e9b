"""Random templates with the probes disabled: the tracer alone must never be wrong."""

import random

import pytest
from template_cases import TEXTS, assert_same, column, compile, small_tokenizer

from gpuload.engines.host.render import render
from gpuload.template.probe import Prober
from gpuload.template.program import ByReference, Path

LITERALS = [
    "''",
    "' '",
    r"'\n'",
    "'a'",
    "'aa'",
    "'</think>'",
    "'<think>'",
    "'<'",
    "'think>'",
    "'</'",
    r"'\n\n'",
    "'x '",
]
CONTENTS = [*TEXTS, "<", "think>", "a", "aa", "aaa", "x ", "</", "</think></think>", "\n\n\n", "<think></think>"]
MACROS = (
    "{% macro show(x) %}{{ x }}{% endmacro %}{% macro box(x) %} {{ x | trim }}<{% endmacro %}"
    "{% macro wrap() %}{{ caller().strip() }}{% endmacro %}{% set n = namespace(t='') %}"
    "{% set c = messages[0].content %}"
)

# In each form, T is a text, L a literal, Q a predicate, and B more template.
TEXT_FORMS = """(T + T)|(T ~ T)|(T {} trim)|T.strip()|T.strip(L)|T.lstrip(L)|T.rstrip()|T.split(L)[0]
(T {} replace(L, L))|T.split(L)[-1]|T.split(L)[1]|T.split(L, 1)[-1]|T.rsplit(L, 1)[0]
(T.split(L) {} last)|(T if Q else T)|([T, T] {} join(L))|('%s-%s' % (T, T))|T.removeprefix(L)
T.removesuffix(L)|(T {} string)|(T {} default('d', true))|show(T)|box(T)|(T or T)|(T {} lower)
(T {} upper)|(T {} length)|(T {} first)|(T {} list)|(T {} tojson)|(T {} int)|T[1:]|T[0]
', '.join([T, L])|(messages {} map(attribute='content') {} join(L))|messages[-1].content
messages[0].content|c|c|c|L|messages[0].role"""
QUESTIONS = """L in T|T.startswith(L)|T.endswith(L)|T == L|T != T|T|not T|(T {} length) > 0|T in [L, T]|T is string
T < L|T is mapping|T is iterable|T is defined|T is lower|T.isspace()"""
STATEMENTS = """{{ T }}|{% if Q %}B{% else %}-{% endif %}|{% set c = T %}|{% set c %} B{% endset %}
{% filter trim %} B {% endfilter %}|{{ T }}{{ T }}
{% for m in messages %}{% set c = m.content %}B{% set n.t = n.t ~ T %}{% endfor %}{{ n.t {} trim }}
{% call wrap() %} B{% endcall %}|{% for part in T.split(L) %}[{{ part {} trim }}]{% endfor %}
{% generation %}B{% endgeneration %}"""
FORMS = {
    mark: [form.replace("{}", "|") for line in forms.split("\n") for form in line.split("|")]
    for mark, forms in (("T", TEXT_FORMS), ("Q", QUESTIONS), ("B", STATEMENTS))
}


def grown(chance: random.Random, mark: str, depth: int) -> str:
    """Return a random part of a template."""
    if mark == "L":
        return chance.choice(LITERALS)
    if depth <= 0:
        mark, forms = "T", ["messages[0].content", "messages[-1].content", "c", chance.choice(LITERALS)]
        return chance.choice(forms)
    parts = list(chance.choice(FORMS[mark]))
    whole = "".join(parts)
    pieces, at = [], 0
    for i, letter in enumerate(whole):
        alone = not (whole[i - 1 : i].isalnum() or whole[i + 1 : i + 2].isalnum())
        if letter in "TQBL" and alone:
            inner = grown(chance, letter, depth - 1)
            pieces += [whole[at:i], "{{ " + inner + " }}" if letter == "B" and depth <= 1 else inner]
            at = i + 1
    return "".join(pieces) + whole[at:]


@pytest.mark.parametrize("seed", range(60))
def test_random_templates(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Prober, "probed", lambda self, leaf, *_: leaf if isinstance(leaf, Path) else ByReference("not a path")
    )
    chance = random.Random(seed)
    for _ in range(3):
        template = MACROS + "".join(grown(chance, "B", chance.randint(1, 4)) for _ in range(3))
        rows = [
            [{"role": "user", "content": chance.choice(CONTENTS)} for _ in range(chance.choice([1, 1, 2]))]
            for _ in range(15)
        ]
        prompts = column(rows)
        rendered = render(compile(small_tokenizer(), chat_template=template), prompts)
        assert_same(rendered, prompts, small_tokenizer(), chat_template=template, add_generation_prompt=True)
