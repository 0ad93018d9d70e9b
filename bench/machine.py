"""Where and when: what makes a number a measurement."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from bench.inputs import ROOT


def circumstances() -> dict[str, Any]:
    """The machine, the date, the state of the repository, and how busy the machine was at the start."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),
        "commit": commit(),
    }


def _cpu() -> str:
    try:
        facts = dict(
            (part.strip() for part in line.split(":", 1))
            for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
            if ":" in line
        )
    except OSError:
        return platform.processor() or "unknown"
    numbers = ", ".join(f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts)
    return f"{facts.get('model name', 'unknown')} ({numbers})" if numbers else facts.get("model name", "unknown")


def commit() -> str:
    """Of the checkout, with a plus where tracked files outside of the results differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!bench/records")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
