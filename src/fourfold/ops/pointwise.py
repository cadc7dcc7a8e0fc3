"""Elementwise ops with broadcasting; copies, casts and dropout among them.

They follow their largest input. Partial sums pass where the op is linear: copies, sign changes, sums of partial values
and products with plain numbers.
"""

from __future__ import annotations

from fourfold.graph import Graph, Op, Ref
from fourfold.ops.nest import Dim, Loop, Nest, SavedExtra, rule

_LINEAR_ALL = ("aten.add.Tensor", "aten.sub.Tensor", "aten.neg", "aten.clone", "aten.alias", "aten.contiguous")
_LINEAR_FIRST = ("aten.mul.Scalar", "aten.div.Scalar", "aten.mul.Tensor", "aten.div.Tensor")
_SAVES_RESULT = ("relu", "tanh", "sigmoid", "exp", "expm1", "sqrt", "rsqrt", "reciprocal")
_SAVES_NOTHING = (
    "add",
    "sub",
    "rsub",
    "neg",
    "clone",
    "alias",
    "contiguous",
    "detach",
    "to",
    "_to_copy",
    "type_as",
    "lift_fresh_copy",
    "lift_fresh",
    "zeros_like",
    "ones_like",
    "full_like",
    "fill",
    "copy",
    "sign",
    "floor",
    "ceil",
    "round",
    "trunc",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_not",
    "logical_and",
    "logical_or",
    "logical_xor",
    "bitwise_not",
    "bitwise_and",
    "bitwise_or",
    "__and__",
    "__or__",
    "__xor__",
    "__lshift__",
    "__rshift__",
    "isnan",
    "isinf",
    "isfinite",
    "floor_divide",
)
"""All others are taken to save their operands: true of most, an overestimate for a few."""


def broadcast(op: Op, graph: Graph, shape: tuple[int, ...]) -> tuple[tuple[Loop, ...], tuple[tuple[Dim, ...], ...]]:
    """One loop per dim of the result, and each operand's dims in terms of them, aligned at the right."""
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(shape))
    operands = []
    for name in op.operands:
        own = graph.values[name].shape
        first = len(shape) - len(own)
        dims: list[Dim] = [(f"i{first + d}",) if size == shape[first + d] else () for d, size in enumerate(own)]
        operands.append(tuple(dims))
    return loops, tuple(operands)


def _linear_operands(op: Op) -> tuple[int, ...]:
    if op.target.startswith(_LINEAR_ALL) and all(isinstance(a, Ref) for a in op.args[:1]):
        numbers = [a for a in op.args[1:] if not isinstance(a, Ref)]
        return tuple(range(len(op.operands))) if not numbers else ()
    if op.target in _LINEAR_FIRST and len(op.operands) == 1 and isinstance(op.args[0], Ref):
        return (0,)
    return ()


def _saved_operands(op: Op) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """`saved` and `saved_if` of a nest."""
    name, count = op.target.split(".")[1].rstrip("_"), len(op.operands)
    if name in _SAVES_RESULT:
        return (-1,), {}
    if name in _SAVES_NOTHING or (name in ("mul", "div") and count == 1) or op.target == "aten.lerp.Scalar":
        return (), {}
    if name in ("where", "masked_fill"):
        return (0,) if name == "where" else (1,), {}
    every = tuple(range(count))
    if name == "mul":
        return every, {0: (1,), 1: (0,)}
    if name == "div":
        return every, {0: (1,)}
    return every, {1: (2,), 2: (1,)} if name == "addcmul" else {}


@rule(
    "<pointwise>",
    "clone",
    "alias",
    "contiguous",
    "detach",
    "to",
    "_to_copy",
    "type_as",
    "lift_fresh_copy",
    "lift_fresh",
    "zeros_like",
    "ones_like",
    "full_like",
    "masked_fill",
    "fill",
    "copy",
    "where",
    "prelu_kernel",
    "celu",
    "selu",
    "relu6",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "leaky_relu",
    "log_sigmoid",
    "softplus",
    "logical_not",
    "square",
    "__and__",
    "__or__",
    "__xor__",
    "__lshift__",
    "__rshift__",
)
def pointwise(op: Op, graph: Graph) -> Nest | None:
    if len(op.results) != 1:
        return None
    shape = graph.values[op.results[0]].shape
    loops, operands = broadcast(op, graph, shape)
    numel = graph.values[op.results[0]].numel
    saved, saved_if = _saved_operands(op)
    result: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    return Nest(
        loops=loops,
        operands=operands,
        results=(result,),
        linear=_linear_operands(op),
        flops=0 if op.target.startswith(("aten.clone", "aten.alias", "aten.detach", "aten.to")) else numel,
        saved=saved,
        saved_if=saved_if,
        saved_extra=(SavedExtra(result),) if op.target.startswith("aten.log_sigmoid") else (),
    )


@rule("prelu")
def prelu(op: Op, graph: Graph) -> Nest | None:
    """The slope lies along dim 1."""
    x, slope = (graph.values[name].shape for name in op.operands)
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(x))
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in loops)
    weight: tuple[Dim, ...] = (("i1",),) if slope[0] > 1 else ((),)
    return Nest(loops=loops, operands=(dims, weight), results=(dims,), flops=graph.values[op.results[0]].numel, saved=(0, 1))


@rule("rand", "randn")
def random_creation(op: Op, graph: Graph) -> Nest | None:
    """Random tensors without an operand (drop path): the kernel draws the same numbers under every split."""
    loops = tuple(Loop(name=f"i{d}", size=size) for d, size in enumerate(graph.values[op.results[0]].shape))
    return Nest(loops=loops, operands=(), results=(tuple((loop.name,) for loop in loops),), kernel="random")


@rule("dropout", "feature_dropout", "alpha_dropout", "rand_like", "randn_like", "bernoulli", "native_dropout")
def random(op: Op, graph: Graph) -> Nest | None:
    """Random masks: the kernel draws the same numbers under every split."""
    if len(op.operands) != 1 or len(op.results) != 1 or "native" in op.target or "alpha" in op.target:
        return None
    nest = pointwise(op, graph)
    assert nest is not None
    mask: tuple[SavedExtra, ...] = (SavedExtra(nest.results[0]),) if op.target.startswith("aten.dropout") else ()
    if op.target.startswith("aten.feature"):
        mask = (SavedExtra(nest.results[0][:2]),)
    saved_extra = mask if _drops(op) else ()
    return Nest(loops=nest.loops, operands=nest.operands, results=nest.results, kernel="random", saved_extra=saved_extra)


def _drops(op: Op) -> bool:
    """Whether an op is a dropout in training mode with a rate above zero."""
    return "dropout" in op.target and bool(op.args[1]) and bool(op.args[2])
