"""`python -m bench.gpu.every_kernel`: the known answers of all kernels, for compute-sanitizer, which is slow.

There is no memory pool: each array is an allocation of its own, so that the sanitizer sees accesses beyond its end.
"""

import torch

from bench.gpu.rig import Rig
from gpuload.cli.known_answers import cases, wrong_answers
from gpuload.core.errors import MismatchError
from gpuload.engines.device.kernels import DeviceKernels


def main() -> None:
    """Run on the first GPU."""
    rig = Rig(DeviceKernels(0), torch.device("cuda", 0), rehearsal=False)
    rig.kernels.xp.cuda.set_allocator(None)  # no pool
    print(run(rig))


def run(rig: Rig) -> str:
    """Run all cases.

    Returns:
        A line that counts cases, launches and kernels.

    Raises:
        MismatchError: A kernel returns something wrong.
    """
    with rig.launches() as recorded:
        wrong = [f"{name}: {what}" for name, what in wrong_answers(rig.kernels) if what]
        rig.kernels.synchronize()
    if wrong:
        raise MismatchError("; ".join(wrong))
    return f"{len(cases())} cases, {len(recorded)} launches of {len({launch.name for launch in recorded})} kernels"


if __name__ == "__main__":
    main()
