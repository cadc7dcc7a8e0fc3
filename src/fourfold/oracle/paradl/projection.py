"""ParaDL as a cost model for Fourfold's plans: its formulas' inputs taken from a graph, the prices of kernels and a cluster.

`projected` takes the plan of a named strategy, `project_named` the strategy's text. The result's `breakdown` has the terms
of an estimate, in seconds of one step; `epoch_seconds(D)` is an epoch's time, `memory_bytes` one device's, `limit` the most
devices.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

from fourfold.errors import Infeasible, InvalidInput
from fourfold.graph import Graph
from fourfold.oracle.paradl.formulas import FORMULAS, Inputs, Projection, Wire, project
from fourfold.oracle.paradl.layers import Layer, layers_of
from fourfold.oracle.prices.prices import Prices
from fourfold.oracle.prices.traffic import traffic
from fourfold.oracle.time.stage_comm import groups_along
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.spec.plan import Plan
from fourfold.plans.strategies.composition import Options
from fourfold.plans.strategies.named import named

DELTA = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2}
"""Bytes of a number by precision. ParaDL has one for all; weights in fp32 beside activations in bf16 are beyond it."""


def projected(graph: Graph, plan: Plan, prices: Prices, *, optimizer: str = "sgd") -> Projection:
    """A named strategy's plan by ParaDL's formulas, their inputs taken from the graph, the kernels' prices and the cluster.

    K is priced on one device with the batch of one replica; |y_l| of exchanges are those of convolutions and products with
    weights. Plans by hand, with ZeRO or recomputation, and strategies ParaDL does not have are refused.
    """
    name, reason = _strategy(plan), _beyond(plan)
    if reason:
        raise InvalidInput(f"ParaDL's cost model has no {reason}; it has {', '.join(FORMULAS)}: leave the rest to the replay")
    if plan.size > prices.cluster.size:
        raise Infeasible(
            f"the plan needs {plan.size} devices, cluster {prices.cluster.name!r} has {prices.cluster.size}; "
            "plan for fewer or ask for more"
        )
    inputs = inputs_of(graph, plan, prices, optimizer=optimizer)
    return replace(project(name, inputs, capacity=prices.cluster.memory(0)), notes=plan.notes)


def _strategy(plan: Plan) -> str:
    return plan.strategy.partition(":")[0]


def _beyond(plan: Plan) -> str:
    """What of a plan the formulas do not know."""
    name = _strategy(plan)
    if name not in FORMULAS:
        return f"strategy '{plan.strategy}'"
    if plan.zero or plan.recompute or plan.passes:
        return "ZeRO, recomputation or passes"
    if name != "pipeline" and (plan.stages or plan.microbatches > 1):
        return f"stages or micro-batches under {name}"
    if name == "pipeline" and plan.size != len(plan.parts):
        return f"pipeline of {len(plan.parts)} stages on {plan.size} devices, only of one stage a device"
    return ""


def project_named(
    graph: Graph,
    strategy: str,
    *,
    devices: int,
    batch: int,
    prices: Prices,
    optimizer: str = "sgd",
    options: Options | None = None,
) -> Projection:
    """As `projected`, from a strategy's text (``data+filter:model=4``); `epoch_seconds(D)` of the result is an epoch's time."""
    plan = named(strategy, graph, ranks=devices, batch=batch, options=options)
    return projected(graph, plan, prices, optimizer=optimizer)


def inputs_of(graph: Graph, plan: Plan, prices: Prices, *, optimizer: str = "sgd") -> Inputs:
    """What the formulas read, of one plan on one cluster."""
    if _strategy(plan) == "pipeline":
        layers = layers_of(graph, plan.sizes[0], prices, optimizer=optimizer)
        borders = [_wire(prices, (pair,)) for pair in pairwise(stage.ranks[0] for stage in plan.parts)]
        wire = max(borders, key=lambda wire: (wire.beta, wire.alpha), default=Wire())
        return Inputs(
            layers=layers,
            batch=plan.batch,
            delta=DELTA[prices.precision],
            segments=plan.microbatches,
            whole=wire,
            groups=_staged(graph, layers, plan),
        )
    p1 = plan.mesh.extent("data") if "data" in plan.mesh.names else 1
    return Inputs(
        layers=layers_of(graph, max(plan.batch // p1, 1), prices, optimizer=optimizer),
        batch=plan.batch,
        p1=p1,
        p2=plan.mesh.size // p1,
        delta=DELTA[prices.precision],
        whole=_along(prices, plan.mesh, plan.mesh.names),
        data=_along(prices, plan.mesh, tuple(a for a in plan.mesh.names if a == "data")),
        model=_along(prices, plan.mesh, tuple(a for a in plan.mesh.names if a != "data")),
    )


def _staged(graph: Graph, layers: tuple[Layer, ...], plan: Plan) -> tuple[tuple[Layer, ...], ...]:
    """The layers of each stage."""
    at = {op.path: k for k, op in enumerate(graph.ops)}
    begins = [0, *(at[stage.first] for stage in plan.parts[1:])]
    stages = [bisect_right(begins, at[layer.path]) - 1 for layer in layers]
    return tuple(tuple(one for one, s in zip(layers, stages, strict=True) if s == k) for k in range(len(begins)))


def _along(prices: Prices, mesh: Mesh, axes: tuple[str, ...]) -> Wire:
    return _wire(prices, groups_along(mesh, tuple(range(mesh.size)), axes))


def _wire(prices: Prices, groups: tuple[tuple[int, ...], ...]) -> Wire:
    """alpha and beta of the slowest of several groups at once: one link for each at a border, shared where groups share it."""
    channels = traffic(prices.cluster, groups).channels
    return Wire(max(c.latency for c in channels), max(c.border for c in channels))


__all__ = ["Inputs", "Projection", "Wire", "inputs_of", "project", "project_named", "projected"]
