"""The named strategies, each a recipe from graph and rank count to a `Plan`.

A strategy names the mesh, how inputs come in, and what anchors (convolutions, products, attention, look-ups) do;
everything else follows. Layers too thin for an axis run replicated if they carry little of the work, otherwise the
strategy is refused with the layer's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fourfold.errors import Infeasible, InvalidInput, nearest
from fourfold.graph import Graph, Op
from fourfold.ops.nest import Nest, nest_of
from fourfold.plans.layout.mesh import Mesh, divisors
from fourfold.plans.lowering.dim_hints import domain_dims
from fourfold.plans.lowering.lower import lower
from fourfold.plans.lowering.op_layouts import OpLayouts
from fourfold.plans.spec.plan import Passes, Plan
from fourfold.plans.strategies.composition import STAGES_PER_RANK, Options, composed_plan

LIGHT = 0.05
"""A layer with less than this share of the FLOPs may run replicated when it is too thin to split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRequest:
    """The arguments of a recipe."""

    graph: Graph
    ranks: int
    batch: int
    options: Mapping[str, int]
    name: str

    def option(self, name: str, default: int) -> int:
        return self.options.get(name, default)


Recipe = Callable[[StrategyRequest], Plan]


def parse(text: str) -> tuple[str, dict[str, int]]:
    """``splitbrain:k=2`` -> name and options."""
    name, _, rest = text.partition(":")
    if name not in STRATEGIES:
        raise InvalidInput(f"unknown strategy '{name}'{nearest(name, STRATEGIES)}; known: {', '.join(STRATEGIES)}")
    options: dict[str, int] = {}
    allowed = STRATEGIES[name][1]
    for item in filter(None, rest.split(",")):
        key, eq, value = item.partition("=")
        if key not in allowed:
            raise InvalidInput(
                f"strategy {name} has no option '{key}'{nearest(key, allowed)}; it takes {', '.join(allowed) or 'none'}"
            )
        if not eq or not value.isdigit() or int(value) < 1:
            raise InvalidInput(f"strategy option {item!r} needs a positive whole number, as in {key}=2")
        options[key] = int(value)
    return name, options


def named(text: str, graph: Graph, *, ranks: int, batch: int, model: str = "", options: Options | None = None) -> Plan:
    """The plan of a named strategy. `options` go before what its own text says."""
    if ranks < 1:
        raise InvalidInput(f"{ranks} ranks asked for; use at least 1")
    name, given = parse(text)
    own = Options(stages=given.pop("stages", None), microbatches=given.pop("microbatches", None))
    asked = options or Options()
    chosen = replace(own, **{f.name: value for f in fields(Options) if (value := getattr(asked, f.name)) is not None})
    if name == "fsdp":
        chosen = replace(chosen, zero=3 if chosen.zero is None else chosen.zero)
    inside = "data" if name == "fsdp" else name.removesuffix("pipeline").removesuffix("+")

    def base(count: int, size: int) -> Plan:
        if not inside:
            return Plan(graph=graph.hash, batch=size, mesh=Mesh.of(data=count), inputs={"data": "batch"})
        return STRATEGIES[inside][0](StrategyRequest(graph=graph, ranks=count, batch=size, options=given, name=text))

    stages = chosen.stages or (_stages(ranks, chosen.schedule, whole=not inside) if name.endswith("pipeline") else 1)
    plan = composed_plan(base, graph, ranks=ranks, batch=batch, stages=stages, options=chosen)
    return replace(plan, strategy=text, model=model)


def _stages(ranks: int, schedule: str | None, *, whole: bool) -> int:
    """How many stages a pipeline has if nothing is said: one per rank or, with another split inside, about the root."""
    places = ranks if whole else next(d for d in (_divisor_near_root(ranks), 2) if d < ranks or ranks < 3)
    return places * (STAGES_PER_RANK if schedule == "interleaved" else 1)


def _plan(request: StrategyRequest, mesh: Mesh, **fields: Any) -> Plan:
    return Plan(graph=request.graph.hash, batch=request.batch, mesh=mesh, **fields)


def _two_axes(request: StrategyRequest, first: str, second: str, inner: int | None = None) -> Mesh:
    """``data`` outside, the other axis inside: by default the divisor nearest the square root, at least two."""
    ranks = request.ranks
    size = inner or _divisor_near_root(ranks)
    if ranks % size:
        raise InvalidInput(f"{ranks} ranks cannot be cut into groups of {size}; use one of {divisors(ranks)}")
    return Mesh(((first, ranks // size), (second, size)))


def _divisor_near_root(ranks: int) -> int:
    return min(divisors(ranks)[1:] or [1], key=lambda d: (abs(math.log(d) - math.log(ranks) / 2), d))


class _Chooser:
    """Splits each anchor along one axis by the first preferred split that it has, and records the choices."""

    def __init__(
        self,
        request: StrategyRequest,
        mesh: Mesh,
        axis: str,
        prefer: Callable[[Op, Nest], tuple[str, ...]],
        *,
        keep: Callable[[Nest, str | None], bool],
    ) -> None:
        self.mesh, self.axis, self.prefer, self.keep = mesh, axis, prefer, keep
        concrete = request.graph.at(request.batch)
        self.total = sum(nest_of(op, concrete).flops for op in concrete.ops) or 1
        self.chosen: dict[str, str] = {}
        self.notes: list[str] = []

    def __call__(self, op: Op, nest: Nest, splits: dict[str, str], placement: OpLayouts) -> dict[str, str] | None:
        extent, loop = self.mesh.extent(self.axis), placement.choice[self.axis]
        if extent == 1:
            return None
        if self.keep(nest, loop):
            self._remember(op, nest, loop)
            return None
        thin: list[str] = []
        for split in self.prefer(op, nest):
            sizes = [loop.size // loop.unit // loop.outer for loop in nest.loops_with_label(split)]
            if sizes and (max(sizes) >= extent or split.startswith(("batch", "domain"))):
                self.chosen[op.path] = split
                return {**splits, self.axis: split}
            if sizes:
                thin.append(f"{max(sizes)} {split}s")
        if thin and nest.flops > LIGHT * self.total:
            raise Infeasible(
                f"{op.path} has {' and '.join(thin)}, fewer than the {extent} ranks of axis {self.axis}, and does "
                f"{nest.flops / self.total:.0%} of the work; use fewer ranks or another split"
            )
        if thin:
            self.notes.append(f"{op.path}: {' and '.join(thin)} for {extent} ranks, runs on all of them")
        self.chosen[op.path] = "replicate"
        return {**splits, self.axis: "replicate"}

    def _remember(self, op: Op, nest: Nest, loop: str | None) -> None:
        """Record a split of heads that is kept: it may follow from a consumer, and the plan alone would not reproduce it."""
        if _keep_shared(nest, loop):
            labels = next(known.labels for known in nest.loops if known.name == loop)
            if labels:
                self.chosen[op.path] = labels[0]


def _keep_shared(nest: Nest, loop: str | None) -> bool:
    """Keep a split along a loop that both factors of a product have (heads, windows, groups): it needs no exchange."""
    if len(nest.operands) < 2 or not any(known.name == loop and known.kind == "map" for known in nest.loops):
        return False
    return all(any(loop in terms for terms in dims) for dims in nest.operands[:2])


def _plan_by_anchors(
    request: StrategyRequest,
    mesh: Mesh,
    axis: str,
    prefer: Callable[[Op, Nest], tuple[str, ...]],
    inputs: Mapping[str, str],
    keep: Callable[[Nest, str | None], bool] = _keep_shared,
) -> Plan:
    """Lower the graph once, choose a split for each anchor, and turn the choices into rules of a plan."""
    chooser = _Chooser(request, mesh, axis, prefer, keep=keep)
    lower(request.graph, _plan(request, mesh, inputs=inputs), chooser)
    splits = tuple((path, {axis: split}) for path, split in chooser.chosen.items())
    return _plan(request, mesh, inputs=inputs, splits=splits, notes=tuple(chooser.notes))


def _tied_embeddings(graph: Graph) -> set[str]:
    """Look-ups whose table is also the weight of a product: they are divided along the vocabulary."""
    tables = {op.name: op.operands[0] for op in graph.ops if op.target.startswith("aten.embedding")}
    return {name for name, table in tables.items() if len(graph.consumers[table]) > 1}


def _by_filter(graph: Graph) -> Callable[[Op, Nest], tuple[str, ...]]:
    tied = _tied_embeddings(graph)
    return lambda op, nest: (
        ("channel", "filter")
        if op.name in tied
        else ("filter", "batch")
        if not nest.loops_with_label("filter")
        else ("filter",)
    )


def _by_channel(graph: Graph) -> Callable[[Op, Nest], tuple[str, ...]]:
    return lambda op, nest: ("channel", "filter") if nest.loops_with_label("channel") else ("filter",)


def _data(request: StrategyRequest) -> Plan:
    return _plan(request, Mesh.of(data=request.ranks), inputs={"data": "batch"})


def _filter(request: StrategyRequest) -> Plan:
    mesh = Mesh.of(model=request.ranks)
    return _plan_by_anchors(request, mesh, "model", lambda op, nest: _without_batch(_by_filter(request.graph)(op, nest)), {})


def _without_batch(splits: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(s for s in splits if s != "batch")


def _channel(request: StrategyRequest) -> Plan:
    return _plan_by_anchors(request, Mesh.of(model=request.ranks), "model", _by_channel(request.graph), {})


def _data_filter(request: StrategyRequest) -> Plan:
    mesh = _two_axes(request, "data", "model", request.options.get("model"))
    prefer = _by_filter(request.graph)
    return _plan_by_anchors(request, mesh, "model", lambda op, nest: _without_batch(prefer(op, nest)), {"data": "batch"})


def _data_channel(request: StrategyRequest) -> Plan:
    mesh = _two_axes(request, "data", "model", request.options.get("model"))
    return _plan_by_anchors(request, mesh, "model", _by_channel(request.graph), {"data": "batch"})


def _domains(graph: Graph, batch: int) -> dict[str, int]:
    """``domain:i`` -> size, of the first input that has a domain."""
    concrete = graph.at(batch)
    for name in graph.inputs:
        found = domain_dims(concrete, name)
        if found:
            return {label: concrete.values[name].shape[dim] for label, dim in found.items()}
    raise Infeasible("no input has a domain dim (rows, slabs or positions) to split; use data, filter or channel")


def _keep_map(nest: Nest, loop: str | None) -> bool:
    """Keep what an anchor follows, unless it would have to add up a contraction or gather everything."""
    return loop is not None and nest.loop(loop).kind == "map"


def _spatial_plan(request: StrategyRequest, mesh: Mesh, axes: Mapping[str, str], data: Mapping[str, str]) -> Plan:
    """Domain where it lasts; from the head on, gathered and divided by filter."""
    sizes = _domains(request.graph, request.batch)
    for axis, label in axes.items():
        if label not in sizes:
            raise Infeasible(f"the inputs have no {label}; they have {', '.join(sizes)}")
        if sizes[label] < mesh.extent(axis):
            raise Infeasible(
                f"the inputs' {label} has {sizes[label]} rows, axis {axis} has {mesh.extent(axis)} ranks; "
                f"use at most {sizes[label]}"
            )
    inputs = {**data, **axes}
    plan = _plan(request, mesh, inputs=inputs)
    for axis in axes:
        chooser = _Chooser(request, mesh, axis, lambda op, nest: ("filter",), keep=_keep_map)
        lower(request.graph, plan, chooser)
        rules = tuple((path, {axis: split}) for path, split in chooser.chosen.items())
        plan = replace(plan, splits=(*plan.splits, *rules), notes=(*plan.notes, *chooser.notes))
    return plan


def _spatial_axes(request: StrategyRequest) -> tuple[tuple[str, int], ...]:
    """Sizes of the domain axes, from options d0, d1, d2 or all ranks on domain:0."""
    given = {label: request.options[label] for label in ("d0", "d1", "d2") if label in request.options}
    return tuple(given.items())


def _spatial(request: StrategyRequest) -> Plan:
    given = _spatial_axes(request) or (("d0", request.ranks),)
    mesh = Mesh(tuple((f"space{label[1]}" if len(given) > 1 else "space", size) for label, size in given))
    if mesh.size != request.ranks:
        raise InvalidInput(f"spatial over {mesh} needs {mesh.size} ranks, {request.ranks} given")
    axes = {name: f"domain:{label[1]}" for (label, _), name in zip(given, mesh.names, strict=True)}
    return _spatial_plan(request, mesh, axes, {})


def _data_spatial(request: StrategyRequest) -> Plan:
    mesh = _two_axes(request, "data", "space", request.options.get("space"))
    return _spatial_plan(request, mesh, {"space": "domain:0"}, {"data": "batch"})


def _splitbrain(request: StrategyRequest) -> Plan:
    """Convolutions by batch on both axes, fully-connected layers by filter within groups of k, in k passes."""
    mesh = _two_axes(request, "data", "model", request.options.get("k"))
    inputs = {"data": "batch", "model": "batch"}
    prefer = lambda op, nest: ("filter",)  # noqa: E731
    plan = _plan_by_anchors(
        request, mesh, "model", prefer, inputs, keep=lambda nest, loop: not _is_product(nest) and loop is not None
    )
    heavy = [path for path, by_axis in plan.splits if by_axis["model"] == "filter"]
    count = request.option("passes", mesh.extent("model"))
    if not heavy or count == 1 or mesh.extent("model") == 1:
        return plan
    passes = _run_of_products(request.graph, heavy, count)
    trial = replace(plan, passes=passes)
    try:
        lower(request.graph, trial)
    except Infeasible as reason:
        return replace(plan, notes=(*plan.notes, f"one pass: {reason}"))
    return trial


def _is_product(nest: Nest) -> bool:
    return nest.kernel in ("linear", "addmm", "embedding") or any(loop.name == "m" for loop in nest.loops)


def _run_of_products(graph: Graph, heavy: list[str], count: int) -> tuple[Passes, ...]:
    """The last stretch of the graph from its first divided product to its last."""
    paths = [op.path for op in graph.ops]
    return (Passes(first=min(heavy, key=paths.index), last=max(heavy, key=paths.index), count=count, axis="model"),)


def _grid(request: StrategyRequest) -> Plan:
    """Pr x Pc: each layer by filter or by domain on the model axis, whichever the integrated paper's rule says moves less."""
    pr = request.options.get("pr") or (request.ranks // request.options["pc"] if "pc" in request.options else None)
    mesh = _two_axes(request, "data", "model", pr)
    if "pc" in request.options and mesh.extent("data") != request.options["pc"]:
        raise InvalidInput(f"grid {mesh.extent('model')} x {request.options['pc']} does not make {request.ranks} ranks")
    concrete = request.graph.at(request.batch)
    domains = bool(domain_dims(concrete, request.graph.inputs[0]))
    inputs = {"data": "batch", **({"model": "domain:0"} if domains else {})}

    def prefer(op: Op, nest: Nest) -> tuple[str, ...]:
        if nest.kernel == "conv" and domains and not _model_wins(op, concrete):
            return ("domain:0", "filter")
        return _by_filter(request.graph)(op, nest)

    return _plan_by_anchors(request, mesh, "model", prefer, inputs)


def _model_wins(op: Op, graph: Graph) -> bool:
    """``2 |W| > B (d_out + 2 d_in)`` (arXiv 1712.04432): gradients cost more than activations."""
    x, w, y = (graph.values[name].numel for name in (op.operands[0], op.operands[1], op.results[0]))
    return 2 * w > y + 2 * x


STRATEGIES: dict[str, tuple[Recipe, tuple[str, ...]]] = {
    "data": (_data, ()),
    "filter": (_filter, ()),
    "channel": (_channel, ()),
    "spatial": (_spatial, ("d0", "d1", "d2")),
    "data+filter": (_data_filter, ("model",)),
    "data+channel": (_data_channel, ("model",)),
    "data+spatial": (_data_spatial, ("space",)),
    "splitbrain": (_splitbrain, ("k", "passes")),
    "grid": (_grid, ("pr", "pc")),
    "pipeline": (_data, ("stages", "microbatches")),
    "data+pipeline": (_data, ("stages", "microbatches")),
    "filter+pipeline": (_filter, ("stages", "microbatches")),
    "spatial+pipeline": (_spatial, ("stages", "microbatches", "d0", "d1", "d2")),
    "fsdp": (_data, ()),
}
