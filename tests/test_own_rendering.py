"""Tokenizers with an `apply_chat_template` of their own, of a class or on the object: nothing else makes their ids."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from conftest import user

import gpuload
from gpuload.core.errors import TokenizerError
from gpuload.reference.own_rendering import renders_its_own_way


@pytest.fixture
def longer(qwen: Any) -> Any:
    """A tokenizer whose ids of a conversation have one more than those of its text, by a method on the object."""
    tokenizer = copy.deepcopy(qwen)

    def apply_chat_template(*args: Any, **kwargs: Any) -> Any:
        made = qwen.apply_chat_template(*args, **kwargs)
        if isinstance(made, str):
            return made
        ids = made if isinstance(made, list) else made["input_ids"]
        ids.append(5)
        return made

    tokenizer.apply_chat_template = apply_chat_template
    return tokenizer


@pytest.mark.parametrize("verify", ["off", "sample"])
def test_a_method_on_the_object(write: Callable[..., str], longer: Any, qwen: Any, verify: str) -> None:
    rows = [user(f"question {k}") for k in range(600)]
    made = gpuload.load(write(rows), longer, verify=verify)
    assert made.tokens.to_lists() == [
        [*qwen.apply_chat_template(row, add_generation_prompt=True, return_dict=False), 5] for row in rows
    ]
    assert "prompt by prompt" in made.report.engine
    chats = write({"messages": [[*row, {"role": "assistant", "content": "a"}] for row in rows]}, name="chats.parquet")
    with pytest.raises(TokenizerError, match="renders and encodes in its own way"):
        gpuload.load_chats(chats, longer, verify=verify)


def test_a_method_with_arguments_given_beforehand(write: Callable[..., str], qwen: Any) -> None:
    """As NeMo-RL keeps those of its configuration."""
    tokenizer, rows = copy.deepcopy(qwen), [user(f"question {k}") for k in range(600)]
    tokenizer.chat_template = "{{ name }}: {{ messages[0].content }}"
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, name="Ann")
    assert not renders_its_own_way(tokenizer)
    made = gpuload.load(write(rows), tokenizer, verify="off")
    assert made.tokens.to_lists() == [tokenizer(f"Ann: question {k}")["input_ids"] for k in range(600)]
    assert "prompt by prompt" not in made.report.engine
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, tokenizer_kwargs={"max_length": 2})
    assert renders_its_own_way(tokenizer)


def test_a_template_from_a_method_on_the_object(write: Callable[..., str], qwen: Any) -> None:
    tokenizer, rows = copy.deepcopy(qwen), [user(f"question {k}") for k in range(600)]
    tokenizer.get_chat_template = lambda *args, **kwargs: "own: {{ messages[0].content }}"
    made = gpuload.load(write(rows), tokenizer, verify="off")
    assert made.tokens.to_lists() == [tokenizer(f"own: question {k}")["input_ids"] for k in range(600)]
