"""Which tests run when: a fixed core, an exhaustive rest that runs in parts, and tests that need the shared data.

The environment variable PART chooses:

    not set   the core: the same tests and the same examples on every day and machine (make test)
    0 to 3    the core, and that quarter of the tests marked `exhaustive` (.ci/run)
    all       the core and the whole rest, with five times as many examples, from a seed that is printed (make test-all)

Tests marked `exact`, `damage` and `browser`, and those that need the environment of a trainer, have commands of their
own (Makefile), whatever PART is.

Tests marked `shared` need the directory of real data next to the checkout, and are skipped where it is missing.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SHARED = Path(__file__).parents[2] / "shared"
PARTS = 4
PART = os.environ.get("PART", "")

shared = pytest.mark.shared
exhaustive = pytest.mark.exhaustive

_common: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("core", max_examples=20, derandomize=True, database=None, **_common)
settings.register_profile("all", print_blob=True, **_common)
settings.load_profile("all" if PART == "all" else "core")


def examples(count: int, **more: Any) -> Any:
    """`hypothesis.settings` with a number of examples: all of them with PART=all, otherwise a fifth, and at least 5.

    Args:
        count: of the exhaustive run.
        more: other settings.
    """
    return settings(max_examples=count if PART == "all" else max(min(count, 5), count // 5), **more)


def core(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Cases of a parametrization, of which only some belong to the core.

    Args:
        cases: all cases.
        kept: those of the core.
    """
    cases = list(cases)
    missing = [case for case in kept if case not in cases]
    assert not missing, f"no such cases: {missing}"
    return [case for each in cases for case in ([each] if each in kept else with_mark(exhaustive, [each]))]


def with_shared(find: Callable[[], Iterable[Any]], *own: Any) -> list[Any]:
    """Cases of a parametrization: some of our own, and those of the shared data, marked `shared`.

    Without the data there is one case in their place, so that the report of a run says what was skipped.

    Args:
        find: finds the cases in the shared data; called only if it is there.
        own: the cases that need none.

    Raises:
        LookupError: the data is there, but none of these cases.
    """
    found = list(find()) if SHARED.exists() else [pytest.param(None, id="shared")]
    if not found:
        raise LookupError(f"no such cases in {SHARED}")
    return [*own, *with_mark(shared, found)]


def with_mark(mark: Any, cases: Iterable[Any]) -> list[Any]:
    """Cases of a parametrization with one mark more."""
    marked = []
    for case in cases:
        values, marks, name = (
            (case.values, case.marks, case.id) if hasattr(case, "marks") else
            (case if isinstance(case, tuple) else (case,), (), None)
        )  # fmt: skip
        marked.append(pytest.param(*values, marks=[*marks, mark], id=name))
    return marked


def shared_files(pattern: str) -> list[Path]:
    """Files of the shared datasets, for tests marked `shared`.

    Raises:
        LookupError: there are none.
    """
    found = sorted((SHARED / "datasets").glob(pattern))
    if not found:
        raise LookupError(f"no file {SHARED / 'datasets' / pattern}")
    return found


def shared_tokenizers() -> list[str]:
    """Names of the shared tokenizers, for tests marked `shared`.

    Raises:
        LookupError: there are none.
    """
    found = sorted(folder.name for folder in (SHARED / "tokenizers").glob("*") if folder.is_dir())
    if not found:
        raise LookupError(f"no directory in {SHARED / 'tokenizers'}")
    return found


def name_of(file: Path | None) -> str | None:
    """The name of a case for a file."""
    return None if file is None else file.stem[-60:]


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the exhaustive tests that are not of this run, and skip those whose data is missing.

    A test that is named on the command line always runs.
    """
    if PART not in ("", "all", *map(str, range(PARTS))):
        raise pytest.UsageError(f"PART={PART}: use 0 to {PARTS - 1}, or all")
    if PART != "all" and not any("::" in argument for argument in config.args):
        left = [item for item in items if item.get_closest_marker("exhaustive") and part_of(item.nodeid) != PART]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item not in set(left)]
    if not SHARED.exists():
        for item in items:
            if item.get_closest_marker("shared"):
                item.add_marker(pytest.mark.skip(reason="needs the shared data next to the checkout"))


def part_of(nodeid: str) -> str:
    """The part to which a test belongs, the same on every machine."""
    return str(zlib.crc32(nodeid.encode()) % PARTS)


def header() -> Sequence[str]:
    """What pytest prints about the tests that were chosen, so that they can be repeated."""
    what = {"": "the core", "all": "the core and the whole rest"}.get(
        PART, f"the core, and part {PART} of {PARTS} of the exhaustive rest"
    )
    data = "with" if SHARED.exists() else "without"
    return [f"{what} (PART={PART}), {data} the shared data"]
