"""Texts that an encoder must get right before it is used, made from the tokenizer's added tokens."""

import unicodedata
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from encoder_variants import byte_level
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from gpuload.core.arrays import Ragged
from gpuload.engines.host import encode as host
from gpuload.engines.host.acceptance import acceptance_texts, added_token_texts
from gpuload.reference.reference import Reference


def test_every_token_occurs_next_to_what_its_flags_refer_to() -> None:
    added = [
        AddedToken("<l>", lstrip=True, normalized=False),
        AddedToken("<r>", rstrip=True, normalized=False),
        AddedToken("word", single_word=True, normalized=False),
        AddedToken("caf\u00e9", normalized=True),
    ]
    texts = added_token_texts(added)
    for space in ("  ", "\n", "\u00a0", "\u3000", "\u2003"):
        assert any(f"{space}<l>" in text for text in texts)
        assert any(f"<r>{space}" in text for text in texts)
    for letter in "7_\u00e9\u4f60":
        assert any(f"word{letter}" in text for text in texts)
        assert any(f"{letter}word" in text for text in texts)
    for form in (unicodedata.normalize("NFD", "caf\u00e9"), "CAF\u00c9", "caf\u00e9\u0301"):
        assert any(form in text for text in texts)
    for one in added:
        for other in added:
            assert any(one.content + other.content in text for text in texts)
            assert any(f"{one.content}\t{other.content}" in text for text in texts)


@pytest.mark.parametrize("count", [0, 1, 30, 1000, 7000])
def test_every_token_occurs_and_the_cost_is_bounded(count: int) -> None:
    added = [AddedToken(f"<unused{number}>", normalized=False) for number in range(count)]
    added += [AddedToken("<r>", rstrip=True, normalized=False)]
    texts = added_token_texts(added)
    whole = "\0".join(texts)
    assert all(token.content in whole for token in added)
    assert len(whole) < 400_000
    if count <= 1000:
        assert "<r>\u3000" in whole


FLAGS = ["lstrip", "rstrip", "single_word", "normalized"]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("position", [0, 40, 99])
def test_an_encoder_that_ignores_a_flag_of_any_token_is_not_used(
    flag: str, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of a hundred tokens it is."""

    def tokenizer(with_flag: bool) -> Any:
        flags = [{flag: True} if with_flag and number == position else {} for number in range(100)]
        tokens = [AddedToken(f"t{number}\u00e9x", **{"normalized": False, **one}) for number, one in enumerate(flags)]
        return PreTrainedTokenizerFast(tokenizer_object=byte_level(added=tuple(tokens)))

    def ignores(make: Callable[[Reference], host.HostEncoder]) -> Callable[[Reference], host.HostEncoder]:
        return lambda reference: make(Reference(tokenizer(False), chat_template=None))

    for name in ("_gigatoken", "_words", "_tokenizers"):
        maker = ignores(getattr(host, name))
        maker.__name__ = name
        monkeypatch.setattr(host, name, maker)
    reference = Reference(tokenizer(True), chat_template=None)
    encoder = host.host_encoder(reference)
    assert encoder.name.endswith("text by text"), encoder
    texts = acceptance_texts(reference)
    found: Ragged = encoder.encode(pa.array(texts, pa.large_string()))
    assert found.to_lists() == reference.encode_many(texts)
