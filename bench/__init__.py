"""Benchmarks: `python -m bench` on the CPU, `python -m bench.gpu_record` on a GPU.

data.py         datasets and tokenizers that are measured
process.py      runner: one process per measurement or section
environment.py  description of the machine, the packages and the commit
fit.py          numbers of several runs, and lines through two sizes: fixed part and rate
report.py       writer of Markdown tables
documents.py    tables of records in README.md and docs/

agents.py       rows with tools and of many shapes; startup.py: the first load of a process

contenders/     the measured programs, one per process
cpu/            starts and epochs, memory, cores, packing, SFT; headline.py: the numbers of README.md
verl/           epochs inside verl 0.9.1
trainers/       the start, and batches or steps, of trainers with and without gpuload
gpu/            the record of a GPU; records/README.md says how to make one
tests/          tests of this package, and those that need a GPU

results/ holds the records of the CPU, records/ those of GPUs.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERL_PYTHON = ROOT / ".venv-verl" / "bin" / "python"
"""Interpreter of the environment that `make verl-env` creates."""
