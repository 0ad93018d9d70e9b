"""Every kind of tokenizer: what encodes it, what is passed over and why, and that the ids are its own."""

import copy
import gc
import json
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import user
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gpuload
from gpuload.core import backends
from gpuload.core.arrays import Ragged
from gpuload.core.errors import TokenizerError
from gpuload.engines.host import encode as host
from gpuload.reference.reference import Reference

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"
TEXTS = ["Hello, world", "  spaces\t\n\n and <|end|>tokens<|end|> ", "ünïcödé 你好 👍🏽", "x" * 500, "1234 don't I'LL"]


def train(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([*TEXTS, "the quick brown fox jumps over the lazy dog"] * 3, trainer)
    return tokenizer


def byte_level_bpe(**parts: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    return train(models.BPE(), trainer, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), **parts)


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "<|end|>", "<pad>"])
    return train(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        post_processor=processors.TemplateProcessing("<|end|> $0 <|end|>", special_tokens=[("<|end|>", 1)]),
    )


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>", "<|end|>", "<pad>"], unk_token="<unk>")
    return train(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace())


def wrapped(backend: Tokenizer, **settings: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", chat_template=TEMPLATE, **settings)


def check(file: str, tokenizer: Any, reference: Any = None, **options: Any) -> gpuload.PromptDataset:
    """Loads and compares every row with `apply_chat_template`."""
    prompts = gpuload.load(file, tokenizer, verify="full", strict=True, **options)
    reference = reference or tokenizer
    expected = [
        reference.apply_chat_template(user(t), add_generation_prompt=True, return_dict=True)["input_ids"] for t in TEXTS
    ]
    assert prompts.tokens.to_lists() == [list(ids) for ids in expected]
    return prompts


@pytest.mark.parametrize(
    ("make", "encoder"),
    [(byte_level_bpe, "each different word once"), (word_piece, "tokenizers 0."), (unigram, "tokenizers 0.")],
)
def test_kinds(make: Callable[[], Tokenizer], encoder: str, write: Callable[..., str]) -> None:
    prompts = check(write([user(t) for t in TEXTS]), wrapped(make()))
    assert encoder in prompts.report.engine
    if make is not byte_level_bpe:
        assert any("gigatoken: " in note for note in prompts.report.notes)


def test_a_bare_backend(write: Callable[..., str]) -> None:
    backend = byte_level_bpe()
    backend.enable_padding(pad_token="<pad>", pad_id=1, length=12)
    file = write([user(t) for t in TEXTS])
    with pytest.raises(gpuload.GpuloadError, match="no usable chat template"):
        gpuload.load(file, backend)
    prompts = check(file, backend, wrapped(byte_level_bpe()), chat_template=TEMPLATE)
    assert prompts.pad_token_id == 1


def test_truncation_and_padding_inside_a_tokenizer_do_not_leak(write: Callable[..., str]) -> None:
    backend = byte_level_bpe()
    backend.enable_truncation(3)
    backend.enable_padding(length=50, pad_token="<pad>", pad_id=1)
    for kind in (backend, word_piece()):
        if kind is not backend:
            kind.enable_truncation(3)
        check(write([user(t) for t in TEXTS]), wrapped(kind))


def test_a_slow_tokenizer(write: Callable[..., str]) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = TEMPLATE
    prompts = check(write([user(t) for t in TEXTS]), tokenizer)
    assert "text by text" in prompts.report.engine
    assert any("slow tokenizer" in note for note in prompts.report.notes)


def test_special_tokens_split_on_request(write: Callable[..., str]) -> None:
    tokenizer = wrapped(byte_level_bpe(), split_special_tokens=True)
    prompts = check(write([user(t) for t in TEXTS]), tokenizer)
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in prompts.tokens.values
    assert "text by text" in prompts.report.engine


def test_added_tokens_with_flags(write: Callable[..., str]) -> None:
    """lstrip, rstrip, single_word, normalized: every encoder returns the ids of the tokenizer."""
    texts = ["a <L> b", "a <R>  b", "aWORDb WORD b", "<n>x<N>", "<L><R>WORD<n>"]
    for flags in ("lstrip", "rstrip", "single_word", "normalized"):
        backend = byte_level_bpe(normalizer=normalizers.Lowercase())
        for content in ("<L>", "<R>", "WORD", "<n>"):
            backend.add_tokens([AddedToken(content, **{"normalized": False, flags: True})])
        tokenizer = wrapped(backend)
        prompts = gpuload.load(write(texts), tokenizer, verify="full", strict=True)
        for row, text in enumerate(texts):
            assert (
                prompts.tokens[row].tolist() == tokenizer.apply_chat_template(user(text), return_dict=True)["input_ids"]
            )


class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A class with a way of its own to encode."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        text = text.upper() if isinstance(text, str) else [t.upper() for t in text]
        return super()._encode_plus(text, *args, **kwargs)


class ShoutingInBatches(PreTrainedTokenizerFast):  # type: ignore[misc]
    """In transformers 4, a single text is a batch of one."""

    def _batch_encode_plus(self, texts: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._batch_encode_plus([text.upper() for text in texts], *args, **kwargs)


class OwnTemplate(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A class with a way of its own to apply a chat template."""

    def apply_chat_template(self, conversation: Any, tokenize: bool = True, **kwargs: Any) -> Any:
        ids = [7, len(conversation)]
        return {"input_ids": ids} if tokenize else "not what the ids say"


def test_classes_that_encode_in_a_way_of_their_own(write: Callable[..., str]) -> None:
    file = write([user(t) for t in TEXTS])
    shouting = Shouting(tokenizer_object=byte_level_bpe(), pad_token="<pad>", chat_template=TEMPLATE)
    prompts = check(file, shouting)
    assert any("overrides _encode_plus" in note for note in prompts.report.notes)
    in_batches = ShoutingInBatches(tokenizer_object=byte_level_bpe(), pad_token="<pad>", chat_template=TEMPLATE)
    prompts = check(file, in_batches)
    assert any("overrides _batch_encode_plus" in note for note in prompts.report.notes)
    own = OwnTemplate(tokenizer_object=byte_level_bpe(), pad_token="<pad>")
    assert check(file, own).tokens.to_lists() == [[7, 1]] * len(TEXTS)


class Replacing(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A class that changes ids on their way back."""

    def _convert_encoding(self, encoding: Any, *args: Any, **kwargs: Any) -> Any:
        made, encodings = super()._convert_encoding(encoding, *args, **kwargs)
        made["input_ids"] = [[0 if number % 3 == 1 else number for number in row] for row in made["input_ids"]]
        return made, encodings


class Cutting(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A class that always cuts off text."""

    def set_truncation_and_padding(self, *args: Any, **kwargs: Any) -> None:
        self._tokenizer.enable_truncation(2)


def replaced(name: str) -> Any:
    """An object of which a method was replaced."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(), pad_token="<pad>", chat_template=TEMPLATE)
    right = getattr(tokenizer, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        if not isinstance(found, str):
            found["input_ids"] = [*found["input_ids"], 9]
        return found

    setattr(tokenizer, name, changed)
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Replacing(tokenizer_object=byte_level_bpe(), pad_token="<pad>", chat_template=TEMPLATE),
        lambda: Cutting(tokenizer_object=byte_level_bpe(), pad_token="<pad>", chat_template=TEMPLATE),
        lambda: replaced("_encode_plus"),
    ],
    ids=["_convert_encoding", "set_truncation_and_padding", "own _encode_plus"],
)
def test_whatever_changes_the_ids_of_a_tokenizer(make: Callable[[], Any], write: Callable[..., str]) -> None:
    tokenizer, texts = make(), [text for text in TEXTS if text.isascii()]
    found = gpuload.load(write([user(t) for t in texts]), tokenizer, verify="off", max_prompt_length=4096)
    expected = [tokenizer.apply_chat_template(user(t), add_generation_prompt=True, return_dict=True) for t in texts]
    assert found.tokens.to_lists() == [list(each["input_ids"]) for each in expected]


def test_special_tokens_that_depend_on_the_text() -> None:
    """ByT5 adds its EOS token where a text does not end with it."""
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    given: dict[str, Any] = {"verify": "off", "progress": False}
    eos = tokenizer.eos_token
    chats = gpuload.load_chats(pa.table({"text": ["hi", f"ho{eos}"]}), tokenizer, **given)
    assert [row["input_ids"] for row in chats] == [tokenizer(f"{text}{eos}")["input_ids"] for text in ("hi", "ho")]
    columns = {"prompt": ["q"], "chosen": [" yes"], "rejected": [" no"]}
    (pair,) = gpuload.load_pairs(pa.table(columns), tokenizer, **given)
    (same,) = gpuload.load_pairs(pa.table(columns), tokenizer, **given | {"verify": "full"})
    assert pair == same
    assert pair["chosen_ids"][-2:] == [*tokenizer("s", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def test_an_encoder_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, write: Callable[..., str], qwen: Any
) -> None:
    """A fast way that accepts a tokenizer and gets one hostile text wrong is found out before it is used."""
    real = host._gigatoken

    def nearly(reference: Reference) -> host.HostEncoder:
        encoder = real(reference)

        def encode(text: pa.LargeStringArray) -> Ragged:
            ids = encoder.encode(text)
            ids.values[ids.values == qwen.convert_tokens_to_ids("<|im_end|>")] = 5
            return ids

        return host.HostEncoder("nearly", encode)

    nearly.__name__ = "_gigatoken"
    monkeypatch.setattr(host, "_gigatoken", nearly)
    encoder = host.host_encoder(Reference(qwen))
    assert encoder.name.startswith("tokenizers")
    assert "gigatoken: differs from the tokenizer on '<|im_end|>'" in encoder.unused


def test_a_tokenizer_by_path(write: Callable[..., str], qwen: Any, qwen_folder: str) -> None:
    file = write([user(t) for t in TEXTS])
    for given in (qwen_folder, Path(qwen_folder)):
        check(file, given, qwen)
    assert gpuload.load(file, tokenizer=qwen_folder).tokens.to_lists() == gpuload.load(file, qwen).tokens.to_lists()


def test_a_changed_tokenizer_object_is_the_reference(write: Callable[..., str], qwen_folder: str) -> None:
    """Not the file on disk: tokens added to the object count."""
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.add_tokens(["quick brown"])
    file = write([user("the quick brown fox")])
    prompts = gpuload.load(file, tokenizer, verify="full", strict=True)
    assert tokenizer.convert_tokens_to_ids("quick brown") in prompts.tokens.values


CLASSES = ["Qwen2Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "GPT2Tokenizer", "T5Tokenizer", "NllbTokenizer"]


def without_vocabulary(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", CLASSES)
def test_a_directory_without_its_vocabulary(name: str, tmp_path: Path) -> None:
    """transformers 5 opens it with its special tokens."""
    added = {str(number): {"content": f"<|{number}|>", "special": number % 2 == 0} for number in range(300, 340)}
    folder = without_vocabulary(tmp_path / "tok", {"tokenizer_class": name, "added_tokens_decoder": added})
    with pytest.raises(TokenizerError, match=r"tok'(:| has) (no vocabulary, only \d+ special|cannot be loaded)"):
        Reference(folder, chat_template=None)


def test_a_tokenizer_without_its_vocabulary_in_a_load(qwen_folder: str, tmp_path: Path) -> None:
    """Conversations and pairs too; and a tokenizer that was opened before."""
    config = json.loads((Path(qwen_folder) / "tokenizer_config.json").read_text())
    folder = without_vocabulary(tmp_path / "tok", config)
    chats = pa.table({"messages": [[*user("hi"), {"role": "assistant", "content": "yes"}]]})
    pairs = pa.table({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})
    wrong = r"tok'(:| has) (no vocabulary, only 2\d special and added tokens: .*vocab\.json|cannot be)"
    for call in (
        lambda given: gpuload.load(pa.table({"prompt": [user("hi")]}), given),
        lambda given: gpuload.load_chats(chats, given),
        lambda given: gpuload.load_pairs(pairs, given),
    ):
        with pytest.raises(TokenizerError, match=wrong):
            call(folder)
    with pytest.raises((TokenizerError, OSError, ImportError), match=f"{wrong}|Can't load|protobuf"):
        gpuload.load(chats, AutoTokenizer.from_pretrained(folder), prompt_key="messages")


def test_a_vocabulary_of_few_or_of_added_tokens(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.add_tokens([AddedToken(letter) for letter in "abc"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "saved")
    for given in (tokenizer, str(tmp_path / "saved"), str(tmp_path / "saved" / "tokenizer.json"), backend):
        assert Reference(given, chat_template=None).encode("cab") == [3, 1, 2]
    # Bytes: there is no file.
    folder = without_vocabulary(tmp_path / "bytes", {"tokenizer_class": "ByT5Tokenizer"})
    assert Reference(folder, chat_template=None).encode("ab") == [100, 101]


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("rows", [20, 3000])
def test_what_the_user_sets_in_the_tokenizer_meanwhile(
    verify: Any, rows: int, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a collator does on another thread: transformers keeps padding and truncation of a call in the tokenizer."""
    tokenizer, own, encode = copy.deepcopy(qwen), copy.deepcopy(qwen), backends._encode_fast

    def meanwhile(*given: Any) -> Any:
        tokenizer(["a b c d e", "b"], padding=True, truncation=True, max_length=2)
        return encode(*given)

    monkeypatch.setattr(backends, "_encode_fast", meanwhile)
    table = pa.table({"prompt": [user(f"{row} of {rows}: " + "é x" * (row % 7)) for row in range(rows)]})
    given: dict[str, Any] = {"verify": verify, "max_prompt_length": 4096, "progress": False}
    found = gpuload.load(table, tokenizer, **given)
    tokenizer(["a b c d e", "b"], padding=True, truncation=True, max_length=2)
    again = gpuload.load(table, tokenizer, **given)
    expected = [
        own.apply_chat_template(row, add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in table["prompt"].to_pylist()
    ]
    assert found.tokens.to_lists() == again.tokens.to_lists() == expected
    assert not found.report.check.mismatches
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 2  # nor does a load change what the user has set


SAID = [*user("a question"), {"role": "assistant", "content": "an answer"}]


@pytest.mark.parametrize(
    ("load", "row"),
    [
        (gpuload.load, {"prompt": user("a question")}),
        (partial(gpuload.load, chat_template=None), {"prompt": "a text"}),
        (gpuload.load_chats, {"messages": SAID}),
        (gpuload.load_pairs, {"prompt": SAID[:1], "chosen": SAID[1:], "rejected": SAID[1:]}),
    ],
    ids=["prompts", "texts", "chats", "pairs"],
)
@pytest.mark.parametrize("encoder", ["words", "gigatoken"])
def test_a_tokenizer_is_freed_with_its_dataset(
    load: Any, row: Any, encoder: str, qwen_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a garbage collection, of which there are few: most of a tokenizer's memory is none that Python knows
    of."""
    if encoder == "gigatoken":
        monkeypatch.setattr(host, "MOST_BY_WORDS", -1)
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    freed = weakref.ref(tokenizer)
    gc.collect()
    gc.disable()
    try:
        data = load(pa.Table.from_pylist([row] * 40), tokenizer)
        assert encoder in data.report.engine.replace("each different word", "words")
        next(iter(data.loader(batch_size=2)))
        del data, tokenizer
        assert freed() is None
    finally:
        gc.enable()
