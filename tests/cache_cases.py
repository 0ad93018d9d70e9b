"""What the tests of the token cache share."""

from pathlib import Path

import numpy as np

import gpuload

# Rows of one message are compiled, longer ones rendered by the reference, and "tool" is rejected.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if messages|length > 1 %}{{ m.content|wordcount }}{% endif %}<|im_start|>{{ m.content }}{% endfor %}"
)


def same(warm: gpuload.PromptDataset, cold: gpuload.PromptDataset, checked: bool = True) -> None:
    """Everything that a user can see of two datasets."""
    assert warm.tokens.to_lists() == cold.tokens.to_lists()
    assert (warm.tokens.values.dtype, warm.tokens.offsets.dtype) == (np.int32, np.int64)
    assert warm.column_types.names == cold.column_types.names
    assert warm.take(cold.column_types.names) == cold.take(cold.column_types.names)
    assert [warm.origin(row) for row in range(len(warm))] == [cold.origin(row) for row in range(len(cold))]
    assert warm.fingerprint == cold.fingerprint
    for name in (
        "files max_prompt_length rows_read rows_kept overlong overlong_dropped rejected examples rows_compiled "
        "by_reference source_bytes text_bytes tokens shortest longest"
    ).split():
        assert getattr(warm.report, name) == getattr(cold.report, name), name
    if checked:
        assert bool(warm.report.check.rows + warm.report.check.earlier) == bool(cold.report.check.rows)
    loaders = [prompts.loader(16, shuffle=True, seed=5) for prompts in (warm, cold)]
    batches = [next(iter(loader)) for loader in loaders]
    assert loaders[0].state_dict() == loaders[1].state_dict()
    for key, values in batches[1].items():
        assert batches[0][key].tolist() == values.tolist()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def flip_a_bit(entry: Path) -> None:
    """Changes a bit in the middle of an entry, which is another file then: the old one may be mapped."""
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.unlink()
    entry.write_bytes(data)
