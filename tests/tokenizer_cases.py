"""A tokenizer that is opened in no time, and whether those of this transformers sanitize control tokens."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gpuload.reference.control_tokens import FIRST_VERSION

_SANITIZES = "sanitize_control_tokens" in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
needs_sanitizing = pytest.mark.skipif(not _SANITIZES, reason=f"transformers before {FIRST_VERSION} does not sanitize")

WORDS = ["one", " two ", "é 你好", "<|im_end|>", "👋🏽", "three\n\n"]


def small_tokenizer(chat_template: str, merged: Sequence[str] = WORDS) -> Any:
    """A tokenizer with one id per byte and a few merges, learned from texts: a model for it trains in no time."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(merged, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = chat_template
    return made
