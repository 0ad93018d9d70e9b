"""The fuzzer of all backends: a short run of it, and what it does with a backend that is wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import fuzz
import pytest
from encoder_variants import VARIANTS
from transformers import PreTrainedTokenizerFast

from gpuload.core.arrays import Ragged
from gpuload.engines.host import encode
from gpuload.tokenizer.tokenizers1 import VARIABLE


@pytest.fixture(autouse=True)
def _without_tokenizers1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # it takes half a minute to ask both versions for all code points


def small(name: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=VARIANTS[name](), pad_token="<|im_end|>")


@pytest.mark.parametrize("name", ["all flags", "Gemma", "WordPiece"])
def test_a_short_run(name: str) -> None:
    assert fuzz.fuzz(name, small(name), 600, seed=1, rounds=2) == (2 * fuzz.ROUND, None)


def test_the_backends_of_the_shipped_tokenizer(qwen: Any) -> None:
    backends = fuzz.of_texts(qwen)
    assert {"gigatoken", "tokenizers"} <= {name.split()[0] for name in backends.others}
    assert "kernels on the host" in backends.others or fuzz.COMPILER is None
    assert fuzz.difference("qwen", backends, ["e\u0301<|im_end|>", "", "a" * 300]) is None


def test_a_wrong_backend_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    right = encode._tokenizers

    def wrong(reference: Any) -> encode.HostEncoder:
        encoder = right(reference)

        def ids(text: Any) -> Ragged:
            rows = encoder.encode(text).to_lists()
            texts = text.to_pylist()
            return Ragged.from_lists(
                [[7, *row] if "\u4f60" in one else row for row, one in zip(rows, texts, strict=True)]
            )

        return encode.HostEncoder("wrong", ids)

    wrong.__name__ = "_tokenizers"
    with (
        mock.patch.object(encode, "_tokenizers", wrong),
        mock.patch.object(encode, "acceptance_texts", return_value=["x"]),
        mock.patch.object(fuzz, "tokenizers", return_value={"small": small("shipped")}),
    ):
        assert fuzz.main(["--seconds", "600"]) == 1
    out = capsys.readouterr().out
    lines = out[out.index("small, texts: wrong") :].splitlines()
    assert lines[0].endswith(r" differs on '\u4f60'")
    ids = {name: rest for name, _, rest in (line.strip().partition(" ") for line in lines[1:])}
    assert ids["right"].strip() != ids["wrong"].strip()


def test_one_text(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(fuzz, "tokenizers", return_value={"small": small("shipped")}):
        assert fuzz.main(["--text", "e\\u0301\\n<|im_end|>"]) == 0
    assert "small: 1 texts, no difference" in capsys.readouterr().out
