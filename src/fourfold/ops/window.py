"""Which input indices a sliding window, a resampling or a padding reads: index arithmetic shared by the op rules.

Indices are global, so that a rank can fetch exactly the rows it needs, however many ranks away.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.index import IndexSet


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Convolution and pooling: output o reads ``o*stride - pad + dilation*[0, kernel)``."""

    size: int
    kernel: int
    stride: int
    pad: int
    dilation: int = 1

    def reach(self, outputs: IndexSet) -> tuple[int, int]:
        """First and one past the last input index under the windows, padding included."""
        low, high = outputs.bounds
        return low * self.stride - self.pad, (high - 1) * self.stride - self.pad + self.dilation * (self.kernel - 1) + 1

    def __call__(self, outputs: IndexSet) -> IndexSet:
        return IndexSet.of(self.size, [self.reach(outputs)] if len(outputs) else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedWindow:
    """Transposed convolution: input i writes ``i*stride - pad + dilation*[0, kernel)``."""

    size: int
    kernel: int
    stride: int
    pad: int
    dilation: int = 1

    def __call__(self, outputs: IndexSet) -> IndexSet:
        if not len(outputs):
            return IndexSet.of(self.size, [])
        low, high = outputs.bounds
        first = -(-(low + self.pad - self.dilation * (self.kernel - 1)) // self.stride)
        last = (high - 1 + self.pad) // self.stride
        return IndexSet.of(self.size, [(first, last + 1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedWindow:
    """A slice: output o reads input ``o + start``. Where the input is divided, so is the output."""

    size: int
    start: int
    count: int

    def __call__(self, outputs: IndexSet) -> IndexSet:
        return outputs.shift(self.start, self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """Any fixed map of rows: output o reads the rows ``taps[o]`` with ``weights[o]``. Without weights it copies one row; tap -1
    is a constant."""

    size: int
    taps: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...] = ()

    def __call__(self, outputs: IndexSet) -> IndexSet:
        return IndexSet.of_indices(self.size, {i for o in outputs for i in self.taps[o] if i >= 0})
