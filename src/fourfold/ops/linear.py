"""Matrix products: linear layers, matmul in all its shapes, einsum.

`filter` divides the output features, `channel` the contracted ones (the result is then Partial), `batch` and `domain:i`
the leading dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Call, Dim, Kind, Loop, Nest, SavedExtra, rule


def _leading(shape: Sequence[int]) -> list[Loop]:
    """Loops for leading dims: the first is the batch, the others are domain."""
    labels = [("batch",) if i == 0 else (f"domain:{i - 1}",) for i in range(len(shape))]
    return [Loop(name=f"b{i}", size=size, labels=labels[i]) for i, size in enumerate(shape)]


@rule("linear")
def linear(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "input weight bias")
    x, w = call.shape("input"), call.shape("weight")
    if len(w) != 2 or len(x) < 1:
        return None
    lead = _leading(x[:-1])
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in lead)
    loops = (
        *lead,
        Loop(name="f", size=w[0], labels=("filter",)),
        Loop(name="c", size=w[1], labels=("channel",), kind="sum"),
    )
    operands: list[tuple[Dim, ...]] = [(*dims, ("c",)), (("f",), ("c",))]
    if call["bias"] is not None:
        operands.append((("f",),))
    return Nest(
        loops=loops,
        operands=tuple(operands),
        results=((*dims, ("f",)),),
        kernel="linear",
        anchor=True,
        flops=2 * math.prod(x) * w[0],
        saved=(0, 1),
        saved_if={0: (1,), 1: (0,)},
    )


@rule("addmm")
def addmm(op: Op, graph: Graph) -> Nest | None:
    """``beta * bias + alpha * x @ w``; the bias broadcasts."""
    call = Call(op, graph, "bias x w")
    bias, x, w = call.shape("bias"), call.shape("x"), call.shape("w")
    loops = (
        Loop(name="b0", size=x[0], labels=("batch",)),
        Loop(name="f", size=w[1], labels=("filter",)),
        Loop(name="c", size=x[1], labels=("channel",), kind="sum"),
    )
    names = ("b0", "f")[2 - len(bias) :]
    bias_dims: tuple[Dim, ...] = tuple((n,) if size > 1 else () for n, size in zip(names, bias, strict=True))
    return Nest(
        loops=loops,
        operands=(bias_dims, (("b0",), ("c",)), (("c",), ("f",))),
        results=((("b0",), ("f",)),),
        kernel="addmm",
        anchor=True,
        flops=2 * x[0] * x[1] * w[1],
        saved=(1, 2),
        saved_if={1: (2,), 2: (1,)},
    )


@rule("mm", "bmm", "matmul")
def matmul(op: Op, graph: Graph) -> Nest | None:
    call = Call(op, graph, "x w")
    x, w = call.shape("x"), call.shape("w")
    if len(x) < 2 or len(w) < 2:
        return _vector_product(op, x, w)
    width = max(len(x), len(w)) - 2
    lead = call.result[:width]
    heads = {i for i in range(1, width) if _aligned_size(x, lead, i) == _aligned_size(w, lead, i) == lead[i]}
    domains = iter(range(width + 1))
    loops = [
        *(Loop(name=f"b{i}", size=n, labels=_lead_label(i, heads, domains)) for i, n in enumerate(lead)),
        Loop(name="m", size=x[-2], labels=_lead_label(width, heads, domains)),
        Loop(name="f", size=w[-1], labels=("filter",)),
        Loop(name="c", size=x[-1], labels=("channel",), kind="sum"),
    ]

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        own = shape[:-2]
        first = width - len(own)
        return tuple((f"b{first + i}",) if size == lead[first + i] else () for i, size in enumerate(own))

    full: tuple[Dim, ...] = tuple((f"b{i}",) for i in range(width))
    # of factors with more than three dims a repeated one is written out; against a plain matrix nothing is repeated
    repeated = [k for k, s in enumerate((x, w)) if min(len(x), len(w)) > 3 and s[:-2] != lead]
    return Nest(
        loops=tuple(loops),
        operands=((*dims(x), ("m",), ("c",)), (*dims(w), ("c",), ("f",))),
        results=((*((f"b{i}",) for i in range(width)), ("m",), ("f",)),),
        anchor=True,
        flops=2 * math.prod(call.result) * x[-1],
        saved=tuple(k for k in (0, 1) if k not in repeated),
        saved_if={0: (1,), 1: (0,)},
        saved_extra=tuple(SavedExtra((*full, *((size,) for size in (x, w)[k][-2:]))) for k in repeated),
    )


def _aligned_size(shape: tuple[int, ...], lead: tuple[int, ...], i: int) -> int:
    """Size of an operand along leading dim i of the product; 1 where it lacks the dim."""
    at = i - (len(lead) - (len(shape) - 2))
    return shape[at] if at >= 0 else 1


def _lead_label(i: int, heads: set[int], domains: Iterator[int]) -> tuple[str, ...]:
    """The first leading dim is the batch. Dims that both factors have are heads and divided as features; others are domain."""
    if i == 0:
        return ("batch",)
    return ("filter",) if i in heads else (f"domain:{next(domains)}",)


def _vector_product(op: Op, x: tuple[int, ...], w: tuple[int, ...]) -> Nest | None:
    if len(x) < 2 or len(w) != 1:
        return None
    lead = _leading(x[:-1])
    dims: tuple[Dim, ...] = tuple((loop.name,) for loop in lead)
    loops = (*lead, Loop(name="c", size=x[-1], labels=("channel",), kind="sum"))
    return Nest(
        loops=loops,
        operands=((*dims, ("c",)), (("c",),)),
        results=(dims,),
        anchor=True,
        flops=2 * math.prod(x),
        saved=(0, 1),
        saved_if={0: (1,), 1: (0,)},
    )


@rule("baddbmm")
def baddbmm(op: Op, graph: Graph) -> Nest | None:
    """``beta * bias + alpha * x @ w`` on batches."""
    call = Call(op, graph, "bias x w")
    bias, x, w = call.shape("bias"), call.shape("x"), call.shape("w")
    loops = (
        Loop(name="b0", size=x[0], labels=("batch",)),
        Loop(name="m", size=x[1], labels=("domain:0",)),
        Loop(name="f", size=w[2], labels=("filter",)),
        Loop(name="c", size=x[2], labels=("channel",), kind="sum"),
    )
    names = ("b0", "m", "f")[3 - len(bias) :]
    bias_dims: tuple[Dim, ...] = tuple((n,) if size > 1 else () for n, size in zip(names, bias, strict=True))
    return Nest(
        loops=loops,
        operands=(bias_dims, (("b0",), ("m",), ("c",)), (("b0",), ("c",), ("f",))),
        results=((("b0",), ("m",), ("f",)),),
        kernel="addmm",
        anchor=True,
        flops=2 * math.prod(x) * w[2],
        saved=(1, 2),
        saved_if={1: (2,), 2: (1,)},
    )


@rule("einsum")
def einsum(op: Op, graph: Graph) -> Nest | None:
    """Every letter is a loop; letters missing from the output are summed."""
    shapes = [graph.values[name].shape for name in op.operands]
    equation = _explicit_equation(str(op.args[0]).replace(" ", ""), [len(shape) for shape in shapes])
    if equation is None:
        return None
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if any(len(set(term)) != len(term) for term in terms):
        return None
    sizes: dict[str, int] = {}
    for term, name in zip(terms, op.operands, strict=True):
        for letter, size in zip(term, graph.values[name].shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return None  # broadcasting a dim of size one
    domains = iter(range(len(output)))
    loops = []
    for letter, size in sizes.items():
        kind: Kind = "map" if letter in output else "sum"
        loops.append(Loop(name=letter, size=size, labels=_letter_label(letter, terms, output, domains), kind=kind))
    return Nest(
        loops=tuple(loops),
        operands=tuple(tuple((letter,) for letter in term) for term in terms),
        results=(tuple((letter,) for letter in output),),
        anchor=True,
        flops=2 * math.prod(sizes.values()),
        saved=tuple(range(len(terms))),
        saved_if={k: tuple(j for j in range(len(terms)) if j != k) for k in range(len(terms))},
    )


def _explicit_equation(equation: str, ranks: list[int]) -> str | None:
    """An equation with its ellipsis as letters and an explicit output; None if its ellipses differ in rank."""
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    widths = {rank - len(term) + 3 for term, rank in zip(terms, ranks, strict=True) if "..." in term}
    if len(widths) > 1:
        return None
    rest = "".join(dict.fromkeys(inputs.replace("...", "").replace(",", "")))
    unused = [letter for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in rest]
    ellipsis = "".join(unused[: widths.pop()]) if widths else ""
    if not arrow:
        output = "..." * ("..." in inputs) + "".join(sorted(c for c in rest if inputs.count(c) == 1))
    return f"{inputs}->{output}".replace("...", ellipsis)


def _letter_label(letter: str, terms: list[str], output: str, domains: Iterator[int]) -> tuple[str, ...]:
    """Batch is the first letter of the output; letters of the first factor alone are domain; all others are features."""
    if letter not in output:
        return ("channel",)
    if letter == output[0]:
        return ("batch",)
    alone = len(terms) > 1 and letter in terms[0] and not any(letter in term for term in terms[1:])
    return (f"domain:{next(domains)}",) if alone else ("filter",)
