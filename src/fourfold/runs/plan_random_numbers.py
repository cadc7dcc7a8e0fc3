"""Eager PyTorch with the random numbers of a plan, so that one can be compared with the other.

A split run draws masks from seed, step, op and index; torch draws them from its generator. Within `PlanRandomNumbers`
the module runs as the user wrote it, but each op that draws random numbers gets those that the captured op of the same
place draws on one rank. The ops are met where torch.export meets them, before autograd takes them apart (PreDispatch), so
that both lists have the same ops. Where they do not (an op whose result nobody uses is not captured, checkpointing draws
again in backward), `RandomOpsDiffer` is raised.

In float64 it also does what the program does: a cast to float32 by name becomes one to float64, and what is float32 is
widened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.graph import Dtype, Graph, Op
from fourfold.graph.spec import map_leaves
from fourfold.plans import Mesh, Plan, lower_plan
from fourfold.plans.lowering.program import Compute
from fourfold.runtime.comm.world import World
from fourfold.runtime.kernels import Randomness, RankContext, build

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class RandomOpsDiffer(Exception):
    """Eager and captured graph do not draw in the same places."""


class PlanRandomNumbers(SchemaCheckMode):
    """One of the three kinds of mode that torch admits at PreDispatch; nothing of the schema check is used."""

    def __init__(
        self, graph: Graph, batch: int, microbatches: int, dtypes: Mapping[str, torch.dtype], device: torch.device
    ) -> None:
        TorchDispatchMode.__init__(self, _dispatch_key=torch._C.DispatchKey.PreDispatch)
        mesh = Mesh.of(data=1)
        plan = Plan(graph=graph.hash, batch=batch, mesh=mesh, microbatches=microbatches)
        self.sizes = plan.sizes
        self.randomness = Randomness(exact=True)
        self.dtypes = {getattr(torch, name): dtype for name, dtype in dtypes.items()}
        local = RankContext(World(mesh, rank=0, device=device), self.randomness, dict(dtypes))
        (part,) = lower_plan(graph, plan).parts
        self._kernels = {
            size: [(s.op, build(s, local)) for s in program.steps if isinstance(s, Compute) and draws(s.op)]
            for size, program in part.programs.items()
        }
        self._left: list[tuple[Op, Any]] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Forward and backward of one step."""
        self.randomness.step = number
        self.microbatch(0)
        with enable_python_dispatcher(), self:
            yield

    def microbatch(self, number: int) -> None:
        """The ops of a micro-batch's forward come next."""
        self.randomness.microbatch = number
        size = self.sizes[number]
        self._left = list(self._kernels[size if size in self._kernels else 0])

    def forward_done(self) -> None:
        if self._left:
            raise RandomOpsDiffer(f"{len(self._left)} captured random ops were not met")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with no_python_dispatcher():
            if self.dtypes:
                args, kwargs = pytree.tree_map(self._wide if not func._schema.is_mutable else self._dtype, (args, kwargs))
            seeded = torch.Tag.nondeterministic_seeded in func.tags
            if not draws_as_called(func._schema.name.split("::")[1].removesuffix("_"), args, kwargs, seeded=seeded):
                return func(*args, **kwargs)
            return self._drawn(func, args, kwargs)

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        _, name, variant = str(func).split(".")
        functional = f"aten.{name.removesuffix('_')}.{variant}"
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._left or (self._left[0][0].target, len(self._left[0][0].operands)) != (functional, len(tensors)):
            raise RandomOpsDiffer(f"{func} of {len(tensors)} tensors is not the next captured random op")
        _, run = self._left.pop(0)
        result = run(*tensors)
        return args[0].copy_(result) if func._schema.is_mutable else result

    def _dtype(self, leaf: Any) -> Any:
        return self.dtypes.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    def _wide(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dtype in self.dtypes:
            return leaf.to(self.dtypes[leaf.dtype])
        return self._dtype(leaf)


def draws(op: Op) -> bool:
    """Whether a captured op draws random numbers, dropout off or at zero being none."""
    return draws_as_called(op.target.split(".")[1], op.args, op.kwargs, seeded=op.random)


def draws_as_called(name: str, args: Any, kwargs: Mapping[str, Any], *, seeded: bool) -> bool:
    if name.endswith("dropout"):
        return bool(args[2]) and args[1] != 0
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0))
    if name in _RECURRENT:
        return bool(args[5]) and bool(args[6])
    return seeded


def casts(op: Op) -> bool:
    """Whether a captured op names a floating-point dtype narrower than float64, or a complex one of such."""
    found: list[str] = []
    map_leaves((op.args, op.kwargs), lambda leaf: found.append(leaf.name) if isinstance(leaf, Dtype) else None)
    return any(name.startswith(("float", "bfloat", "complex")) and name not in ("float64", "complex128") for name in found)
