"""What decides sizes in memory besides the program: the allocator, the libraries' formats."""

from __future__ import annotations

from dataclasses import dataclass

LARGE, ROUND, SPLIT = 10 * 2**20, 2 * 2**20, 2**20
"""CUDA's caching allocator in torch: from `LARGE` on memory comes in multiples of `ROUND`, and what is left of them beside a
tensor becomes a block of its own only if it is more than `SPLIT`; else it counts with the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRules:
    """One kind of device.

    `granularity`: bytes the allocator rounds up to; `block` as in `workspace`; `gpu`: kernels are CUDA's, and so is the
    allocator; `library`: bytes that cuBLAS takes from the allocator for good when a thread first multiplies, of which there
    are two, forward's and backward's.
    """

    granularity: int = 1
    block: int = 16
    gpu: bool = False
    library: int = 0

    def rounded(self, size: int) -> int:
        """Bytes the allocator counts for a tensor."""
        size = -(-size // self.granularity) * self.granularity
        rest = -size % ROUND
        return size + rest if self.gpu and size >= LARGE and rest <= SPLIT else size


CPU = DeviceRules()
CUDA = DeviceRules(granularity=512, block=0, gpu=True, library=65 * 2**19)
"""`library` as seen on an H200 with torch 2.11; GPUs before Hopper are given a quarter of it."""
