"""Memory an op takes for itself and gives back: beside its results in forward, beside its gradients in backward.

Measured on CPU, where oneDNN's convolutions copy input, weight and result into a format whose channels are rounded up to
`block` (16 with AVX-512, 8 with AVX2); every other figure is what ATen's own kernels allocate. Each formula was compared
with allocator events, most agree to the byte; where they cannot (strided 1x1 kernels, wide strided windows on few channels)
they are high. With ``block=0`` oneDNN's are left out; `gpu` has those of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fourfold.ops.rule_tables import rule_for
from fourfold.plans.lists.saved_tensors import Share, full_bytes


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes beyond results, and beyond the gradients."""

    forward: int = 0
    backward: int = 0


Rule = Callable[[Share, Sequence[bool], int], Workspace]
_KERNELS: dict[str, Rule] = {}
_kernel = rule_for(_KERNELS)


def workspace(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """What the op takes on this rank, if these operands need gradients; `block`: channels of oneDNN's format, 0 without it."""
    if share.empty:
        return Workspace()
    rule = _KERNELS.get(share.step.nest.kernel)
    if rule is not None:
        return rule(share, gradients, block)
    if share.step.op.target.startswith(("aten.mul.", "aten.div.")) and len(share.operands) > 1:
        return _product(share, gradients)
    return Workspace()


def _product(share: Share, gradients: Sequence[bool]) -> Workspace:
    """The gradient of a factor that was repeated is first made in full."""
    small = any(g and math.prod(s) < math.prod(share.results[0]) for g, s in zip(gradients, share.operands, strict=True))
    return Workspace(backward=share.result_bytes(0) if small else 0)


def _border(share: Share) -> int:
    """How much larger the gradient of a padded operand is, before the border is cut off."""
    padded = share.padded()
    return math.prod(padded) * share.items[0] - share.operand_bytes(0) if padded is not None else 0


def _rounded(count: int, block: int) -> int:
    return -(-count // block) * block


@_kernel("conv")
def _conv(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """Forward: the blocked input, weight and result, then the blocked and the plain result. Backward: those of the input's
    gradient, then those of the weight's."""
    x, w = share.operands[:2]
    padded = share.padded()
    border = _border(share) if gradients[0] else 0
    x = padded or x
    if not block or share.items[0] not in (4, 8) or len(w) < 4:
        return Workspace(backward=border)
    kernel, y = math.prod(w[2:]), share.results[0]
    if share.items[0] == 8:  # oneDNN has no float64: windows of all samples are unfolded into columns
        columns = 8 * x[0] * w[1] * kernel * math.prod(y[2:]) if kernel > 1 else 0
        return Workspace(columns, columns + border)
    item, groups = share.items[0], max(x[1] // max(w[1], 1), 1)
    if not _onednn(share, x, w, groups):
        columns = item * w[1] * kernel * math.prod(y[2:]) if kernel > 1 else 0
        return Workspace(columns, max(columns, share.operand_bytes(0) if len(w) == 5 else 0) + border)
    thin = x[1] < block  # few channels are read as they are
    xb = item * x[0] * _rounded(x[1], block) * math.prod(x[2:])
    yb = item * y[0] * _rounded(y[1], block) * math.prod(y[2:])
    wb = item * kernel * _rounded(w[0], block) * (_rounded(w[1], block) if groups == 1 else w[1])
    xin = 0 if thin else xb
    plain_x, plain_w, plain_y = item * math.prod(x), item * math.prod(w), item * math.prod(y)
    forward = max(xin + wb + yb - plain_y, yb)
    if kernel == 1:
        xin += plain_x - plain_w  # strided windows are gathered first
    weight = max(xin + yb + wb - plain_w, wb) if gradients[1] else 0
    if len(w) == 5 and any(k > s for k, s in zip(w[2:], x[2:], strict=True)):  # another kernel: windows wider than the input
        weight = 4 * wb + 16 * x[1] * kernel + 256
    if not gradients[0]:
        return Workspace(forward, weight)
    data = max(yb + wb + xb - plain_x - plain_w, xb - plain_w)
    return Workspace(forward, max(weight, data) + border)


def _onednn(share: Share, x: tuple[int, ...], w: tuple[int, ...], groups: int) -> bool:
    """Whether torch leaves a convolution of one thread to oneDNN: not small ones of one sample, not plain products."""
    detail = share.step.nest.detail
    strided = max(*detail["stride"], *detail["dilation"]) > 1
    heavy = strided or x[0] >= 16 or max(w[-2:]) > 1
    return heavy and (groups > 1 or min(w[-2:]) > 3 or x[0] > 1 or math.prod(x[:4]) > 20480)


@_kernel("conv_transpose")
def _conv_transpose(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """Forward: two more results. Backward: input and gradient once more, few channels rounded up to eight."""
    if not block or share.items[0] != 4:
        return Workspace()
    x, y = share.operands[0], share.results[0]
    if not _onednn(share, x, share.operands[1], max(x[1] // max(share.operands[1][0], 1), 1)):
        columns = 4 * math.prod(share.operands[1][1:]) * math.prod(x[2:])
        return Workspace(columns, columns)
    sizes = [4 * s[0] * _rounded(s[1], min(8, block)) * math.prod(s[2:]) for s in (x, y)]
    return Workspace(2 * share.result_bytes(0), sum(sizes))


@_kernel("batch_norm")
def _batch_norm(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """ATen's backward has a second tensor of the input's size; ours, joined over ranks, works in place."""
    return Workspace() if share.step.axes_of("joint") else Workspace(backward=share.operand_bytes(0))


@_kernel("instance_norm")
def _instance_norm(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    return _layer_norm(share, gradients, block) if share.step.axes_of("joint") else _batch_norm(share, gradients, block)


@_kernel("layer_norm", "group_norm")
def _layer_norm(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """Joined over ranks: a difference or a product at a time, forward one and backward two."""
    return Workspace(share.operand_bytes(0), 2 * share.operand_bytes(0)) if share.step.axes_of("joint") else Workspace()


@_kernel("cross_entropy")
def _cross_entropy(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """The gradient of the log-softmax, in the loss's precision and before that of the logits is there if they differ; with
    classes divided, exponentials forward and backward."""
    whole = share.operand_bytes(0)
    if share.step.axes_of("joint"):
        return Workspace(whole, whole if share.step.nest.detail["logits"] else 0)
    if share.items[0] < share.result_items[0]:
        return Workspace(backward=full_bytes(share) - whole)
    return Workspace(backward=whole if share.step.nest.detail["logits"] else 0)


@_kernel("elementwise_loss")
def _elementwise_loss(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """The terms, before they are added up."""
    return Workspace(share.operand_bytes(0))


@_kernel("random")
def _random(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """Numbers drawn, and the mask before it is scaled."""
    return Workspace(share.result_bytes(0)) if share.step.nest.saved_extra else Workspace()


@_kernel("attention")
def _attention(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """Backward has the gradients of keys and values in its own order first; written out, the weights three times."""
    if share.step.nest.detail["dropout"]:
        weights = math.prod(share.operands[0][:3]) * share.operands[1][2] * share.items[0]
        return Workspace(2 * weights, 3 * weights)
    return Workspace(backward=share.operand_bytes(0))


@_kernel("lstm")
def _lstm(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """oneDNN's scratchpad and reordered weights, a layer at a time: about its gates and a page for eight hidden numbers."""
    gates = [share.kept_bytes(k) for k in share.step.nest.saved_extra if k.page > 1][:1]
    layers = math.prod((share.step.op.args[4], 2 if share.step.op.args[7] else 1))
    weights = sum(share.operand_bytes(k) for k in range(3, len(share.operands))) // layers
    extra = sum(gates) + 512 * share.operands[1][2] + weights
    long = [k for k in range(3, len(share.operands)) if len(share.operands[k]) == 2 and share.operands[k][1] % 256 == 0]
    return Workspace(extra, extra + sum(map(share.operand_bytes, long)))  # rows of 1024 bytes are spread out first


@_kernel("resample")
def _resample(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """In two dims, torch works on copies with channels last; divided, dim by dim."""
    names = [loop.name for loop in share.step.nest.loops[2:]]
    if share.divided(*names):
        return Workspace(share.result_bytes(0), share.result_bytes(0))
    two = share.step.op.target.startswith(("aten.upsample_nearest2d", "aten.upsample_bilinear2d"))
    return Workspace(share.operand_bytes(0) + share.result_bytes(0)) if two and share.operands[0][1] > 3 else Workspace()


@_kernel("softmax")
def _softmax(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """Joined over ranks: differences, exponentials, products."""
    joint = share.step.axes_of("joint")
    return Workspace(2 * share.operand_bytes(0), 2 * share.operand_bytes(0)) if joint else Workspace()


@_kernel("max_pool", "avg_pool")
def _pool(share: Share, gradients: Sequence[bool], block: int) -> Workspace:
    """Over a border, the gradient of the padded input; sums before they are divided."""
    averaged = share.padded() is not None and share.step.nest.kernel == "avg_pool"
    return Workspace(share.result_bytes(0) if averaged else 0, _border(share))
