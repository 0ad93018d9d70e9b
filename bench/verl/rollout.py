"""A rollout step inside verl 0.9.1.

A step is n samples of each prompt through verl's agent loop worker and a server that answers immediately, with and
without reuse of the loader's ids.
"""

from typing import Any

from bench import VERL_PYTHON
from bench.data import Plan
from bench.fit import spread
from bench.process import run_contender
from bench.report import table

_PROMPTS, _SAMPLES = 128, 8
NOTES = "Without a model: the time is verl's own work, of which tokenizing the prompts is a part."


def measure_rollout(plan: Plan) -> list[dict[str, Any]]:
    """Measure rollout steps over prompts of the last dataset."""
    if not VERL_PYTHON.exists():
        print("no .venv-verl (make verl-env creates it): nothing to measure")
        return []
    dataset = plan.datasets[-1]
    task = plan.task(dataset, prompts=_PROMPTS, samples=_SAMPLES, repeats=plan.repeats)
    answer = run_contender(
        "rollout_verl", task | {"model": str(plan.scratch / "model")}, plan.scratch / "rollout", VERL_PYTHON
    )
    for name, steps in answer["rollouts"].items():
        print(f"  {name}: " + ", ".join(f"{step['seconds']:.2f} s, {step['tokenized']} tokenized" for step in steps))
    return [{"data": dataset.name} | answer]


def rollout_table(measured: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return the table of a record's rollout steps."""
    lines = [
        [
            name,
            f"{run['prompts']} × {run['samples']}",
            f"{steps[0]['tokenized']:,}",
            spread([step["seconds"] for step in steps]),
        ]
        for run in measured
        for name, steps in run["rollouts"].items()
    ]
    head = ["agent loop", "prompts × samples", "prompts tokenized", "CPU seconds of the step"]
    return table(head, lines, 1, about)
