"""The link between ranks 0 and 1 as gloo sees it: bandwidth one way, and a small message there and back."""

from __future__ import annotations

import json
import statistics
import time

import torch
import torch.distributed as dist

BYTES = 4 * 2**20
ROUNDS = 5


def seconds(there: torch.Tensor, back: torch.Tensor) -> float:
    start = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(there, 1)
        dist.recv(back, 1)
    else:
        dist.recv(there, 0)
        dist.send(back, 0)
    return time.perf_counter() - start


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() < 2:
        big, small = torch.ones(BYTES, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
        seconds(small, small)
        trips = [seconds(small, small) for _ in range(4 * ROUNDS)]
        sends = [seconds(big, small) for _ in range(ROUNDS)]
        if dist.get_rank() == 0:
            bandwidth, trip = 8 * BYTES / statistics.median(sends), statistics.median(trips)
            print(json.dumps({"bandwidth_Mbitps": round(bandwidth / 1e6, 1), "round_trip_us": round(trip * 1e6, 1)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
