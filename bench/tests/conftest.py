"""Fixtures of the tests of bench: the shipped data and tokenizer, and a cache of their own."""

import os
from collections.abc import Iterator
from typing import Any

# Before any Hugging Face library is imported: tests do not access a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest
from simulator import link_slow_caches
from tiers import choose

from gpuload.demo_data import demo_files


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    choose(config, items)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's cache out of the tests. Loads that are compared turn the token cache off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULOAD_CACHE", link_slow_caches(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def gsm8k() -> str:
    return demo_files()[0]


@pytest.fixture(scope="session")
def qwen_directory() -> str:
    return demo_files()[1]


@pytest.fixture(scope="session")
def qwen(qwen_directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(qwen_directory)
