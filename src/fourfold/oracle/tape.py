"""A program's backward on one rank with blocks of memory instead of numbers, from a list of what its forward did.

Backward goes through that list from its end, as autograd's engine does: an op makes the gradients of its operands while it
still has what it kept and the gradient it was given, then lets go of both. Two gradients of one tensor are added in place
if nobody else holds the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fourfold.oracle.heap import Block, Heap
from fourfold.oracle.machine import Machine
from fourfold.oracle.results import Strided
from fourfold.plans.mesh import Coords


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
    """One op of the tape: the variables it read and made, the blocks it keeps, and its backward."""

    name: str
    ins: list[Var | None]
    outs: list[Var]
    saved: list[Block]
    backward: Callable[[list[Block]], list[Block | None]]


@dataclass(eq=False)
class Tape:
    """One rank's heap and the list of ops whose backward is to come."""

    heap: Heap
    rank: int
    coords: Coords
    machine: Machine
    nodes: list[Node] = field(default_factory=list)
    turn: int = 0  # counts backwards

    def backward(self, nodes: list[Node]) -> None:
        """Through the ops of one forward, from the last; their outputs' gradients are there."""
        self.turn += 1
        self._run(nodes)

    def _run(self, nodes: list[Node]) -> None:
        for node in reversed(nodes):
            self.heap.now = f"backward of {node.name}"
            given = [var.grad for var in node.outs if var.grad is not None]
            if not given:
                self._release(node)
                continue
            self._refill(node)
            made = node.backward(given)
            self._release(node)
            for var in node.outs:
                if var.grad is not None:
                    self.heap.drop(var.grad)
                    var.grad = None
            for target, block in zip(node.ins, made, strict=False):
                if target is not None and block is not None:
                    self.accumulate(target, block)

    def _refill(self, node: Node) -> None:
        """Gather the weights that this op's backward reads, where they are not here."""
        for block in node.saved:
            note = block.gathered
            if note is not None and note.full is None:
                note.full = note.fetch() if note.fetch is not None else self.heap.take(note.size, "gathered weights")

    def _release(self, node: Node) -> None:
        for block in node.saved:
            if block.gathered is None:
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
