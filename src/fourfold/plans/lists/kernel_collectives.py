"""The collectives inside kernels: what the ranks that divide a statistic tell each other while one op runs.

A norm whose rows are divided gathers means and variances, a softmax the largest numbers and the sums, a loss the count that
it divides by. `collectives_inside` lists them for one rank, forward or backward, in the order in which `runtime.kernels`
calls them; the names are those of the kernels there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from fourfold.ops.loss import MEAN
from fourfold.ops.rule_tables import rule_for
from fourfold.plans.lists.saved_tensors import Shape, Share

INDEX_BYTES = 8  # of a place in a dim


@dataclass(frozen=True, slots=True)
class Inside:
    """One collective along some axes; `size`: bytes of this rank's row."""

    kind: Literal["all_reduce", "all_gather"]
    axes: tuple[str, ...]
    size: int


Rule = Callable[[Share, tuple[str, ...], bool], Iterator[Inside]]
"""From an op, the axes that divide its statistics, and whether it is the backward."""
_KERNELS: dict[str, Rule] = {}
_kernel = rule_for(_KERNELS)


def collectives_inside(share: Share, *, backward: bool) -> list[Inside]:
    """The collectives of an op's forward or backward on one rank."""
    joint = share.step.axes_of("joint")
    rule = _KERNELS.get(share.step.nest.kernel)
    found = rule(share, joint, backward) if rule is not None and (joint or share.step.axes_of("sum")) else ()
    return [inside for inside in found if inside.axes and inside.size]


def _one_row(share: Share, dims: tuple[int, ...]) -> int:
    """Bytes of the first operand with some dims reduced to one."""
    return _numel(share.operands[0], dims) * share.items[0]


def _numel(shape: Shape, reduced: tuple[int, ...]) -> int:
    return math.prod(size for d, size in enumerate(shape) if d not in reduced)


@_kernel("batch_norm")
def _batch_norm(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """Mean and variance of each channel; two sums of gradients."""
    yield Inside("all_reduce" if backward else "all_gather", joint, 2 * share.operands[0][1] * share.items[0])


@_kernel("layer_norm", "group_norm")
def _normalize(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """Mean and variance of each row; of an RMS norm one sum. Two sums of gradients."""
    step = share.step
    if step.nest.kernel == "group_norm":
        rows = share.operands[0][0] * len(step.loops["g"].at(share.coords))
    else:
        rows = math.prod(share.operands[0][: next(d for d, loop in enumerate(step.nest.loops) if loop.kind == "joint")])
    if joint and backward:
        yield Inside("all_reduce", joint, 2 * rows * share.items[0])
    elif joint and step.op.target.startswith("aten.rms"):
        yield Inside("all_reduce", joint, rows * share.items[0])
    elif joint:
        yield Inside("all_gather", joint, 2 * rows * share.items[0])


@_kernel("instance_norm")
def _instance_norm(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """As layer norm, along the axes that divide space; running statistics once more, then over samples too."""
    step, rows = share.step, math.prod(share.operands[0][:2])
    samples = tuple(axis for axis in joint if step.choice[axis] == "n")
    space = tuple(axis for axis in joint if axis not in samples)
    pair = 2 * rows * share.items[0]
    yield Inside("all_reduce" if backward else "all_gather", space, pair)
    if not backward and step.nest.loop("n").kind == "joint":  # there are running statistics
        yield Inside("all_gather", space, pair)
        yield Inside("all_reduce", samples, 2 * share.operands[0][1] * share.items[0])


@_kernel("softmax")
def _softmax(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """The largest numbers and the sums; backward one sum."""
    row = _one_row(share, (share.step.nest.detail["dim"] % len(share.operands[0]),))
    for _ in range(1 if backward else 2):
        yield Inside("all_reduce", joint, row)


@_kernel("extreme")
def _extreme(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """The largest numbers; backward how many are equal to them."""
    yield Inside("all_reduce" if backward else "all_gather", joint, _one_row(share, share.step.nest.detail["dims"]))


@_kernel("picked")
def _picked(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """The largest numbers and their places."""
    if not backward:
        yield from _values_and_places(share, joint, _numel(share.operands[0], share.step.nest.detail["dims"]))


def _values_and_places(share: Share, axes: tuple[str, ...], numel: int) -> Iterator[Inside]:
    yield Inside("all_gather", axes, numel * share.items[0])
    yield Inside("all_gather", axes, numel * INDEX_BYTES)


@_kernel("adaptive_max")
def _adaptive_max(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """Dim by dim from the last: where one is reduced to a single number, as `picked`."""
    step, shape = share.step, list(share.operands[0])
    for dim in reversed(range(2, len(shape))):
        (term,) = step.nest.operands[0][dim]
        shape[dim] = share.results[0][dim]
        own = tuple(axis for axis in joint if step.choice[axis] == term)
        if own and not backward:
            yield from _values_and_places(share, own, math.prod(shape))


@_kernel("moments")
def _moments(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """The sums, then the squared deviations."""
    for _ in range(0 if backward else 2):
        yield Inside("all_reduce", joint, _one_row(share, share.step.nest.detail["dims"]))


@_kernel("vector_norm")
def _vector_norm(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    if not backward:
        yield Inside("all_reduce", joint, _one_row(share, share.step.nest.detail["dims"]))


@_kernel("logsumexp")
def _logsumexp(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """The largest numbers, then the sums."""
    if not backward:
        row = _one_row(share, share.step.nest.detail["dims"])
        yield from (Inside("all_gather", joint, row), Inside("all_reduce", joint, row))


@_kernel("cross_entropy")
def _cross_entropy(share: Share, joint: tuple[str, ...], backward: bool) -> Iterator[Inside]:
    """Classes divided: the log-softmax where the operand is logits, then one sum for the targets' own classes and one for what
    smoothing adds. Samples divided: the count or weight that a mean divides by."""
    step, detail, row = share.step, share.step.nest.detail, _one_row(share, (1,))
    plain = detail["logits"] and not detail["smoothing"] and not detail["soft"]  # forward and backward in one function
    if joint and detail["logits"]:
        for _ in range(2 if not backward else 0 if plain else 1):
            yield Inside("all_reduce", joint, row)
    if backward:
        return
    for _ in range(1 + bool(detail["smoothing"] and not detail["soft"]) if joint else 0):
        yield Inside("all_reduce", joint, row)
    if detail["reduction"] == MEAN and not detail["soft"]:
        yield Inside("all_reduce", step.axes_of("sum"), share.items[0])
