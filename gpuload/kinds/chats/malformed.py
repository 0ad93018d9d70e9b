"""Rows of which nothing can be made: each is rejected with a reason, and none takes others with it.

Files are converted column by column. If that fails, the rows of this batch are converted one by one, and those for
which it fails become {"problem": why}, which the tokenizers of `load_chats` and `load_pairs` reject.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrow import as_arrow, as_scalar
from gpuload.reference.template_call import describe_error
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, is_text, json_text

PROBLEM = "problem"
"""The field of a row that says why nothing can be made of it."""


class RowError(ValueError):
    """Nothing can be made of a row. The message is the reason in the report."""


def problem_in(row: Any) -> str | None:
    """Why nothing can be made of a row that was read; None if it was converted."""
    problem = row.get(PROBLEM) if isinstance(row, dict) else None
    return None if problem is None else str(problem)


def converted(make: Callable[[Mapping[str, Any]], pa.Array], columns: Mapping[str, Any]) -> pa.Array:
    """What `make` makes of n rows, by columns; or, if it fails for some of the rows, JSON with all of them."""
    try:
        for column in columns.values():
            if is_text(column.type):
                column.validate(full=True)  # Arrow reads text unchecked
        return make(columns)
    except MemoryError:
        raise
    except Exception:  # whatever is wrong with the values
        count = len(next(iter(columns.values())))
        slices = ({name: column.slice(row, 1) for name, column in columns.items()} for row in range(count))
        rows = [_as_text(make, each) for each in slices]
        return pa.ExtensionArray.from_storage(JSON_TYPE, as_arrow(rows, pa.large_string()))


def _as_text(make: Callable[[Mapping[str, Any]], pa.Array], row: Mapping[str, Any]) -> str | None:
    """One row as JSON text."""
    try:
        made = to_python(make(row))[0]
        return None if made is None else json_text(made)
    except MemoryError:
        raise
    except RowError as error:
        reason = str(error)
    except Exception as error:
        reason = _unreadable(row) or describe_error(error)
    return json_text({PROBLEM: reason})


def _unreadable(row: Mapping[str, Any]) -> str | None:
    """Which column of a row has no Python value, and why; None if all have."""
    for name, column in row.items():
        try:
            to_python(column)
        except UnicodeDecodeError:
            return f"column {name!r} is not valid UTF-8"
        except Exception as error:
            return f"column {name!r} cannot be read: {describe_error(error)}"
    return None


def check_text(name: str, value: Any) -> None:
    """Checks that a value is a text or null; a `RowError` if it is something else."""
    if value is not None and not isinstance(value, str):
        raise RowError(f"{name} is of type {type(value).__name__}, not text")


def check_form(name: str, column: Any, objects: bool) -> None:
    """Checks that no row of a column that is used as it is has another form than its format.

    A column of JSON (others are right) has lists of messages, with `objects`; otherwise texts.

    Raises:
        RowError: a row is an object, or in a column of texts something else than a text.
    """
    if column.type != JSON_TYPE:
        return
    wrong = pc.starts_with(column.storage, "{") if objects else pc.invert(pc.starts_with(column.storage, '"'))
    first = pc.index(wrong, as_scalar(True, pa.bool_())).as_py()
    if first < 0:
        return
    value = to_python(column.slice(first, 1))[0]
    if not objects:
        check_text(name, value)
    one = isinstance(value, dict) and "content" in value
    raise RowError(f"{name} is one message, not a list" if one else f"{name} is an object, not a list of messages")
