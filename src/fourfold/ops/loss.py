"""Losses. Every shard sums its own terms and divides by the global denominator, so the scalar result is Partial."""

from __future__ import annotations

import math

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Kind, Loop, Nest, SavedExtra, rule

NONE, MEAN, SUM = 0, 1, 2
"""ATen's reduction codes."""

_SAVED: dict[str, tuple[int, ...]] = {"kl_div": (1,), "l1_loss": (), "poisson_nll_loss": (1,)}
"""The operands that some elementwise losses save; the others save all."""


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def cross_entropy(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "input target weight reduction ignore_index label_smoothing")
    x, target = call.shape("input"), call.shape("target")
    if len(x) < 2 or len(op.results) != 1:
        return None
    reduction = call.get("reduction", MEAN)
    kind: Kind = "map" if reduction == NONE else "sum"
    soft = call.spec("target").is_float
    loops = tuple(Loop(name=f"i{d}", size=size, kind="joint" if d == 1 else kind) for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    labels = dims if soft else tuple(d for i, d in enumerate(dims) if i != 1)
    operands = [dims, labels]
    if call["weight"] is not None:
        operands.append(((x[1],),))
    result: tuple[Dim, ...] = tuple(d for i, d in enumerate(dims) if i != 1) if reduction == NONE else ()
    logits, smooth = op.target.startswith("aten.cross"), bool(call.get("label_smoothing", 0.0))
    return Nest(
        loops=loops,
        operands=tuple(operands),
        results=(result,),
        kernel="cross_entropy",
        flops=6 * math.prod(x),
        saved=(*(() if logits else (0,)), *(() if soft and smooth else (1,)), *range(2, len(operands))),
        saved_extra=_saved_extra(dims, soft=soft, smooth=smooth) if logits else (),
        detail={
            "reduction": reduction,
            "weight": call["weight"] is not None,
            "soft": soft,
            "ignore": call.get("ignore_index", -100),
            "smoothing": call.get("label_smoothing", 0.0),
            "logits": logits,
            "rows": x[0],
            "targets": target,
        },
    )


def _saved_extra(dims: tuple[Dim, ...], *, soft: bool, smooth: bool) -> tuple[SavedExtra, ...]:
    """The log-softmax of the logits; with label smoothing, also the mixed targets or the mask of targets that count."""
    rows = tuple(d for i, d in enumerate(dims) if i != 1)
    more = (SavedExtra(dims),) if soft else (SavedExtra(rows, 1),)
    return (SavedExtra(dims), *(more if smooth else ()))


@rule(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy",
    "kl_div",
    "soft_margin_loss",
    "poisson_nll_loss",
)
def elementwise(op: Op, graph: Graph) -> Nest | None:
    names = {
        "binary_cross_entropy_with_logits": "input target weight pos_weight reduction",
        "binary_cross_entropy": "input target weight reduction",
        "poisson_nll_loss": "input target log_input full eps reduction",
    }
    name = op.target.split(".")[1]
    call = Call(op, graph, names.get(name, "input target reduction"))
    reduction = call.get("reduction", MEAN)
    shapes = [graph.values[name].shape for name in op.operands]
    width = max(len(s) for s in shapes)
    full = tuple(max(s[len(s) - width + d] for s in shapes if len(s) - width + d >= 0) for d in range(width))
    kind: Kind = "map" if reduction == NONE else "sum"
    loops = tuple(Loop(name=f"i{d}", size=size, kind=kind) for d, size in enumerate(full))

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        first = width - len(shape)
        return tuple((f"i{first + d}",) if size == full[first + d] else () for d, size in enumerate(shape))

    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops) if reduction == NONE else ()
    position = names.get(name, "input target reduction").split().index("reduction")
    log = name == "kl_div" and bool(op.kwargs.get("log_target", op.args[3] if len(op.args) > 3 else False))
    return Nest(
        loops=loops,
        operands=tuple(dims(s) for s in shapes),
        results=(result,),
        kernel="elementwise_loss",
        flops=4 * math.prod(full),
        saved=() if log else _SAVED.get(name, tuple(range(len(shapes)))),
        saved_extra=(SavedExtra(tuple((loop.name,) for loop in loops)),)
        if log or name in ("l1_loss", "poisson_nll_loss")
        else (),
        detail={"reduction": reduction, "position": position, "count": math.prod(full)},
    )
