"""The stages of a load on the host, each alone, by as many threads as the task says."""

import json
import os
import sys

# Before any import starts a thread pool.
os.environ |= dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS"), str(json.loads(sys.argv[1])["threads"]))
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["OMP_NUM_THREADS"])])

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from transformers import AutoTokenizer

import gpuload
from bench.contenders.common import Meter, answer, task_given
from bench.contenders.imported import import_ahead
from gpuload.core.options import Options
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.render import HostText
from gpuload.pipeline.parts import Batch, Encoded, Rendered
from gpuload.pipeline.stream import Stage, read, side_by_side
from gpuload.reference.reference import Reference
from gpuload.sources.open import open_sources

Measured = dict[str, dict[str, float]]


def cpu_seconds() -> tuple[float, float]:
    """Return seconds of all threads in the program, and in the system for it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def measured(into: Measured, name: str, work: Callable[[], Any]) -> Any:
    """Do some work, and record the seconds that it took: elapsed, of the CPU, and in the system."""
    started, (user, system) = time.perf_counter(), cpu_seconds()
    result = work()
    now = cpu_seconds()
    into[name] = {
        "seconds": time.perf_counter() - started,
        "cpu": now[0] + now[1] - user - system,
        "system": now[1] - system,
    }
    return result


def main() -> None:
    """Run each stage over all batches, as a load does: all of them in memory, the data several times in a row."""
    task = task_given()
    tokenizer: Any = AutoTokenizer.from_pretrained(task["tokenizer"])
    import_ahead(ours=True)
    engine, found = HostEngine(Reference(tokenizer)), Measured()
    options = Options.parse({"max_prompt_length": task["limit"], "cache_dir": task["cache"]})
    sources = open_sources(list(task["files"]), options) * task["copies"]

    def batches() -> Iterator[Batch | Encoded]:
        return read(sources, lambda number: engine.read(sources[number], "prompt", False), None, {}, several=True)

    def through(name: str, work: Stage, given: list[Any]) -> list[Any]:
        with ExitStack() as stack:
            made: list[Any] = measured(found, name, lambda: list(side_by_side({name: work}, iter(given), {}, stack)))
            return made

    def render(batch: Batch) -> Rendered:
        return Rendered(batch.parts, batch.prompts, engine.render(batch.prompts))

    def encode(batch: Rendered) -> Rendered:
        assert isinstance(batch.text, HostText)
        engine.encode(batch.text)
        return batch

    measured(found, "construct", lambda: engine.encoder)
    given = measured(found, "read", lambda: list(batches()))
    through("first render", render, given)
    rendered = through("render", render, given)
    through("first encode", encode, rendered)
    through("encode", encode, rendered)
    rows = sum(len(batch) for batch in given)
    text_bytes = sum(int(batch.text.sizes.clip(0).sum()) for batch in rendered)
    del given, rendered
    meter = Meter()
    prompts = gpuload.load(task["files"], tokenizer, max_prompt_length=task["limit"], cache_dir=task["cache"])
    load = meter.stop() | {"rows": prompts.report.rows_read}
    answer(threads=task["threads"], rows=rows, text_bytes=text_bytes, stages=found, load=load, engine=engine.describe())


if __name__ == "__main__":
    main()
