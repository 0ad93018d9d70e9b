"""The arguments of `gpuload doctor`, apart from what it does, which imports more."""

import argparse
from pathlib import Path
from typing import Any


def add_doctor(commands: Any) -> None:
    """Adds the command to those of the parser."""
    doctor = commands.add_parser("doctor", help="show versions and GPUs, and test each stage of each engine")
    doctor.add_argument(
        "--require", choices=["cpu", "cuda"], help="test only this engine; exit status 1 if it does not work"
    )
    doctor.add_argument(
        "--gpu",
        nargs="?",
        type=int,
        const=0,
        metavar="N",
        help="test GPU N (0) step by step instead, each in a process of its own, up to the first that fails",
    )
    doctor.add_argument(
        "--dump",
        type=Path,
        metavar="DIR",
        help="with --gpu: save the launches of the first wrong answer in a new directory, and repeat them on the host",
    )
    doctor.add_argument("--kernel", metavar="NAME", help="with --dump: only launches of this kernel")
    doctor.add_argument("--replay", type=Path, metavar="DIR", help="repeat saved launches on the host; needs no GPU")
    doctor.add_argument("--quick", action="store_true", help="show versions and GPUs only, in a second")
    doctor.add_argument("--gpu-step", help=argparse.SUPPRESS)  # one of the steps, in this process
    doctor.set_defaults(run=_doctor, parser=doctor)


def _doctor(given: argparse.Namespace) -> int:
    from gpuload.cli.doctor import diagnose

    if given.quick and (given.require or given.gpu is not None or given.replay):
        given.parser.error("--quick tests nothing: use it alone")
    if (given.dump and given.gpu is None) or (given.kernel and not given.dump):
        given.parser.error("--dump needs --gpu, and --kernel needs --dump")
    if given.replay and given.gpu is not None:
        given.parser.error("--replay needs no GPU: use it without --gpu")
    if given.gpu is not None and given.gpu < 0:
        given.parser.error(f"--gpu {given.gpu}: expected the number of a GPU, 0 or more")
    if given.gpu is not None or given.replay:
        from gpuload.cli import ladder

        return ladder.run(given.gpu, given.gpu_step, given.dump, given.kernel, given.replay)
    return diagnose(given.require, given.quick)
