"""What tests of the integration with TRL share: rows of every kind, and trainers that only prepare data."""

import json
from typing import Any

import datasets
from tokenizer_cases import WORDS

from gpuload.integrations.trl.preparation import _Unnamed

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
COUNT = 45


def words(row: int, count: int) -> str:
    return " ".join(WORDS[(row * 7 + k * k) % len(WORDS)] for k in range(count + 1))


def chat(row: int) -> list[Row]:
    system = [{"role": "system", "content": f"row {row}"}] if row % 4 == 0 else []
    turns = [[user(words(row, row % 9)), assistant(words(row + k, (row + k) % 12))] for k in range(row % 3 + 1)]
    return [*system, *(message for turn in turns for message in turn)]


MESSAGES = [{"source": f"s{row}", "messages": chat(row), "n": row} for row in range(COUNT)]
COMPLETIONS = [{"prompt": chat(row)[:-1], "n": row, "completion": chat(row)[-1:]} for row in range(COUNT)]
TEXTS = [{"n": row, "text": words(row, row % 20) + "<|im_end|>" * (row % 3 == 0)} for row in range(COUNT)]
PLAIN = [{"prompt": words(row, row % 15), "completion": words(row, row % 6), "n": row} for row in range(COUNT)]
TOOLS = [row | {"tools": json.dumps([TOOL]) if row["n"] % 2 else None} for row in MESSAGES]

PAIRS = [
    {"n": row, "prompt": chat(row)[:-1], "chosen": [assistant(words(row, 3))], "rejected": [assistant(words(row, row))]}
    for row in range(COUNT)
]
IMPLICIT = [
    {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"], "n": row["n"]}
    for row in PAIRS
]
TEXT_PAIRS = [{"prompt": words(n, n % 9), "chosen": f" {n}<|im_end|>", "rejected": words(n, 2)} for n in range(COUNT)]
IMPLICIT_TEXTS = [{"chosen": "q: " + words(n, n % 9) + " a", "rejected": "q: x", "margin": n / 4} for n in range(COUNT)]
LABELED = [row | {"label": row["n"] % 3 == 0} for row in COMPLETIONS]
LABELED_TEXTS = [row | {"label": bool(row["n"] % 2)} for row in PLAIN]


def prepared(kind: Any, config: Any, rows: Any, tokenizer: Any, *more: Any, **settings: Any) -> Any:
    """What `_prepare_dataset` of a trainer makes of rows, without a model.

    Args:
        kind: the class of the trainer.
        config: the class of its configuration.
        rows: a dataset, or its rows.
        more: for SFT, `packing` and `formatting_func`.
        settings: of the configuration; names of attributes of the trainer begin with "trainer_".
    """
    attributes = {name: settings.pop(name) for name in list(settings) if name.startswith("trainer_")}
    args = config(output_dir="unused", report_to=[], bf16=False, **{"max_length": None} | settings)
    trainer = kind.__new__(kind)
    defaults = {"chat_template": None, "completion_only_loss": False, "calculate_KL": True}
    defaults |= {"desirable_weight": 1.0, "undesirable_weight": 1.0, "_tokenizer": tokenizer}
    vars(trainer).update(defaults | {name.removeprefix("trainer_"): value for name, value in attributes.items()})
    dataset = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
    return trainer._prepare_dataset(dataset, tokenizer, args, *more, "train")


def unhashed(rows: list[Row]) -> Any:
    """Rows for `prepared` with the tokenizer of a model: `map` would digest it, for a second, to name the result.

    test_trl.py::test_rows_do_not_depend_on_their_name shows that TRL makes the same of them.
    """
    return _Unnamed.of(datasets.Dataset.from_list(rows))


def equal(found: Any, expected: Any) -> None:
    """Two datasets have the same columns in the same order, types and rows."""
    assert found.column_names == expected.column_names
    assert found.features == expected.features
    assert list(found) == list(expected)
