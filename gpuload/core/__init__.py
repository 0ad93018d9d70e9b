"""What every other part uses: errors, arrays, marked ids, options, files, memory."""

import os
import sys
import threading
from functools import cached_property


def _in_child() -> None:
    """Python 3.11 has a lock for each `cached_property`, of all objects together. In a process that was forked while
    another thread made such a value, nobody would release it."""
    for module in [module for name, module in sys.modules.items() if name.startswith("gpuload.")]:
        for kind in [each for each in vars(module).values() if isinstance(each, type)]:
            for value in vars(kind).values():
                if isinstance(value, cached_property) and hasattr(value, "lock"):
                    value.lock = threading.RLock()


if sys.version_info < (3, 12) and hasattr(os, "register_at_fork"):  # the latter: not on Windows
    os.register_at_fork(after_in_child=_in_child)
