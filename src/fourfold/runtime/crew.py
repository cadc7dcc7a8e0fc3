"""The ranks a command runs on, wherever they come from: spawned here, or joined under torchrun.

Both run a function on all ranks and give all answers. Under torchrun every process runs the whole command: `share`
computes a value on the leader and hands it to the others, and only the leader speaks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from fourfold.errors import InvalidInput
from fourfold.plans import Plan
from fourfold.runtime.launch import Ranks

T = TypeVar("T")


class Crew(Protocol):
    """Ranks that run functions together."""

    count: int

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]: ...


class Joined:
    """This process as one rank of a group that torchrun started."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from fourfold.runtime.launch import keep_memory
        from fourfold.runtime.world import TIMEOUT

        keep_memory()
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self.count = dist.get_world_size()

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        from fourfold.runtime.train import forget
        from fourfold.runtime.world import leave

        if error is None:  # after a failure the others are waiting for us elsewhere: torchrun ends them
            forget()
            leave()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        import torch.distributed as dist

        answers: list[Any] = [None] * self.count
        dist.all_gather_object(answers, function(*args))
        return answers


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_leader() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def crew(count: int | None, *, timeout: float = 3600.0) -> Ranks | Joined:
    """The ranks to run on: those of torchrun if it started us, else `count` local ones.

    The timeout is for a rank lost in computing; one that waits for another in vain fails by that collective's own.
    """
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if count is not None and count != size:
            raise InvalidInput(f"--ranks {count} under a torchrun of {size} processes; leave --ranks out or make them agree")
        return Joined()
    if count is None:
        raise InvalidInput("how many ranks? give --ranks N, or start under torchrun")
    if count < 1:
        raise InvalidInput(f"--ranks {count}; use at least 1")
    return Ranks(count, timeout=timeout)


def share(ranks: Ranks | Joined, compute: Callable[[], T]) -> T:
    """A value the leader computes and everyone gets; with local ranks, simply the value."""
    if isinstance(ranks, Ranks):
        return compute()
    import torch.distributed as dist

    box: list[Any] = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    value: T = box[0]
    return value


def check_count(plan: Plan, count: int) -> None:
    """Refuse to run a plan on another number of ranks than it was made for."""
    if plan.size != count:
        what = f"the plan's {len(plan.stages)} stages have" if plan.stages else f"the plan's mesh {plan.mesh} has"
        raise InvalidInput(f"{what} {plan.size} ranks, {count} are asked to run it; "
                           f"use {plan.size} ranks or plan for {count} devices")  # fmt: skip
