"""The actions of a stage's lists: what a forward, a backward or the end of a step consists of, in order. `stage_list` makes
the lists; the replay of time, the replay of memory and the executor follow them.

In a forward list, ops and exchanges are the steps of the program themselves (`Compute`, `Move`). A backward list has a `Back`
for each step whose backward autograd runs. `flat` turns either into one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fourfold.plans.layout.exchange import ExchangeStep
from fourfold.plans.lists.comm_batches import Bucket
from fourfold.plans.lists.paths import Path
from fourfold.plans.lowering.program import Compute, Move, Repeat


@dataclass(frozen=True, slots=True, eq=False)
class Bunch:
    """Divided weights (ZeRO-3) that travel in one message; or, with `gradients`, their gradients. `steps`: the exchange of
    each."""

    key: str
    moves: tuple[Move, ...]
    steps: tuple[ExchangeStep, ...]
    gradients: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return self.steps[0].axes


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """The exchange that brings one pass its examples."""

    key: str
    move: Move
    number: int  # of the pass

    @property
    def axes(self) -> tuple[str, ...]:
        return self.move.exchange.steps[-1].axes


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a message; what follows overlaps with it."""

    message: Bunch | Bucket | Opening


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until a message has arrived."""

    message: Bunch | Opening


@dataclass(frozen=True, slots=True)
class Fetch:
    """Take a gathered weight out of a message that has arrived or, without one, copy it from shared memory."""

    move: Move
    source: Bunch | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Free a gathered weight."""

    move: Move


@dataclass(frozen=True, slots=True)
class Give:
    """Pass on the gradient of a gathered weight: to shared memory or into a message, which waits for its other members."""

    move: Move
    target: Bunch | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """Wait for the oldest messages with gradients of weights until at most so many are under way."""

    most: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop slots that nobody reads any more."""

    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until all ranks of the stage are here: what one has written in shared memory, the others may read, or overwrite."""


@dataclass(frozen=True, slots=True, eq=False)
class RunPasses:
    """The bodies of a `Repeat`, one per pass."""

    step: Repeat
    bodies: tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class RunSegment:
    """Actions whose activations are dropped and computed again. `again`: the second run, which gathers weights one by one.

    `given`: the slots it reads; `spent`: those of them that nobody reads later; `buffers`: those that it would update twice;
    `results`: the slots that others read.
    """

    actions: tuple[Action, ...]
    again: tuple[Action, ...]
    given: tuple[str, ...]
    results: tuple[str, ...]
    spent: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rerun:
    """Run a segment for the second time."""

    segment: RunSegment


@dataclass(frozen=True, slots=True)
class Back:
    """The backward of an op, or the adjoint of an exchange. `before`: done when it begins; `after`: done when it has ended."""

    step: Compute | Move
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum gradients of one dtype after backward, through memory that the ranks along the axes share."""

    names: tuple[str, ...]
    axes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Wait for the sums of gradients that are under way."""

    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer updates this rank's parameters, or its slices of them."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GatherSlices:
    """Gather updated slices of one dtype (ZeRO-1), `elements` of each rank at a time, in so many rounds."""

    names: tuple[str, ...]
    axes: tuple[str, ...]
    dtype: str
    elements: int
    rounds: int
    path: Path


Action = (
    Compute
    | Move
    | Launch
    | Await
    | Fetch
    | Release
    | Give
    | Limit
    | Free
    | Barrier
    | RunPasses
    | RunSegment
    | Rerun
    | Back
    | Sum
    | Complete
    | Update
    | GatherSlices
)
"""One element of a stage's list: an op, an exchange, a message or a wait. An entry of a rank's schedule
(`rank_schedule.StageAction`) refers to such a list; it was made from a cell of the plan's schedule
(`plans.spec.schedule.ScheduleCell`)."""


def flat(actions: Iterable[Action]) -> Iterator[Action]:
    """A list in one line: passes one after the other, what is done before and after a backward around it, segments as they
    run."""
    for action in actions:
        inner = _INNER.get(type(action))
        if inner is None:
            yield action
        else:
            yield from inner(action)


def _around(action: Any) -> Iterator[Action]:
    if action.before or action.after:
        yield from flat(action.before)
        yield Back(action.step)
        yield from flat(action.after)
    else:
        yield action


_INNER: dict[type, Callable[[Any], Iterator[Action]]] = {
    Back: _around,
    RunSegment: lambda action: flat(action.actions),
    Rerun: lambda action: flat(action.segment.again),
    RunPasses: lambda action: flat(inner for body in action.bodies for inner in body),
}
