"""An engine that several loads use makes what a new one would, whatever happens to the tokenizer between them."""

import copy
import json
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from conftest import user
from tiers import shared_tokenizers, with_shared
from tokenizer_cases import small_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import gpuload
from gpuload.engines import kept
from gpuload.engines.host import spans
from gpuload.engines.kept import KeptEngine
from gpuload.kinds.chats.engine import ChatEngine
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.pairs.engine import PairEngine
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.training_options import training_engine
from gpuload.pipeline.run import load_given
from gpuload.tokenizer.token_bytes import token_bytes


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TEXTS = [f"seven apples {k} <|im_end|> and é{k} " * (k % 4 + 1) for k in range(40)]
CHATS = pa.table({"messages": [[*user(text), answer(text[::-1]), *user("so"), answer(text)] for text in TEXTS]})
PAIRS = pa.table(
    {
        "prompt": [user(text) for text in TEXTS],
        "chosen": [[answer(text[::-1])] for text in TEXTS],
        "rejected": [[answer(text[5:])] for text in TEXTS],
    }
)
CASES: dict[str, tuple[Any, Any, pa.Table, dict[str, Any]]] = {
    "answers": (ChatKind, ChatEngine, CHATS, {"loss_on": "assistant"}),
    "all": (ChatKind, ChatEngine, CHATS, {"loss_on": "all"}),
    "pairs": (PairKind, PairEngine, PAIRS, {"objective": "dpo"}),
}


def swapped(tokenizer: Any) -> None:
    """Another model, of the same size: long entries have each other's ids."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    entries = [entry for entry in model["vocab"] if len(entry) > 1]
    ids = {entry: model["vocab"][other] for entry, other in zip(entries, entries[1:] + entries[:1], strict=True)}
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    tokenizer.backend_tokenizer.model = models.BPE(model["vocab"] | ids, merges)


def unmerged(tokenizer: Any) -> None:
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    tokenizer.backend_tokenizer.model = models.BPE(vocabulary, [])


def part(name: str, value: Any) -> Callable[[Any], None]:
    return lambda tokenizer: setattr(tokenizer.backend_tokenizer, name, value)


OTHER_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])

# How the tokenizer changes, and whether another engine is needed.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda tokenizer: None, False),
    "the ids of a model": (swapped, False),
    "the merges of a model": (unmerged, False),
    "an attribute of a model": (
        lambda tokenizer: setattr(tokenizer.backend_tokenizer.model, "ignore_merges", True),
        True,
    ),
    "added tokens": (lambda tokenizer: tokenizer.add_tokens(["seven", "é"]), True),
    "a special token": (lambda tokenizer: setattr(tokenizer, "bos_token", "<|im_start|>"), True),
    "a template": (lambda tokenizer: setattr(tokenizer, "chat_template", OTHER_TEMPLATE), True),
    "a normalizer": (part("normalizer", normalizers.Lowercase()), True),
    "a pre-tokenizer": (part("pre_tokenizer", DIGITS), True),
    "an override": (lambda tokenizer: vars(tokenizer).update(apply_chat_template=tokenizer.apply_chat_template), True),
}


def made(kind: Any, table: pa.Table, tokenizer: Any, options: dict[str, Any], engines: Any = None) -> Any:
    found = load_given(kind, table, tokenizer, {"token_cache": False, "progress": False, **options}, engines)
    assert not found.report.check.mismatches
    return found.to_arrow(columns=[]).read_all()


class Counted(KeptEngine):
    """Counts how many engines are made."""

    def __init__(self, kind: Any):
        super().__init__(self._made)
        self.count, self._engines = 0, partial(training_engine, on_host=kind)

    def _made(self, *given: Any) -> Any:
        self.count += 1
        return self._engines(*given)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", CASES)
def test_a_kept_engine_makes_what_a_new_one_would(case: str, change: str, qwen: Any) -> None:
    kind, engine, table, options = CASES[case]
    tokenizer, engines = small_tokenizer(qwen.chat_template), Counted(engine)
    first = made(kind, table, tokenizer, options, engines)
    assert first.equals(made(kind, table, tokenizer, options, engines))
    assert engines.count == 1
    do, another = CHANGES[change]
    do(tokenizer)
    found = made(kind, table, tokenizer, options, engines)
    # Of a copy nothing is known; loads without a kept engine keep the bytes of the tokenizer's tokens.
    assert found.equals(made(kind, table, copy.deepcopy(tokenizer), options))
    assert found.equals(made(kind, table, tokenizer, options))
    assert engines.count == 1 + another
    assert found.equals(made(kind, table, tokenizer, options, engines))


def test_entries_whose_lengths_are_exchanged(qwen: Any) -> None:
    """All texts have as many bytes as their tokens by the first load's table, too: answers would begin elsewhere."""
    tokenizer = small_tokenizer(qwen.chat_template)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    words = [entry for entry in model["vocab"] if entry.isascii() and entry.isalpha()]
    short, long = min((word for word in words if len(word) > 1), key=len), max(words, key=len)
    assert [len(tokenizer(word)["input_ids"]) for word in (short, long)] == [1, 1]
    table = pa.table({"messages": [[*user(short * k), answer(long * k)] for k in range(1, 20)]})
    kind, engine, _, options = CASES["answers"]
    engines = Counted(engine)
    made(kind, table, tokenizer, options, engines)
    vocabulary = model["vocab"] | {short: model["vocab"][long], long: model["vocab"][short]}
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    tokenizer.backend_tokenizer.model = models.BPE(vocabulary, merges)
    found = made(kind, table, tokenizer, options, engines)
    assert found.equals(made(kind, table, copy.deepcopy(tokenizer), options))
    assert found.equals(made(kind, table, tokenizer, options))
    assert engines.count == 1


def test_entries_are_compared_once_in_a_load(qwen: Any) -> None:
    """Batches have the same ids: to look at the entries of each batch took a second per 300,000 chats."""
    from gpuload.core.arrays import Ragged
    from gpuload.engines.host.token_search import TokenSearch

    tokenizer = small_tokenizer(qwen.chat_template)
    backend: Any = tokenizer.backend_tokenizer
    table = token_bytes(backend.to_str())
    assert not isinstance(table, str)
    search = TokenSearch(table)
    left = search.not_compared()
    some, more = Ragged.from_lists([[5, 6], [6]]), Ragged.from_lists([[6], [5, 7]])
    assert search.has_entries(backend, some, left)
    assert search.has_entries(None, some, left)  # nothing is looked at
    with pytest.raises(AttributeError):
        search.has_entries(None, more, left)
    assert search.has_entries(backend, more, left)
    assert search.has_entries(None, more, left)
    assert not search.has_entries(backend, Ragged.from_lists([[len(left)]]), left)


# The others drop part of the text, or all tokens that have loss.
TABLES = with_shared(lambda: [name for name in shared_tokenizers() if name not in ("bert-base-uncased", "t5-small")])


@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_a_kept_engine(name: str, qwen: Any) -> None:
    from tiers import SHARED
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_file(str(SHARED / "tokenizers" / name / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=qwen.chat_template, eos_token="x")
    kind, engine, table, options = CASES["answers"]
    engines = Counted(engine)
    expected = made(kind, table, tokenizer, options)
    for _ in range(3):
        assert made(kind, table, tokenizer, options, engines).equals(expected)


def test_other_tokenizers_and_options_get_other_engines(qwen: Any) -> None:
    kind, engine, table, options = CASES["answers"]
    tokenizer, engines = small_tokenizer(qwen.chat_template), Counted(engine)
    another = small_tokenizer(OTHER_TEMPLATE)
    for count, each in enumerate((tokenizer, another, copy.deepcopy(another), tokenizer), 1):
        assert made(kind, table, each, options, engines).equals(made(kind, table, each, options))
        assert engines.count == count
    for more in ({"loss_on": "last"}, {"drop_nulls": True}, {"apply_chat_template_kwargs": {"x": 1}}):
        count = engines.count
        assert made(kind, table, tokenizer, more, engines).equals(made(kind, table, tokenizer, more))
        assert engines.count == count + 1


@pytest.mark.parametrize(
    "template", ["{{ strftime_now('%d %m') }}" + OTHER_TEMPLATE, "{{ ['a'] | random }}" + OTHER_TEMPLATE]
)
def test_templates_that_print_the_time_keep_none(template: str) -> None:
    kind, engine, table, options = CASES["all"]
    tokenizer, engines = small_tokenizer(template), Counted(engine)
    for count in (1, 2):
        made(kind, table, tokenizer, options, engines)
        assert engines.count == count


def test_an_engine_is_made_again_after_many_loads(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST_LOADS", 2)
    kind, engine, table, options = CASES["all"]
    tokenizer, engines = small_tokenizer(qwen.chat_template), Counted(engine)
    for count in (1, 1, 2, 2, 3):
        made(kind, table, tokenizer, options, engines)
        assert engines.count == count


def test_a_copy_makes_an_engine_of_its_own(qwen: Any) -> None:
    kind, engine, table, options = CASES["answers"]
    engines = KeptEngine(partial(training_engine, on_host=engine))
    tokenizer = small_tokenizer(qwen.chat_template)
    expected = made(kind, table, tokenizer, options, engines)
    for other in (copy.deepcopy(engines), pickle.loads(pickle.dumps(engines))):
        assert made(kind, table, tokenizer, options, other).equals(expected)


def test_padding_and_truncation_keep_none(qwen: Any) -> None:
    kind, engine, table, options = CASES["answers"]
    tokenizer, engines = small_tokenizer(qwen.chat_template), Counted(engine)
    expected = made(kind, table, tokenizer, options, engines)
    tokenizer.backend_tokenizer.enable_truncation(7)
    assert made(kind, table, tokenizer, options, engines).equals(expected)
    assert gpuload.load_chats(table, tokenizer, progress=False, **options).to_arrow(columns=[]).read_all() == expected


@pytest.mark.parametrize("do", [swapped, unmerged, CHANGES["added tokens"][0], CHANGES["a normalizer"][0]])
def test_bytes_of_tokens_are_read_once_per_tokenizer(
    qwen: Any, monkeypatch: pytest.MonkeyPatch, do: Callable[[Any], Any]
) -> None:
    kind, _, table, options = CASES["answers"]
    tokenizer, read = small_tokenizer(qwen.chat_template), list[str]()

    def counted(text: str) -> Any:
        read.append(text)
        return token_bytes(text)

    monkeypatch.setattr(spans, "token_bytes", counted)
    first = made(kind, table, tokenizer, options)
    assert made(kind, table, tokenizer, options).equals(first)
    assert len(read) == 1
    do(tokenizer)
    found = made(kind, table, tokenizer, options)
    assert len(read) <= 2
    assert found.equals(made(kind, table, copy.deepcopy(tokenizer), options))


def test_a_tokenizer_that_equals_others_is_not_known(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _, table, options = CASES["answers"]
    tokenizer = small_tokenizer(qwen.chat_template)
    expected = made(kind, table, tokenizer, options)
    monkeypatch.setattr(type(tokenizer), "__eq__", lambda one, other: True, raising=False)
    monkeypatch.setattr(type(tokenizer), "__hash__", None)
    for _ in range(2):
        assert made(kind, table, tokenizer, options).equals(expected)
