"""A program's backward on one rank with blocks of memory instead of numbers: its list, with what forward wrote down of each op.

An op makes the gradients of its operands while it still has what it kept and the gradient it was given, then lets go of both.
Two gradients of one tensor are added in place if nobody else holds the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fourfold.oracle.memory.allocator import Allocator, Block
from fourfold.oracle.memory.device_rules import DeviceRules
from fourfold.plans.layout.mesh import Coords
from fourfold.plans.lists.actions import Action, Back, Rerun
from fourfold.plans.lists.result_layout import Strided


@dataclass(eq=False, slots=True)
class Var:
    """A tensor that has a gradient: the gradient, once it comes; `leaf`: it stays; `ends`: the tape ends here, as at leaves,
    and a gradient that is a strided part of another is copied."""

    leaf: bool = False
    ends: bool = False
    size: int = 0
    grad: Block | None = None
    turn: int = -1  # of a leaf: the backward that last added to its gradient


@dataclass(eq=False, slots=True)
class Tensor:
    """A slot's content."""

    block: Block
    lies: Strided
    item: int
    var: Var | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.lies.shape) * self.item


Env = dict[str, Tensor]


@dataclass(eq=False, slots=True)
class Node:
    """One op of the tape: the variables it read and made, the blocks it keeps, and its backward. `source`: the step, or the
    segment, that it is of; None for what no list names (the cutting and joining of passes)."""

    source: object
    name: str
    ins: list[Var | None]
    outs: list[Var]
    saved: list[Block]
    backward: Callable[[list[Block]], list[Block | None]]


@dataclass(eq=False, kw_only=True)
class BackwardMemory:
    """One rank's heap and the list of ops whose backward is to come."""

    heap: Allocator
    rank: int
    coords: Coords
    machine: DeviceRules
    nodes: list[Node] = field(default_factory=list)
    pending: list[Node] = field(default_factory=list)  # whose backward is to come
    turn: int = 0  # counts backwards

    def backward(self, nodes: list[Node], actions: Sequence[Action]) -> None:
        """The list of a backward, on what one forward wrote down; its outputs' gradients are there."""
        self.turn += 1
        self.pending = nodes
        for action in actions:
            if isinstance(action, Back):
                self._run_until(action.step)
                self.act(action.before)
                self._run(self.pending.pop())
                self.act(action.after)
            elif isinstance(action, Rerun):
                self._run_until(action.segment)
                self._run(self.pending.pop())
            else:
                self.act((action,))
        while self.pending:
            self._run(self.pending.pop())

    def act(self, actions: Sequence[Action]) -> None:
        """What a list says beside backwards."""
        raise NotImplementedError

    def _run_until(self, source: object) -> None:
        """The backwards that come before that of a step or a segment: no list names the cutting and joining of passes, nor what
        no gradient comes to."""
        while self.pending[-1].source is not source:
            self._run(self.pending.pop())

    def _run(self, node: Node) -> None:
        self.heap.now = f"backward of {node.name}"
        given = [var.grad for var in node.outs if var.grad is not None]
        if not given:
            self._release(node)
            return
        made = node.backward(given)
        self._release(node)
        for var in node.outs:
            if var.grad is not None:
                self.heap.drop(var.grad)
                var.grad = None
        for target, block in zip(node.ins, made, strict=False):
            if target is not None and block is not None:
                self.accumulate(target, block)

    def _release(self, node: Node) -> None:
        for block in node.saved:
            if not block.gathered:
                self.heap.drop(block)
        node.saved = []

    def accumulate(self, var: Var, block: Block) -> None:
        """Add a gradient to a variable's."""
        self._add(var, block)
        var.turn = self.turn

    def _add(self, var: Var, block: Block) -> None:
        if var.grad is None:
            if var.leaf and block.holders > 1:
                new = self.heap.take(block.size, "gradients")
                self.heap.drop(block)
                block = new
            var.grad = block
        elif var.leaf:  # of the same backward it may be a view, and then the sum is new; else added in place
            self.heap.pass_through(var.size if var.turn == self.turn else 0, "gradients")
            self.heap.drop(block)
        elif var.grad.holders == 1:
            self.heap.drop(block)
        else:
            new = self.heap.take(max(block.size, var.size), "backward")
            self.heap.drop(block)
            self.heap.drop(var.grad)
            var.grad = new
