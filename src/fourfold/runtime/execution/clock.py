"""When a rank did what: marks in time, read as seconds once a step is over.

On a processor a mark is the clock. On a GPU it is an event in the queue of the device, which passes it when it has done what
was queued before, so that marks do not hold the host up.
"""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class Clock:
    """The marks of one step, counted from its begin."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin = self.mark()

    def mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        """From the begin to a mark; waits for the device."""
        if isinstance(mark, float):
            assert isinstance(self.begin, float)
            return mark - self.begin
        mark.synchronize()
        return float(self.begin.elapsed_time(mark)) / 1e3  # type: ignore[union-attr]
