"""How much memory this process may still take."""

from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that are free on this machine, or in this container if that is less; None if the system does not say.

    From `/proc/meminfo`, and the limits of the second version of Linux' control groups.
    """
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
        with suppress(OSError, KeyError, ValueError):  # "max": no limit
            limit = int((_CGROUP / "memory.max").read_text())
            held = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            free = min(free, limit - int(held["anon"]))  # other pages can be dropped
        return max(free, 0)
    return None
