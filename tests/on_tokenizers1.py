"""A plugin for pytest (`-p on_tokenizers1`): as far as gpuload sees, the object inside every tokenizer is one of
`tokenizers` 1.0.

transformers 5 does not import with 1.0, and keeps its own object of 0.23, which makes the ids that tests expect. Where
1.0 refuses a tokenizer, gpuload sees that object too.
"""

from typing import Any

import pytest

from gpuload.reference.reference import Reference
from gpuload.tokenizer import tokenizers1


def _reworked(self: Reference) -> Any | None:
    inner = getattr(self.tokenizer, "backend_tokenizer", None)
    if inner is None or inner.encode_special_tokens:
        return inner
    try:
        return tokenizers1.opened(inner.to_str())
    except ValueError:
        return inner


def pytest_configure(config: pytest.Config) -> None:
    Reference.backend = property(_reworked)  # type: ignore[assignment,method-assign]
