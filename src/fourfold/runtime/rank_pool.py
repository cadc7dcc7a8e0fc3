"""The ranks a command runs on, wherever they come from: spawned here, or joined under torchrun.

Both run a function on all ranks and give all answers. Under torchrun every process runs the whole command: `share`
computes a value on the leader and hands it to the others, and only the leader speaks.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar

from fourfold.errors import Error, InvalidInput, WorkerFailed
from fourfold.plans import Plan
from fourfold.runtime.host.devices import RankDevices, init_process_group, rank_devices, take_device
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.host.peers import lost_rank

MEETING_SECONDS = 0.02  # between two looks at who has come up

T = TypeVar("T")


class RankPool(Protocol):
    """Ranks that run functions together."""

    count: int
    devices: RankDevices

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]: ...


class TorchrunRanks:
    """This process as one rank of a group that torchrun started."""

    def __init__(self, device: str = "cpu", *, share_gpu: bool = False) -> None:
        import torch.distributed as dist

        from fourfold.runtime.comm.world import TIMEOUT
        from fourfold.runtime.host.launch import keep_memory

        keep_memory()
        self.devices = rank_devices(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), share_gpu=share_gpu)
        with _failures():
            store, rank, self.count = next(dist.rendezvous("env://", timeout=TIMEOUT))  # type: ignore[attr-defined]
            store.set_timeout(TIMEOUT)
            _meet(store, rank, self.count, TIMEOUT.total_seconds())
            store = dist.PrefixStore("fourfold", store)  # type: ignore[attr-defined]
            own = take_device(self.devices, rank, int(os.environ.get("LOCAL_RANK", "0")))
            init_process_group(own, store=store, rank=rank, world_size=self.count, timeout=TIMEOUT)

    def __enter__(self) -> TorchrunRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        from fourfold.runtime.comm.world import leave

        if error is None:  # after a failure the others are waiting for us elsewhere: torchrun ends them
            leave()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        import torch.distributed as dist

        answers: list[Any] = [None] * self.count
        with _failures():
            dist.all_gather_object(answers, function(*args))
        return answers


def _meet(store: Any, rank: int, count: int, timeout: float) -> None:
    """Wait until all ranks have come up, in steps that let a signal through, and name those that have not."""
    store.set(f"fourfold/here/{rank}", "")
    until = time.monotonic() + timeout
    while missing := [r for r in range(count) if not store.check([f"fourfold/here/{r}"])]:
        if time.monotonic() > until:
            ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise WorkerFailed(f"{ranks} of {count} did not come up within {timeout:g} s (FOURFOLD_TIMEOUT)")
        time.sleep(MEETING_SECONDS)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """What goes wrong on a rank or between them, as an error that names the rank: the lost one, if there is, or else this."""
    try:
        yield
    except WorkerFailed as error:
        raise lost_rank() or error from None
    except Error:
        raise
    except Exception as error:
        own = WorkerFailed(f"rank {os.environ.get('RANK', 0)} failed:\n{traceback.format_exc()}")
        raise lost_rank() or own from error


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_leader() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def rank_pool(
    count: int | None, *, timeout: float = 3600.0, device: str = "cpu", share_gpu: bool = False
) -> LocalRanks | TorchrunRanks:
    """The ranks to run on: those of torchrun if it started us, else `count` local ones; on a kind of device.

    The timeout is for a rank lost in computing; one that waits for another in vain fails by that collective's own.
    """
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if count is not None and count != size:
            raise InvalidInput(f"--ranks {count} under a torchrun of {size} processes; leave --ranks out or make them agree")
        return TorchrunRanks(device, share_gpu=share_gpu)
    if count is None:
        raise InvalidInput("how many ranks? give --ranks N, or start under torchrun")
    if count < 1:
        raise InvalidInput(f"--ranks {count}; use at least 1")
    return LocalRanks(count, timeout=timeout, devices=rank_devices(device, count, share_gpu=share_gpu))


def share(ranks: LocalRanks | TorchrunRanks, compute: Callable[[], T]) -> T:
    """A value the leader computes and everyone gets; with local ranks, simply the value."""
    if isinstance(ranks, LocalRanks):
        return compute()
    with _failures():
        return from_first_rank(compute)


def from_first_rank(compute: Callable[[], T]) -> T:
    """A value that the first of the running ranks computes and all get; without a process group, simply the value."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return compute()
    box: list[Any] = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    value: T = box[0]
    return value


def check_count(plan: Plan, count: int) -> None:
    """Refuse to run a plan on another number of ranks than it was made for."""
    if plan.size != count:
        what = f"the plan's {len(plan.stages)} stages have" if plan.stages else f"the plan's mesh {plan.mesh} has"
        raise InvalidInput(
            f"{what} {plan.size} ranks, {count} are asked to run it; use {plan.size} ranks or plan for {count} devices"
        )
