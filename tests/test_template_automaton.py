"""Conversations of any shape: the automaton of a template gives what transformers gives."""

import copy
import itertools
import json
import random
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from tiers import SHARED, core, examples, shared, shared_tokenizers, with_shared
from transformers.utils import chat_template_utils

import gpuload
from gpuload.reference.template_call import TemplateCall, rejection
from gpuload.template.answers import Answers
from gpuload.template.automaton.environment import LONGEST_TEXT
from gpuload.template.automaton.functions import Functions
from gpuload.template.automaton.recorder import Recorder
from gpuload.template.automaton.rows import RowRenderer, row_renderer
from gpuload.template.automaton.values import Text
from gpuload.template.program import ByReference, Rejected, RenderedRow

TEXTS = [
    "hello", " world\n", "", " a b ", "</think>", "x<think>\ny</think>\n\nz", "<tool_response>q</tool_response>", "é漢",
    '{"a": 1}', "\n\nlead", "trail  ", "<|im_end|>", "None",
]  # fmt: skip
TEMPLATES = {
    file.stem: file.read_text() for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
}
CORE = ("qwen2_5", "qwen3", "llama3_1", "deepseekv3", "gptoss_training", "glm4moe", "gemma4", "nemotron_3_nano")


def text(draw: random.Random) -> str:
    return "".join(draw.choice(TEXTS) for _ in range(draw.randint(0, 4)))


def value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    inside = depth < 2
    return draw.choice(
        [
            lambda: draw.randint(-5, 100),
            draw.random,
            lambda: draw.choice([True, False, None]),
            lambda: [value(draw, depth + 1) for _ in range(draw.randint(0, 3))] if inside else text(draw),
            lambda: (
                {name: value(draw, depth + 1) for name in draw.sample("abcdef", draw.randint(0, 3))} if inside else 1
            ),
            lambda: text(draw),
        ]
    )()


def conversation(draw: random.Random, tools: bool, longest: int = 40) -> list[dict[str, Any]]:
    """A conversation of nearly any shape."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(draw)}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, longest // (4 if tools else 2))):
        messages.append({"role": "user", "content": text(draw)})
        for _ in range(draw.choice([0, 0, 1, 1, 2]) if tools else 0):
            messages += calls(draw)
        messages.append({"role": "assistant", "content": text(draw)})
        if draw.random() < 0.3:
            messages[-1]["reasoning_content"] = text(draw)
    return messages


def calls(draw: random.Random) -> list[dict[str, Any]]:
    """A message with tool calls, and their results."""
    made = []
    for _ in range(draw.randint(1, 3)):
        arguments = {name: value(draw) for name in draw.sample("xyzuv", draw.randint(0, 3))}
        function = {"name": draw.choice(["f", "get_x"]), "arguments": arguments}
        made.append(
            {"type": "function", "id": "".join(draw.choice("abcdefghi") for _ in range(9)), "function": function}
        )
    message = {"role": "assistant", "content": text(draw) if draw.random() < 0.7 else "", "tool_calls": made}
    names = {"name": made[0]["function"]["name"]}
    return [message, *({"role": "tool", "content": text(draw), "tool_call_id": call["id"], **names} for call in made)]


def compared(call: TemplateCall, rows: list[list[dict[str, Any]]], answers: Answers | None = None) -> RowRenderer:
    """Renders rows, all as transformers does, and at least 95 % of those that it accepts by the automaton."""
    renderer = RowRenderer(call, answers)
    accepted = compiled = 0
    reasons = set()
    for messages in rows:
        try:
            truth, why = call.render(messages), ""
        except Exception as error:
            truth, why = "", rejection(error)
        made = renderer.render(messages)
        accepted += not why
        if isinstance(made, RenderedRow):
            compiled += 1
            assert (made.text, why) == (truth, "")
            if answers is not None:
                assert made.answers == answers.in_bytes(messages, truth)
        elif isinstance(made, Rejected):
            assert made.message == why
        else:
            reasons.add(made.reason)
    assert renderer.wrong is None, reasons
    assert compiled >= 0.95 * accepted, reasons
    return renderer


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("name", core(TEMPLATES, *CORE))
def test_random_shapes(name: str, tools: bool, qwen: Any) -> None:
    draw = random.Random(name)
    rows = [conversation(draw, tools) for _ in range(60)]
    compared(TemplateCall(qwen, TEMPLATES[name]), rows)


@shared
@pytest.mark.parametrize("name", with_shared(shared_tokenizers))
def test_random_shapes_of_real_tokenizers(name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    if tokenizer.chat_template is None:
        pytest.skip("there is no chat template")
    for tools in (False, True):
        draw = random.Random(name)
        compared(TemplateCall(tokenizer), [conversation(draw, tools) for _ in range(60)])


def test_few_traces_for_many_shapes(qwen: Any) -> None:
    draw = random.Random(0)
    rows = [conversation(draw, True) for _ in range(400)]
    renderer = compared(TemplateCall(qwen, TEMPLATES["qwen3"]), rows)
    assert len({tuple((m["role"], len(m.get("tool_calls", ()))) for m in row) for row in rows}) > 300
    assert renderer.traces < 120
    assert renderer.verified < 350


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "deepseekv3", "qwen3_training", "gptoss_training"])
@pytest.mark.parametrize("loss_on", ["assistant", "last", "marked"])
def test_answers(name: str, loss_on: str, qwen: Any) -> None:
    call = TemplateCall(qwen, TEMPLATES[name], add_generation_prompt=False)
    draw = random.Random(3)
    rows = [[*conversation(draw, name != "deepseekv3", 12), {"role": "user", "content": "x"}] for _ in range(40)]
    for message in (each for row in rows for each in row if loss_on == "marked" and each["role"] == "assistant"):
        message["train"] = draw.random() < 0.5
    compared(call, [row[:-1] for row in rows], Answers(call, loss_on))


leaf = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=8)
plain = st.recursive(
    leaf, lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=4), some, max_size=3), max_leaves=8
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=12) | plain},
    optional={"x": plain, "reasoning_content": st.text(max_size=5), "tool_calls": st.lists(plain, max_size=2)},
)
NESTED = """\
{%- set ns = namespace(n=0, last=none, seen='') %}{% macro show(value, deep) %}{% if value is mapping %}\
{% for key, item in value.items() %}{{ key }}={% if deep %}{{ item | tojson }}{% else %}{{ show(item, true) }}\
{% endif %};{% endfor %}\
{% elif value is string %}'{{ value }}'{% elif value is iterable %}[{{ value | length }}]{% else %}{{ value | tojson }}\
{% endif %}{% endmacro %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}\
{% if m.role == 'user' and m.content is string %}{% set ns.last = m %}\
{% set ns.seen = ns.seen + m.content[:2] %}{% endif %}<{{ m.role }}>{{ show(m.content, false) }}\
{% if m.x is defined %}{{ m.x }}{% endif %}{% for c in m.tool_calls or [] %}{{ loop.index }}\
{% if loop.last %}.{% endif %}{{ show(c, false) }}{% endfor %}\
{% if loop.previtem is defined and loop.previtem.role == m.role %}same{% endif %}{% endfor %}{{ ns.n }}\
{{ ns.seen | trim }}{% if ns.last %}{{ ns.last.content }}{% endif %}\
{% for i in range(messages | length - 1, -1, -1) %}{{ messages[i].role[0:1] }}{% endfor %}"""


BUILDING = """\
{%- set ns = namespace(all=[], seen={}) %}{% for m in messages %}{% if m.x is defined %}\
{% set ns.all = ns.all + [m.x, [m.role, loop.index]] %}{% set ns.seen = {"last": m.x, "all": ns.all[:2]} %}{% endif %}\
{% if m.content is string %}{{ m.content[0] }}{{ m.content[1:loop.index] }}{% for c in m.content %}\
{% if c.type == "text" %}t{% elif c == " " %}_{% endif %}{% endfor %}{{ m.content.split() | join("|") }}\
{{ m.content.split("a", 2) | last }}{{ (m.role ~ m.content).split("ra")[1] }}{{ m.content in "a b" ~ m.role }}\
{% elif m.content is mapping %}{{ m.content | join("/") }}{{ m.content.values() | list }}\
{% elif m.content is iterable %}{{ m.content | trim }}{% for each in m.content if each is string %}{{ loop.index }}\
{{ each in ns.all }}{% else %}none{% endfor %}{{ m.content | map("string") | join(", ") }}{{ m.content[::2] | tojson }}\
{% endif %}{{ ns.seen | tojson }}{% endfor %}{{ ns.all }}{{ ns.all | length }}{{ ns.all[-1] }}\
{{ messages | map(attribute="role") | join }}"""


@pytest.mark.parametrize("template", [NESTED, BUILDING], ids=["nested", "building"])
@examples(200)
@given(st.lists(st.lists(message, min_size=1, max_size=6), min_size=1, max_size=8))
def test_any_data(template: str, qwen: Any, rows: list[list[dict[str, Any]]]) -> None:
    call = TemplateCall(qwen, template)
    renderer = RowRenderer(call)
    for messages in json.loads(json.dumps(rows)):
        made = renderer.render(messages)
        if isinstance(made, RenderedRow):
            assert made.text == call.render(messages)
        elif isinstance(made, Rejected):
            with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the template raises
                call.render(messages)
    assert renderer.wrong is None


BUILT = {
    "lists in namespaces": """{% set ns = namespace(names=[], all=["a"]) %}{% for m in messages %}\
{% for c in m.tool_calls or [] %}{% set ns.names = ns.names + [c.function.name + "(" ~ loop.index ~ ")"] %}\
{% set ns.all = [c.function] + ns.all %}{% if "f(1)" in ns.names %}f{% endif %}{% endfor %}{% if ns.names %}\
{{ ns.names | join(", ") }};{{ ns.names | length }};{{ ns.names[-1] }}{% if loop.index % 3 == 0 %}\
{% set ns.names = [] %}{% endif %}{% endif %}{{ m.content }}{% endfor %}{% for each in ns.all %}{{ each | tojson }}\
{% endfor %}{{ ns.names }}{{ ns.all }}""",
    "a mapping in a namespace": """{% set ns = namespace(last={}, number=none) %}{% for m in messages %}\
{% set ns.last = {"role": m.role, "n": loop.index, "calls": m.tool_calls or [], "x": [true, none, "y"]} %}\
{% for c in m.tool_calls or [] %}{% set ns.number = (c.function.arguments.values() | list)[0] %}{% endfor %}\
{{ ns.last.role }}{{ ns.number }}{% endfor %}{{ ns.last | tojson }}{{ ns.last }}""",
    "join": """{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | join("+") }}\
{% for name, value in c.function.arguments.items() %}{% if value is iterable and value is not string %}\
{{ value | join(", ") }}{% endif %}{% endfor %}{{ "-".join(c.function.arguments.keys() | list) }}{% endfor %}\
{% endfor %}""",
    "joined texts": """{% for m in messages %}{% set x = m.role ~ m.content ~ "e" ~ (m.reasoning_content or "") %}\
{{ "userhello" in x }}{{ x.startswith("userh") }}{{ x.endswith("ehello") }}{{ x == "userhelloe" }}\
{{ x.replace("rh", "-") | upper }}{{ x.split("t<")[-1] }}{{ x.removesuffix("ehello") }}{{ x[2:-2] }}{% endfor %}""",
    "parts of texts": """{% for m in messages %}{{ m.content[-1] }}{{ m.role[0].upper() }}{{ m.content[1:loop.index] }}\
{{ m.content[(m.content | length) - 3:] }}{{ m.content[::2] }}{{ m.content | first }}{{ m.content[:9] | last }}\
{{ m.role.capitalize() }}{{ m.content.title() }}{% if m.content[0]["type"] == "image" %}i{% endif %}\
{% for c in m.content %}{% if c.type == "text" %}{{ c.text }}{% elif c == "a" %}A{{ loop.index }}{% endif %}\
{% endfor %}{% for c in m.content | selectattr("type", "equalto", "text") %}{{ c.text }}{% endfor %}{% endfor %}""",
    "tojson": """{% for m in messages %}{{ {"role": m.role, "text": m.content[:3] ~ "x", "n": loop.index} | tojson }}\
{{ (m.content | trim) | tojson }}{{ [m.role, [m.content]] }}{{ messages[1:] | tojson }}{% endfor %}""",
}


@pytest.mark.parametrize("name", BUILT)
def test_what_a_template_builds(name: str, qwen: Any) -> None:
    draw = random.Random(name)
    compared(TemplateCall(qwen, BUILT[name]), [conversation(draw, True, 24) for _ in range(60)])


LOOPS = {
    "else": """{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c }}{% else %}none{% endfor %}\
{% for m in messages if m.role == "nobody" %}{{ m }}{% else %}nobody{% endfor %}{{ m.content }}{% endfor %}""",
    "a condition": """{% for m in messages if m.role != "system" %}{{ loop.index }}{% if loop.last %}last{% endif %}\
{% for c in m.tool_calls or [] if c.function.name == "f" %}{{ loop.revindex }}{{ c.id }}{% else %}-{% endfor %}\
{% endfor %}{% for m in messages if m.role == "tool" %}{{ m.content }}{% else %}no tools{% endfor %}\
{% for m in messages %}{% for c in m.tool_calls or [] %}{% for key, item in c.function.items() if key != "x" %}\
{{ key }}={{ item | tojson }}{% if not loop.last %},{% endif %}{% endfor %}{% endfor %}{% endfor %}""",
    "a condition that a pass changes": """{% set ns = namespace(n=0) %}\
{% for m in messages if ns.n < 3 %}{{ loop.index }}{{ m.content }}{% set ns.n = ns.n + 1 %}{% endfor %}""",
    "steps": """{% for m in messages[1::2] %}{{ loop.cycle("a", "b", "c") }}{{ m.content }}\
{{ loop.revindex }}{% endfor %}\
{{ messages[::3] | length }}{{ messages[:-1:5] | map(attribute="role") | join(",") }}\
{% for m in messages[::-1][::4] | reverse %}{{ m.role }}{% endfor %}""",
    "filters": """{{ messages | map(attribute="role") | join(",") }}{% for m in messages %}\
{{ m.tool_calls | default([]) | map(attribute="function.name") | list | tojson }}\
{{ (m.tool_calls | default([]) | rejectattr("function.name", "eq", "f") | list)[0].id }}\
{{ m.tool_calls | default([]) | trim | upper }}{{ (m.tool_calls or []) == (messages[-2].tool_calls or []) }}\
{{ messages[:1] == [m] }}{{ m.content.split("\n") | map("trim") | select | join(";") }}{% endfor %}""",
    "split": """{% for m in messages %}{% for word in m.content.split() %}{{ loop.index }}{{ word }}{% endfor %}\
{{ m.content.split("<")[1] }}{{ m.content.split("l", 2) | length }}{{ m.content.splitlines() | last }}\
{{ m.content.rsplit(" ", 3) | join("_") }}{{ "think>" in m.content.split("<") }}{{ "hello" in m.content.split() }}\
{% for part in m.content.split("t") %}{{ part }}.{% endfor %}{{ "-".join(m.content.split("a")[1:]) }}{% endfor %}""",
    "known mappings": """{% set names = {"user": "U", "assistant": "A", "tool": "T"} %}{% for m in messages %}\
{% if m.role in names %}{{ names[m.role] }}{% else %}?{% endif %}{% if m.content not in names %}{{ m.content }}\
{% endif %}{% endfor %}""",
    "values of own keys": """{% macro extra(given, known) %}{% for key in given if key not in known %}\
{% if given[key] is mapping %}{{ key ~ given[key] | tojson }}{{ extra(given[key], known) }}\
{% elif given[key] is string %}{{ key }}="{{ given[key] }}"{% else %}{{ given[key] }}{% endif %}{% endfor %}\
{% endmacro %}\
{% for m in messages %}{% for c in m.tool_calls or [] %}{{ extra(c, ["type", "id"]) }}\
{% for key, value in c.function.arguments | dictsort %}{{ key }}{{ value is string }}\
{{ c.function.arguments.get(key) }}{{ key in c.function.arguments }}{% if not loop.first %}\
{{ c.function.arguments[loop.previtem[0]] | tojson }}{% endif %}{% endfor %}\
{% for key in c.function.arguments.keys() | list | reverse %}{{ c.function.arguments[key] | string }}{% endfor %}\
{% endfor %}{% endfor %}""",
    "safe": """{% for m in messages %}{{ m.role + "<" + (m.content | safe) + "&" + m.content }}\
{% for c in m.tool_calls or [] %}{% set given = c.function.arguments | tojson | safe %}\
{{ "<'" + c.function.name + m.content + given + given + '"' }}{{ m.content ~ given ~ "<" }}{% endfor %}{% endfor %}""",
    "printed numbers": """{% macro last() %}{% set ns = namespace(n=0) %}{% for m in messages %}\
{% if m.role == "user" %}{% set ns.n = loop.index0 %}{% endif %}{% endfor %}{{ ns.n }}{% endmacro %}\
{% for m in messages %}{% if loop.index0 > last() | int %}{{ m.content }}{% endif %}{% endfor %}""",
}


def test_loops_over_the_characters_of_long_texts(qwen: Any) -> None:
    call = TemplateCall(qwen, "{% for m in messages %}{% for c in m.content %}{{ c }}.{% endfor %}{% endfor %}")
    renderer = RowRenderer(call)
    for length in (3, LONGEST_TEXT, LONGEST_TEXT + 1, 5):
        messages = [{"role": "user", "content": "x" * length}]
        made = renderer.render(messages)
        if length > LONGEST_TEXT:
            assert isinstance(made, ByReference)
        else:
            assert isinstance(made, RenderedRow)
            assert made.text == call.render(messages)
    assert renderer.wrong is None


@pytest.mark.parametrize("name", LOOPS)
def test_loops_and_parts(name: str, qwen: Any) -> None:
    draw = random.Random(name)
    rows = [conversation(draw, True, 24) for _ in range(60)]
    if name == "a condition that a pass changes":
        made = RowRenderer(TemplateCall(qwen, LOOPS[name])).render(rows[0])
        assert isinstance(made, ByReference)
        assert "with a condition" in made.reason
    else:
        compared(TemplateCall(qwen, LOOPS[name]), rows)


@pytest.mark.parametrize(
    "lookup",
    [
        "{% for key in m.function %}{{ m.arguments[key] }}{% endfor %}",  # keys of another mapping
        "{% set ns = namespace(key='') %}{% for key in m.function %}{% set ns.key = key %}{% endfor %}"
        "{{ m.function[ns.key] }}",
        "{% for key in m.function %}{{ m.function[key ~ ''] }}{{ m.function[m.content] }}{% endfor %}",
    ],
)
def test_keys_that_may_be_of_another_mapping(lookup: str, qwen: Any) -> None:
    """What is not known to be a key of the same mapping is looked up by transformers."""
    call = TemplateCall(qwen, "{% for m in messages %}" + lookup + "{% endfor %}")
    renderer = RowRenderer(call)
    for names in ("ab", "ba", "a", "cab"):
        given = {name: f"value of {name}" for name in names}
        messages = [{"role": "user", "content": names[-1], "function": given, "arguments": {"a": "1", "b": "2"}}]
        made = renderer.render(messages)
        if isinstance(made, RenderedRow):
            assert made.text == call.render(messages)
    assert renderer.wrong is None


def _stale(self: Recorder, loop: Any, inside: int) -> None:
    """A cut that forgets what namespaces hold."""
    self.namespaces, kept = [], self.namespaces
    CUT(self, loop, inside)
    self.namespaces = kept


CUT = Recorder._cut
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "registers that are not saved": (Recorder, "_cut", _stale),
    "a question that is not written down": (Recorder, "ask", lambda self, predicate: automaton_holds(predicate, self)),
    "strip does nothing": (Text, "strip", lambda self, characters=None: self),
    "a text has no end": (Text, "endswith", lambda self, *_: False),
}


def automaton_holds(predicate: Any, recorder: Recorder) -> bool:
    from gpuload.template.automaton.recorder import holds_at

    return holds_at(predicate, recorder)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_row_is_wrong_if_the_recorder_is(fault: str, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    call = TemplateCall(qwen, TEMPLATES["qwen3"])
    draw = random.Random(1)
    rows = [conversation(draw, True, 20) for _ in range(100)]
    renderer = RowRenderer(call)
    for messages in rows:
        made = renderer.render(messages)
        if isinstance(made, RenderedRow):
            assert made.text == call.render(messages)
    assert renderer.wrong is not None


def test_several_threads(qwen: Any) -> None:
    call = TemplateCall(qwen, TEMPLATES["qwen3"])
    renderer, wrong = RowRenderer(call), []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(40):
            messages = conversation(draw, True, 16)
            made = renderer.render(messages)
            if isinstance(made, RenderedRow) and made.text != call.render(messages):
                wrong.append(messages)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert renderer.wrong is None


def test_reasoning_where_transformers_does_not_rename_it(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 4.57 and 5.10."""
    monkeypatch.setattr(chat_template_utils, "_alias_reasoning_fields", lambda chat: chat, raising=False)
    draw = random.Random(5)
    rows = [conversation(draw, True, 20) for _ in range(60)]
    assert any("reasoning_content" in message for row in rows for message in row)
    for name in ("qwen3_training", "gptoss_training"):
        compared(TemplateCall(qwen, TEMPLATES[name]), rows)


def test_blocks_of_messages_with_keys_that_are_none(qwen: Any) -> None:
    """Some versions of transformers take these keys away, others do not: parts with loss are those of either."""
    template = "{% for m in messages %}{{ m.role }}{% if 'x' in m %}[x]{% endif %}{% generation %}{{ m.content }}"
    call = TemplateCall(qwen, template + "{% endgeneration %}{% endfor %}", add_generation_prompt=False)
    messages = [{"role": "user", "content": "q", "x": None}, {"role": "assistant", "content": "a", "x": 1}]
    text, blocks = call.blocks(messages)
    assert text == call.render(messages)
    assert [text[start:end] for start, end in blocks] == ["q", "a"]


def test_what_was_learned_of_a_template_is_kept(qwen: Any) -> None:
    draw = random.Random(3)
    rows = [conversation(draw, True, 20) for _ in range(60)]
    text = TEMPLATES["qwen3_training"]
    answers = Answers(TemplateCall(qwen, text), "assistant")

    def rendered(call: TemplateCall, answers: Answers | None = None) -> RowRenderer:
        renderer = row_renderer(call, answers, False)
        for messages in rows:
            made = renderer.render(messages)
            assert isinstance(made, RenderedRow)
            assert made.text == call.render(messages)
        return renderer

    first = rendered(TemplateCall(qwen, text), answers)
    traces = first.traces
    assert traces > 3
    assert rendered(TemplateCall(qwen, text), answers).traces == traces
    others = [
        (TemplateCall(qwen, text), Answers(TemplateCall(qwen, text), "last")),
        (TemplateCall(qwen, text), None),
        (TemplateCall(qwen, text + "x"), None),
        (TemplateCall(qwen, text + "{{ x }}", kwargs={"x": "y"}), None),
        (TemplateCall(qwen, text + "{{ x }}", kwargs={"x": "z"}), None),
        (TemplateCall(qwen, text, add_generation_prompt=False), None),
        (TemplateCall(qwen, text, tools=[{"type": "function", "function": {"name": "f"}}]), None),
    ]
    for call, asked in others:
        assert row_renderer(call, asked, False).traces == 0
        rendered(call, asked)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def texts_of(qwen: Any, rows: list[dict[str, Any]], template: Any, tmp_path: Path, **options: Any) -> list[str]:
    """The rendered rows of a load that compares nothing itself."""
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    given: dict[str, Any] = {"max_length": 10_000, "loss_on": "all", "verify": "off", "token_cache": False, **options}
    found = gpuload.load_chats(str(file), qwen, **given, **({"chat_template": template} if template else {}))
    return [qwen.decode(found[row]["input_ids"]) for row in range(len(found))]


def test_arguments_whose_keys_have_another_order(qwen: Any, tmp_path: Path) -> None:
    template = "{{ x | tojson }}" + PLAIN
    orders = [{"x": {"a": 1, "b": 2}}, {"x": {"b": 2, "a": 1}}]
    rows = [{"messages": ASKED, "chat_template_kwargs": orders[number % 2]} for number in range(40)]
    expected = [json.dumps(each["x"]) + "user: q;assistant: a;" for each in orders]
    assert texts_of(qwen, rows, template, tmp_path) == expected * 20
    for kwargs, wanted in zip(orders, expected, strict=True):
        rows = [{"messages": ASKED * k, "tools": [tool(random.Random(k))]} for k in range(1, 4)]
        found = texts_of(qwen, rows, template, tmp_path, apply_chat_template_kwargs=kwargs)
        assert [text.partition("user")[0] + "user: q;assistant: a;" for text in found] == [wanted] * 3


def test_arguments_as_json_text(qwen: Any, tmp_path: Path) -> None:
    rows = [{"messages": ASKED, "chat_template_kwargs": text} for text in ['{"x": "y"}', "", "null", None, "{}"]]
    found = texts_of(qwen, rows, "[{{ x }}]" + PLAIN, tmp_path)
    assert found == [f"[{x}]user: q;assistant: a;" for x in ("y", "", "", "", "")]


@pytest.mark.parametrize("empty", [[], "[]"])
def test_no_tools_are_not_the_same_as_an_empty_list(qwen: Any, tmp_path: Path, empty: Any) -> None:
    template = "{% if tools is not none %}{{ tools | length }} tools {% endif %}" + PLAIN
    rows = [{"messages": ASKED, "tools": empty}, {"messages": ASKED, "tools": None}, {"messages": ASKED}]
    assert [text.startswith("0 tools ") for text in texts_of(qwen, rows, template, tmp_path)] == [True, False, False]


def test_a_template_for_tools_that_is_set_later(qwen: Any, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(qwen)
    rows = [{"messages": ASKED * k, "tools": [tool(random.Random(k))]} for k in range(1, 4)]
    for template, start in ((PLAIN, "user"), ({"default": PLAIN, "tool_use": "TOOL " + PLAIN}, "TOOL user")):
        tokenizer.chat_template = template
        assert all(text.startswith(start) for text in texts_of(tokenizer, rows, None, tmp_path))


def test_a_template_that_fails_for_all_rows_with_tools(qwen: Any, tmp_path: Path) -> None:
    """A generator is no JSON: those rows are dropped for the reason that transformers gives, and others kept."""
    start = "{% if tools %}{{ tools | map(attribute='function') | tojson }}{% endif %}"
    template = start + TEMPLATES["qwen2_5"].replace("tools", "others")
    rows = [{"messages": [*ASKED, {"role": "assistant", "content": f"a{k}"}]} for k in range(4)]
    rows[1]["tools"] = rows[2]["tools"] = [tool(random.Random(1))]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = gpuload.load_chats(str(file), qwen, chat_template=template)
    assert len(found) == 2
    assert [reason for reason in found.report.rejected if "generator is not JSON serializable" in reason]


def test_blocks_next_to_each_other_and_without_a_text(qwen: Any) -> None:
    block = "{% generation %}{{ m.content }}{% endgeneration %}"
    text = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}" + block + block
    call = TemplateCall(qwen, text + "{% generation %};{% endgeneration %}{% endif %}{% endfor %}")
    rows = [
        [{"role": "user", "content": "u"}, *({"role": "assistant", "content": c} for c in contents)]
        for contents in itertools.product(["a", "", "bc"], repeat=3)
    ]
    renderer = RowRenderer(call, Answers(call, "assistant"))
    for messages in rows:
        made = renderer.render(messages)
        assert isinstance(made, RenderedRow)
        assert (made.text, made.answers) == call.blocks(messages)
    assert renderer.wrong is None


def test_numbers_that_are_none(qwen: Any) -> None:
    call = TemplateCall(qwen, PLAIN.replace("m.content", "m.content ~ (m.tool_calls | tojson if m.tool_calls)"))
    renderer = RowRenderer(call)
    for k in range(1, 4):
        messages = [{"role": "user", "content": "", "tool_calls": [{"x": float("nan")}] * k}]
        assert renderer.render(messages) == RenderedRow(call.render(messages), [])


def test_times_that_a_template_prints_are_those_of_the_load(qwen: Any) -> None:
    text = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for year in (2001, 2002, 2001):
        call = TemplateCall(qwen, text, instant=datetime(year, 1, 1))
        with call.clock_stopped():
            made = row_renderer(call, None, False).render([{"role": "user", "content": "a"}])
        assert isinstance(made, RenderedRow)
        assert made.text == f"{year}-01-01 00:00:00a"


def test_a_row_that_the_trace_of_another_thread_overtakes(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are written again while rows go through them: such a row begins once more."""
    call, walk, overtaken = TemplateCall(qwen, TEMPLATES["qwen3"]), Functions.walk, []
    renderer = RowRenderer(call)
    messages = conversation(random.Random(1), True)

    def overtake(functions: Functions, row: Any) -> Any:
        if len(overtaken) % 2 == 0:
            overtaken.append(row)
            raise KeyError("n7")
        overtaken.append(row)
        return walk(functions, row)

    monkeypatch.setattr(Functions, "walk", overtake)
    made = renderer.render(messages)
    assert isinstance(made, RenderedRow)
    assert made.text == call.render(messages)


def test_rows_of_a_load(qwen: Any, tmp_path: Path) -> None:
    """Rows with calls, each of another shape, as JSON and as parquet, count as compiled."""
    draw = random.Random(5)
    rows = [{"messages": conversation(draw, True)} for _ in range(80)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = gpuload.load_chats(
        str(file), qwen, chat_template=TEMPLATES["qwen3_training"], max_length=100_000, verify="full"
    )
    assert not found.report.check.mismatches
    assert (len(found), found.report.by_reference) == (80, {})
    assert found.report.rows_compiled == 80


@pytest.mark.parametrize("name", ["qwen2_5", "qwen2_5_training", "qwen3"])
@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_plain_rows_of_many_shapes(name: str, loss_on: Any, qwen: Any, tmp_path: Path) -> None:
    """So many shapes that trees do not pay, as JSON and as parquet; and again, with what was learned before."""
    draw = random.Random(name)
    rows = [
        {"messages": [*conversation(draw, False), {"role": "assistant", "content": text(draw)}]} for _ in range(150)
    ]
    files = [tmp_path / "rows.jsonl", tmp_path / "rows.parquet"]
    files[0].write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), files[1])
    given: dict[str, Any] = {"chat_template": TEMPLATES[name], "max_length": 100_000, "loss_on": loss_on}
    expected = gpuload.load_chats(str(files[1]), qwen, verify="off", device="cpu", **given)
    for file in (*files, files[0]):
        found = gpuload.load_chats(str(file), qwen, verify="full", **given)
        assert (found.report.check.mismatches, found.report.by_reference) == ([], {})
        assert found.tokens.values.tolist() == expected.tokens.values.tolist()
        assert found.loss_mask.values.tolist() == expected.loss_mask.values.tolist()


def tool(draw: random.Random) -> dict[str, Any]:
    properties = {
        name: {"type": "string", "description": text(draw)} for name in draw.sample("xyz", draw.randint(0, 3))
    }
    function = {"name": draw.choice("fgh"), "description": text(draw), "parameters": {"type": "object"}}
    function["parameters"]["properties"] = properties
    return {"type": "function", "function": function}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_training"])
def test_rows_with_arguments_of_their_own(name: str, qwen: Any, tmp_path: Path) -> None:
    draw = random.Random(name)
    kwargs: list[Any] = [{"enable_thinking": False}, {"enable_thinking": True, "x": [1]}, None, {"few": 1}]
    rows = [
        {"messages": conversation(draw, True), "chat_template_kwargs": kwargs[min(number % 8, 3)]}
        | ({"tools": [tool(draw)]} if number % 3 else {})
        for number in range(160)
    ]
    rows = [row for number, row in enumerate(rows) if row["chat_template_kwargs"] != kwargs[3] or number < 16]
    few = sum(row["chat_template_kwargs"] == kwargs[3] for row in rows)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    given: dict[str, Any] = {"chat_template": TEMPLATES[name], "max_length": 100_000, "verify": "full"}
    chats = gpuload.load_chats(str(file), qwen, **given)
    why = "they have tools of their own", "they have arguments of their own, in chat_template_kwargs"
    assert (len(chats), chats.report.check.mismatches) == (len(rows), [])
    assert sum(chats.report.by_reference.values()) == few > 0
    assert set(chats.report.by_reference) <= set(why)
    completions = [
        {
            "prompt": row["messages"][:1],
            "completion": [{"role": "assistant", "content": "a"}],
            **{key: row.get(key) for key in ("tools", "chat_template_kwargs")},
        }
        for row in rows
    ]
    file.write_text("\n".join(map(json.dumps, completions)))
    found = gpuload.load_chats(str(file), qwen, **given)
    assert (len(found), found.report.check.mismatches) == (len(rows), [])
    assert sum(found.report.by_reference.values()) == few


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_training", "glm4moe_training"])
def test_rows_with_tools_of_their_own(name: str, qwen: Any, tmp_path: Path) -> None:
    draw = random.Random(name)
    rows = [
        {"messages": conversation(draw, True), "tools": [tool(draw) for _ in range(draw.randint(1, 3))]}
        for _ in range(60)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    given: dict[str, Any] = {"chat_template": TEMPLATES[name], "max_length": 100_000, "verify": "full"}
    chats = gpuload.load_chats(str(file), qwen, **given)
    assert (len(chats), chats.report.rows_compiled, chats.report.check.mismatches) == (60, 60, [])
    file = tmp_path / "pairs.jsonl"
    answers = [{"chosen": [{"role": "assistant", "content": "a"}], "rejected": calls(draw)} for _ in rows]
    pairs = [
        {"prompt": row["messages"][:2], "tools": row["tools"], **each} for row, each in zip(rows, answers, strict=True)
    ]
    file.write_text("\n".join(map(json.dumps, pairs)))
    found = gpuload.load_pairs(str(file), qwen, **given)
    assert (found.report.rows_compiled, found.report.check.mismatches) == (60, [])


@shared
def test_real_trajectories() -> None:
    folder = SHARED / "datasets" / "agent_trajectories"
    tokenizer = str(SHARED / "tokenizers" / "qwen2.5-instruct")
    found = gpuload.load_chats(
        str(folder / "*.jsonl"), tokenizer, max_length=1_000_000, verify="full", token_cache=False
    )
    report = found.report
    assert not report.check.mismatches
    assert report.rows_compiled >= 0.95 * (report.rows_read - report.rows_rejected)
