"""A process that beats for a rank whose interpreter lock is held.

One call may hold the lock for longer than a dead rank would be silent, such as `json.loads` of a large array: then the
rank's own thread cannot beat, although the rank works. This process, which the rank starts, hears each of its beats.
When it has heard none for some seconds, it looks whether the rank's process runs, and beats in its place as long as it
does.

It ends with the rank: with its process, or when the pipe between them is closed. It imports torch only when it has to
beat: a load that never holds the lock for long does not pay for it. It is a new interpreter, so that nothing of the
rank is in it: no threads, no CUDA, no modules.
"""

import os
import select
import signal
import sys
import time
from typing import Any

_EXITING = 4  # PF_EXITING of Linux: the process was killed, and a driver may still be giving back its memory


def runs(process: int) -> bool:
    """Whether a process is neither stopped nor at its end; False where there is no `/proc` to ask."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state, *numbers = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return state not in (b"T", b"t", b"Z", b"X") and not int(numbers[5]) & _EXITING


def _connect(kind: str, address: str, port: str) -> Any:
    """Another client of the store of a rank."""
    from torch._C._distributed_c10d import FileStore, TCPStore

    return FileStore(address, -1) if kind == "FileStore" else TCPStore(address, int(port), wait_for_workers=False)


def main(process: str, beat: str, patience: str, key: str, kind: str, address: str, port: str) -> None:
    """Stands in for a rank until it ends. Standard input is a pipe into which the rank writes at each of its beats.

    Args:
        process: id of the rank's process, the parent of this one.
        beat: seconds between two beats.
        patience: seconds without a beat of the rank after which this process beats.
        key: what is counted in the store.
        kind, address, port: of the store, see `Heartbeat`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which may go on
    store, heard = None, time.monotonic()
    while os.getppid() == int(process):
        if select.select([0], [], [], float(beat))[0]:
            if not os.read(0, 1 << 16):
                return
            heard = time.monotonic()
        elif time.monotonic() - heard > float(patience) and runs(int(process)):
            if store is None:
                store = _connect(kind, address, port)  # takes seconds
            else:
                store.add(key, 1)


if __name__ == "__main__":
    own, path = sys.argv[1:8], sys.argv[8:]
    sys.path[:] = path  # where the rank has found torch
    main(*own)
