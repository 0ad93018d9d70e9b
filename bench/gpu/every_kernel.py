"""`python -m bench.gpu.every_kernel`: the known answers of all kernels, for compute-sanitizer, which is slow.

There is no memory pool: each array is an allocation of its own, so that the sanitizer sees accesses beyond its end.
"""

from gpuload.cli.known_answers import wrong_answers
from gpuload.core.errors import MismatchError
from gpuload.engines.device.kernels import DeviceKernels, Kernels
from gpuload.engines.failures import one_line


def run(kernels: Kernels) -> str:
    """Run all cases and return a line that counts them.

    Raises:
        MismatchError: A kernel returns something wrong.
    """
    answers = list(wrong_answers(kernels))
    if wrong := [f"{name}: {one_line(what)}" for name, what in answers if what]:
        raise MismatchError("; ".join(wrong))
    kernels.synchronize()
    return f"{len(answers)} cases are right"


if __name__ == "__main__":
    on_gpu = DeviceKernels(0)
    on_gpu.xp.cuda.set_allocator(None)
    print(run(on_gpu))
