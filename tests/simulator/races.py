"""Kernels of the host that find races: threads that use the same item of an array in shared memory, one of which writes
it, without a barrier in between. As on a GPU, shuffles and votes order no accesses to memory."""

from __future__ import annotations

import re
from typing import Any

from gpuload.engines.device.host_build import build, launch
from gpuload.engines.device.kernel_source import source
from simulator.host_kernels import HostKernels

_WATCHED = """
#include <utility>
static std::map<std::pair<unsigned, unsigned>, long long> passed;  // barriers, by block and thread
extern "C" void begin_launch()
{
    passed.clear();
}
#undef __syncthreads
#define __syncthreads() (fibers::barrier(FIBERS_SITE("__syncthreads")), (void)passed[{blockIdx.x, threadIdx.x}]++)
#undef __syncwarp
#define __syncwarp() (fibers::sync_warp(FIBERS_SITE("__syncwarp"), ~0u), (void)passed[{blockIdx.x, threadIdx.x}]++)
template <class T> struct Watched {
    T value;
    mutable long long read, written;
    mutable unsigned reader, writer;
    static void check(bool good)
    {
        if (!good) fibers::fail("a race: a thread uses what another one writes, without a barrier in between");
    }
    operator T() const
    {
        const long long now = passed[{blockIdx.x, threadIdx.x}];
        check(written != now || writer == threadIdx.x);
        reader = read == now && reader != threadIdx.x ? ~0u : threadIdx.x;
        read = now;
        return value;
    }
    void operator=(T made)
    {
        const long long now = passed[{blockIdx.x, threadIdx.x}];
        check((written != now || writer == threadIdx.x) && (read != now || reader == threadIdx.x));
        writer = threadIdx.x;
        written = now;
        value = made;
    }
    void operator^=(T by) { *this = (T)(*this ^ by); }
};
typedef Watched<unsigned char> Bytes;
typedef Watched<int> Symbols;
typedef Watched<unsigned> Pairs;
"""

_CHANGES = (  # pattern, replacement, how often
    (r"__shared__ u8 (\w+)\[", r"__shared__ Bytes \1[", 3),  # of tiles.cu
    (r"u8 \*text, \*marks, \*class_at;", "u8* text; const Bytes *marks, *class_at;", 1),
    (r"__shared__ int symbols\[", "__shared__ Symbols symbols[", 3),  # of the merges by warps
    (r"__shared__ unsigned (beginning|there|lows)\[", r"__shared__ Pairs \1[", 7),
    (r"int\* symbol = ", "Symbols* symbol = ", 1),
    (r"unsigned\* pair = ", "Pairs* pair = ", 1),
    (r"int\* symbols;", "Symbols* symbols;", 1),
    (r"unsigned\* (pairs|there|lows);", r"Pairs* \1;", 3),
)


def watched(text: str) -> str:
    """Return kernels whose arrays in shared memory note which thread uses what."""
    for pattern, replacement, expected in _CHANGES:
        text, count = re.subn(pattern, replacement, text)
        assert count == expected, (pattern, count)
    return _WATCHED + text


class RacingKernels(HostKernels):
    """Kernels that end with an error where threads race for marks, classes, symbols or pairs in shared memory."""

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        library = build(watched(source()), f"SEGMENT={self.segment}")
        library.begin_launch()
        launch(library, name, blocks, self.seed, arguments)
