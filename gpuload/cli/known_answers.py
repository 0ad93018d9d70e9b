"""Known answers of all kernels: small data with everything that they treat apart, through the functions that launch
them, and compared with what the host makes of it. `doctor --gpu` runs them before a GPU is trusted; the tests run them
on kernels of the host, and count that every kernel is launched.

The tokenizers are made here, of a few entries each: with real vocabularies, tables take seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from gpuload.core.arrays import Ragged, on_host
from gpuload.core.errors import MismatchError
from gpuload.core.marks import LOSS
from gpuload.engines.device.encode import DeviceEncoder
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.store import Index
from gpuload.engines.device.texts import BOUNDS_ONLY, DeviceTexts, texts_to_device
from gpuload.engines.host.engine import HostEngine
from gpuload.kinds.chats.engine import ChatEngine
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.pairs.engine import PairEngine
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.prompts import PromptKind
from gpuload.kinds.training_device import DeviceTrainingEngine, common_ids
from gpuload.pipeline.run import load_given
from gpuload.template.program import Operation, Predicate, Ref, apply_operations, holds
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_spec
from gpuload.tokenizer.spec import BpeSpec, bpe_spec, byte_entries, byte_letters

_TEXTS = [
    "", " ", "a", "ab the theme them", "it's 12345 we'll", " é中🙂 \n", "x" * 300, "<tool>ab <L> <L>  <R>  b",
    "\n\n\t  a", "<|im_end|>the", "e\u0301 the\u0308m", "a\u0323\u0307" * 3, "\u0378", "abcabcabc" * 700, "abc" * 10,
    "abc" * 40, "abc" * 300, "the ab </think> the",
]  # fmt: skip
_MERGES = [
    ("t", "h"), ("th", "e"), ("a", "b"), ("Ġ", "the"), ("m", "e"), ("ab", "c"), ("x", "x"), ("xx", "xx"),
    ("xxxx", "xxxx"), ("the", "m"), ("abc", "abc"), ("Ã", "©"), ("1", "2"), ("Ġ", "Ġ"),
]  # fmt: skip
_SPLIT = r"'(?:s|ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and '</think>' in message['content'] %}"
    "{{ message['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ message['content'].strip() }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def cases() -> dict[str, Callable[[Kernels], None]]:
    """All cases by name: each runs some kernels, and raises `MismatchError` where they return something else than the
    host does."""
    left, right = AddedToken("<L>", lstrip=True, normalized=False), AddedToken("<R>", rstrip=True)
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    encoders = {
        "byte-level BPE": (_byte_level(), 1),
        "byte-level BPE, NFC": (_byte_level(normalizers.NFC()), 2),
        "added tokens that strip spaces": (_byte_level(normalizers.NFC(), left, right), 2),
        "two splits": (_byte_level(None, splits=[digits]), 1),
        "byte fallback": (_with_fallback(), 0),
    }
    return {
        "texts": _check_texts,
        "shapes of conversations": _check_shapes,
        **{f"encode: {name}": partial(_check_encoder, *made) for name, made in encoders.items()},
        "prompts": _check_prompts,
        "chats": _check_chats,
        "pairs": _check_pairs,
    }


def wrong_answers(kernels: Kernels) -> Iterator[tuple[str, Exception | None]]:
    """Runs all cases.

    Yields:
        The name of each case, and None, or what was raised: `MismatchError` if an answer is wrong.
    """
    for name, case in cases().items():
        try:
            case(kernels)
        except Exception as error:  # whatever a kernel does
            yield name, error
        else:
            yield name, None


def _expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise MismatchError(f"{what}: {found!r:.200} instead of {expected!r:.200}")


# -- tokenizers ------------------------------------------------------------------------------------------------------


def _byte_level(normalizer: Any = None, *added: AddedToken, splits: Sequence[Any] = ()) -> Tokenizer:
    entries = dict.fromkeys([*byte_letters(), *(one + other for one, other in _MERGES)])
    made = Tokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, list(_MERGES)))
    made.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, split, last])
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<tool>", normalized=False), *added])
    return made


def _with_fallback() -> Tokenizer:
    """As Llama 2: characters, and bytes for those that it does not know."""
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "b"), ("▁", "▁")]
    entries = ["<unk>", *byte_entries(), *"abcdehmtxé▁<>/", *(one + other for one, other in merges)]
    vocabulary = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


@cache
def _chat_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = _byte_level(normalizers.NFC())
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=_TEMPLATE
    )


# -- texts and encoders ----------------------------------------------------------------------------------------------


def _check_texts(kernels: Kernels) -> None:
    ops = DeviceTexts(kernels)
    with kernels.current():
        column = texts_to_device(kernels, [text.encode() for text in _TEXTS])
        everything = range(len(_TEXTS))
        _expect("copied texts", ops.bytes_at(column, everything), [text.encode() for text in _TEXTS])
        for name in sorted(BOUNDS_ONLY):
            for mark in ("the", " ", "é中"):
                operation = Operation(name, (mark,))
                found = ops.bytes_at(ops.operate(column, operation), everything)
                _expect(f"{name} {mark!r}", found, [apply_operations(text, [operation]).encode() for text in _TEXTS])
        for test in ("contains", "startswith", "endswith", "equals"):
            for value in ("the", " é中🙂 \n"):
                predicate = Predicate(Ref(0), test, value)
                found = on_host(ops.answer(column, predicate)).tolist()
                _expect(f"{test} {value!r}", found, [holds(predicate, text) for text in _TEXTS])
        needles = ["<|im_end|>", "</think>", "<L>", "é中", "x" * 290]
        found = on_host(ops.contains_any(column, needles)).tolist()
        _expect("control tokens", found, [any(needle in text for needle in needles) for text in _TEXTS])
        broken = texts_to_device(kernels, [b"a", b"\xff", "é".encode()[:1], "🙂".encode(), b"\xed\xa0\x80"])
        _expect("texts that are not UTF-8", on_host(ops.not_utf8(broken)).tolist(), [False, True, True, False, True])
        words = ["user", "tool", "user", "", "tool", "user"]
        example, group, stray = map(on_host, ops.distinct(texts_to_device(kernels, [word.encode() for word in words])))
        _expect("equal texts", [words[example[number]] for number in group], words)
        _expect("texts with equal hashes", stray.tolist(), [False] * len(words))
        _check_comparisons(kernels)


def _check_comparisons(kernels: Kernels) -> None:
    """Kernels whose result follows from something else in usual data: launched with made up arguments."""
    xp = kernels.xp
    column = texts_to_device(kernels, [b"abcd", b"abxd", b"abcd", b""])
    same = xp.zeros(4, bool)
    example = xp.asarray(np.array([2, 0, 3, 3]))
    kernels.run("same_texts", kernels.threads(4), 4, column.data, column.start, column.length, example, same)
    _expect("texts that equal an example", on_host(same).tolist(), [True, False, False, True])

    common, other = xp.asarray(np.array([4, 2, 2, 0])), xp.asarray(on_host(column.start)[[1, 1, 2, 0]])
    kernels.run("common_bytes", kernels.warps(4), 4, column.data, column.start, column.data, other, common)
    _expect("common bytes", on_host(common).tolist(), [2, 2, 2, 0])

    ids = xp.asarray(np.array([1, 2, 3, 4, 1, 2 | LOSS, 9, 4, 7], np.int32))
    at = kernels.address(ids)
    one, two = (Index(xp.asarray(at + 4 * np.array(k)), xp.asarray(np.array([4, 1]))) for k in ([0, 0], [4, 8]))
    _expect("common ids", on_host(common_ids(kernels, one, two)).tolist(), [2, 0])


def _check_shapes(kernels: Kernels) -> None:
    ops, xp = DeviceTexts(kernels), kernels.xp
    rows = [[1, 2], [1, 2], [2, 1], [], [1, 2, 2], []]
    of_rows = Ragged.from_lists(rows)
    with kernels.current():
        first, count = xp.asarray(of_rows.offsets[:-1]), xp.asarray(of_rows.lengths)
        code = xp.asarray(of_rows.values.astype(np.int64))
        hashes = on_host(ops.shape_hashes(first, count, code)).tolist()
        same = [[one == other for other in hashes] for one in hashes]
        _expect("hashes of shapes", same, [[one == other for other in rows] for one in rows])
        for number in range(len(rows)):
            found = ops.same_shapes(first, count, code, xp.full(len(rows), number, np.int64))
            _expect("equal shapes", on_host(found).tolist(), [row == rows[number] for row in rows])


def _check_encoder(backend: Tokenizer, falls_back: int, kernels: Kernels) -> None:
    """`falls_back` of the texts have a pre-token that is too long, or that kernels do not normalize."""
    spec = bpe_spec(backend.to_str())
    assert isinstance(spec, BpeSpec), spec
    tokenizer: CompiledTokenizer = compile_spec(spec)
    texts = [*_TEXTS, *(f"{one}{other}" for one in _TEXTS[:9] for other in reversed(_TEXTS[:9]))]
    column = Ragged.from_lists([list(text.encode()) for text in texts])
    with kernels.current():
        encoder = DeviceEncoder(kernels, tokenizer)
        data, offsets = kernels.xp.asarray(column.values.astype(np.uint8)), kernels.xp.asarray(column.offsets)
        ids, fallback = encoder.encode(data, offsets)
        found, left = ids.to_host().to_lists(), on_host(fallback).tolist()
    for text, row, by_host in zip(texts, found, left, strict=True):
        expected = [] if by_host else backend.encode(text, add_special_tokens=False).ids
        _expect(f"ids of {text!r:.60}", row, expected)
    _expect("texts that fall back", sum(left), falls_back)


# -- loads -----------------------------------------------------------------------------------------------------------


def _compare(
    kernels: Kernels,
    kind: Any,
    table: pa.Table,
    host_engine: Any,
    make: type[DeviceEngine],
    views: Sequence[Callable[[Any], Any]],
    **options: Any,
) -> None:
    """Loads a table with the device's engine and with the host's, and compares ids, rows that were dropped, and what
    `views` returns of both."""
    options = {"verify": "off", "token_cache": False, "progress": False} | options
    expected = load_given(kind, table, _chat_tokenizer(), {"device": "cpu"} | options)

    def build(given: Any, reference: Any, exact_only: bool = False) -> DeviceEngine:
        where = torch.device(kernels.device)
        return make(kernels, where, reference, exact_only, None, given.tokens_on, host_engine=host_engine)

    found = load_given(kind, table, _chat_tokenizer(), {"device": "cuda"} | options, build)
    _expect("ids", found.tokens.to_lists(), expected.tokens.to_lists())
    _expect("dropped rows", found.report.rejected, expected.report.rejected)
    for view in views:
        one, other = view(found), view(expected)
        for key, value in other.items():
            same = torch.equal(one[key].cpu(), value) if isinstance(value, torch.Tensor) else True
            _expect(f"{key} of a batch", same, True)


def _conversations(answers: bool) -> list[list[dict[str, str]]]:
    made = []
    for number, text in enumerate(_TEXTS * 2):
        row = [{"role": "system", "content": "the"}] if number % 3 else []
        row.append({"role": "user", "content": text})
        for _ in range(number % 2 + 1 if answers else 0):
            row += [{"role": "assistant", "content": f"é {text}</think>\nab"}, {"role": "user", "content": "them"}]
        made.append(row)
    return made


def _check_prompts(kernels: Kernels) -> None:
    table = pa.table({"prompt": _conversations(answers=False)})
    views = [lambda rows: rows.batch(range(0, len(rows), 2)), lambda rows: rows.batch([1, 0, 1])]
    _compare(kernels, PromptKind, table, HostEngine, DeviceEngine, views, max_prompt_length=9000)


def _check_chats(kernels: Kernels) -> None:
    table = pa.table({"messages": _conversations(answers=True)})
    views = [
        lambda rows: rows.batch(range(len(rows))),
        lambda rows: next(iter(rows.loader(batch_size=1, packing="bfd", shuffle=False))),
    ]
    _compare(kernels, ChatKind, table, ChatEngine, DeviceTrainingEngine, views, max_length=20_000)
    _compare(kernels, ChatKind, table, ChatEngine, DeviceTrainingEngine, [], max_length=20_000, loss_on="all")


def _check_pairs(kernels: Kernels) -> None:
    prompts = _conversations(answers=False)
    answers = [[{"role": "assistant", "content": f"{text} {number % 4}"}] for number, text in enumerate(_TEXTS * 2)]
    others = [[{"role": "assistant", "content": f"{text} them"}] for text in _TEXTS * 2]
    table = pa.table({"prompt": prompts, "chosen": answers, "rejected": others})
    views = [lambda rows: rows.batch(range(len(rows)))]
    _compare(kernels, PairKind, table, PairEngine, DeviceTrainingEngine, views)
