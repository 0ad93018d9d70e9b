"""How much memory this process may still take, and whether that is enough."""

from contextlib import suppress
from pathlib import Path

from gpuload.core.errors import HostMemoryError

_CGROUP = Path("/sys/fs/cgroup")

_PER_BYTE = 150  # bytes that tokenizers 0.23 takes while it encodes a byte of text: 110 to 150 were measured
_LONG = 1 << 22  # bytes of text: below, nobody asks the system


def check_room_to_encode(nbytes: int, place: str = "a text") -> None:
    """Checks that there is memory for `tokenizers` to encode one text; without it, the system kills the process.

    Args:
        nbytes: of the text.
        place: which one it is, for the message.

    Raises:
        HostMemoryError: there is too little.
    """
    needed, free = _PER_BYTE * nbytes, free_memory() if nbytes > _LONG else None
    if free is not None and needed > free:
        raise HostMemoryError(
            f"{place} has {nbytes:,} bytes: to encode it, tokenizers takes about {needed:,} bytes of memory, and "
            f"{free:,} are free: split the row or remove it"
        )


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
