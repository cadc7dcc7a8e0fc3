"""Odd modules whose gradients are not those of the forward's ops: own backwards, hooks, checkpoints, regions without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from odd_row import EITHER, EQUAL, HIDDEN, RUNS, Body, mean_square, none, odd


class Reversed(torch.autograd.Function):
    """The identity; its backward turns the gradient round, as domain adaptation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * gradient


class Squared(torch.autograd.Function):
    """x * x, with the backward that autograd would find."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


reverse_gradient = Reversed.apply


@odd(EITHER, "Reversed", verify=True)
class OwnBackward(Body):
    """A custom Function whose backward is not the gradient."""

    def middle(self, h: Tensor) -> Tensor:
        return Reversed.apply(h)


@odd(EITHER, "Reversed")
class OwnBackwardStored(Body):
    """The same, with `apply` looked up before anyone could watch it."""

    def middle(self, h: Tensor) -> Tensor:
        return reverse_gradient(h)


@odd(EITHER, "Squared", verify=True)
class OwnBackwardThatIsTrue(Body):
    """A custom Function whose backward equals the gradient."""

    def middle(self, h: Tensor) -> Tensor:
        return Squared.apply(h)


@odd(EITHER, "Reversed")
class OwnBackwardInNestedModule(Body):
    """A custom Function inside a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Reversing())

    def middle(self, h: Tensor) -> Tensor:
        return self.block(h)


class Reversing(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return Reversed.apply(h)


@odd(EITHER, "Reversed", targets=none, loss=lambda: lambda output: Reversed.apply(output).square().mean())
class OwnBackwardInLoss(Body):
    """A custom Function in the loss."""


@odd(EITHER, "Reversed")
class OwnBackwardDetached(Body):
    """A custom Function whose result is detached: its backward never runs."""

    def middle(self, h: Tensor) -> Tensor:
        return h + Reversed.apply(h).detach()


@torch.library.custom_op("odd::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, gradient: -gradient)


@odd(EITHER, "double", verify=True)
class CustomOp(Body):
    """An op of torch.library with a registered backward that is not the gradient."""

    def middle(self, h: Tensor) -> Tensor:
        return double(h)


@odd(EQUAL)
class StraightThrough(Body):
    """Rounding whose gradient is that of the identity, by detach."""

    def middle(self, h: Tensor) -> Tensor:
        return h + (h.round() - h).detach()


@odd(EITHER, "hook", verify=True)
class TensorHook(Body):
    """A hook on an activation, registered in forward, that changes the gradient."""

    def middle(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: 3 * gradient)
        return h


@odd(EITHER, "hook")
class TensorHookThatWatches(Body):
    """A hook on an activation that returns nothing."""

    def middle(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: None)
        return h


@odd(EITHER, "hook")
class ParameterHook(Body):
    """A hook that scales the gradient of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: 3 * gradient)


@odd(EITHER, "hook", verify=True)
class PostAccumulateHook(Body):
    """A hook that changes a parameter's gradient once it is accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@odd(EITHER, "hook")
class BackwardHook(Body):
    """A full backward hook of a module that changes the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.last.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))


@odd(EITHER, "hook")
class BackwardPreHook(Body):
    """A full backward pre-hook that changes the gradient of a module's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_pre_hook(lambda module, outputs: (2 * outputs[0],))


@odd(EITHER, "hook")
class OldBackwardHook(Body):
    """A backward hook of the old kind that changes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.act.register_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))

    def middle(self, h: Tensor) -> Tensor:
        return self.act(h)


@odd(EQUAL)
class ForwardHook(Body):
    """A forward hook that changes what a module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, args, output: output * 2)


@odd(EQUAL)
class ForwardPreHook(Body):
    """A forward pre-hook that changes what a module is given."""

    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


@odd(EQUAL)
class ForwardHookOfRoot(Body):
    """Forward hooks of the model itself that change its input and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.register_forward_hook(lambda module, args, output: output / 3)


@odd(EITHER, "hook")
class GradFnHook(Body):
    """A hook on the node that made an activation."""

    def middle(self, h: Tensor) -> Tensor:
        h = h.sin()
        if h.grad_fn is not None:
            h.grad_fn.register_hook(lambda inputs, outputs: (3 * inputs[0],))
        return h


@odd(EITHER, verify=True)
class SavedTensorHooks(Body):
    """Saved-tensor hooks that save activations in bfloat16, so that gradients are rounded."""

    def middle(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.to(torch.float64)):
            return h.sin()


@odd(EITHER)
class SavedOnCpu(Body):
    """`save_on_cpu`, which changes where tensors are saved but no number."""

    def middle(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return h.sin()


@odd(EQUAL)
class RetainedGradient(Body):
    """`retain_grad` on an activation."""

    def middle(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.retain_grad()
        return h


@odd(EQUAL, microbatches=1)
class NoGradRegion(Body):
    """A region under no_grad, and a method decorated with it."""

    @torch.no_grad()
    def scale(self, h: Tensor) -> Tensor:
        return self.last(h).sum()

    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.first.weight.mean() * h
        return h * (2 + torch.tanh(self.scale(h))) + shift


@odd(EQUAL)
class GradAgain(Body):
    """enable_grad inside no_grad."""

    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            constant = h.exp()
            with torch.enable_grad():
                h = h.sin()
        return h * constant


@odd(EITHER, microbatches=1)
class InferenceRegion(Body):
    """A region under inference_mode whose result, a copy, is used."""

    def middle(self, h: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = h.exp().sum()
        return h * scale.clone()


@odd(EQUAL)
class Detached(Body):
    """A factor that is detached."""

    def middle(self, h: Tensor) -> Tensor:
        return h * h.exp().detach()


@odd(EQUAL)
class TrainsOnlyIfGradEnabled(Body):
    """A branch on `torch.is_grad_enabled()`."""

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if torch.is_grad_enabled() else h * 100


@odd(EITHER, microbatches=1)
class GradientInForward(Body):
    """The gradient of an inner function by torch.autograd.grad, differentiated again."""

    def middle(self, h: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(h.sin().sum(), h, create_graph=True)
        return h + slope


@odd(EITHER)
class FuncGrad(Body):
    """torch.func.grad in forward."""

    def middle(self, h: Tensor) -> Tensor:
        return h + torch.func.grad(lambda v: (v**3).sum())(h)


@odd(EITHER, verify=True)
class Vmapped(Body):
    """torch.vmap over the batch."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * row.sum())(h)


@odd(EITHER)
class FunctionalCall(Body):
    """A submodule called with other weights by torch.func.functional_call."""

    def middle(self, h: Tensor) -> Tensor:
        weights = {name: 2 * p for name, p in self.last.named_parameters()}
        return h + torch.func.functional_call(self.last, weights, (h,)).sum(1, keepdim=True)


class Checkpointed(Body):
    """A block run under torch.utils.checkpoint."""

    reentrant = False

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), *more, nn.Tanh())

    def middle(self, h: Tensor) -> Tensor:
        return checkpoint(self.block, h, use_reentrant=self.reentrant)


@odd(EQUAL, verify=True)
class CheckpointPlain(Checkpointed):
    """A checkpoint over a plain block."""


@odd(EITHER, "checkpoint")
class CheckpointReentrant(Checkpointed):
    """A reentrant checkpoint over a plain block."""

    reentrant = True


class CheckpointNorm(Checkpointed):
    """Recomputation updates the running statistics a second time, in eager PyTorch too."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(HIDDEN))


@odd(EITHER, "checkpoint", microbatches=1, verify=True)
class CheckpointBatchNorm(CheckpointNorm):
    """A checkpoint over batch norm."""


@odd(EITHER, "checkpoint", microbatches=1)
class CheckpointBatchNormReentrant(CheckpointNorm):
    """A reentrant checkpoint over batch norm."""

    reentrant = True


class CheckpointDrop(Checkpointed):
    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5))


@odd(RUNS, verify=True)
class CheckpointDropout(CheckpointDrop):
    """A checkpoint over dropout."""


@odd(RUNS, "checkpoint")
class CheckpointDropoutReentrant(CheckpointDrop):
    """A reentrant checkpoint over dropout."""

    reentrant = True


@odd(EITHER, "in place")
class WriteThroughView(Body):
    """Writes into views of an activation."""

    def middle(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 0] = 0
        h[:, 1:3].mul_(2)
        return h


@odd(EQUAL)
class AddInPlace(Body):
    """An activation changed in place, the old value not used."""

    def middle(self, h: Tensor) -> Tensor:
        return h.add_(1).mul_(2)


@odd(EITHER)
class WritesIntoInput(Body):
    """The input itself is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


@odd(EITHER, "weight")
class ClampsWeight(Body):
    """A parameter clamped in forward."""

    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.1, 0.1)
        return h


@odd(EITHER, ".data")
class ClampsWeightData(Body):
    """A parameter clamped in forward through `.data`."""

    def middle(self, h: Tensor) -> Tensor:
        self.last.weight.data.clamp_(-0.1, 0.1)
        return h


@odd(EQUAL, targets=none, loss=lambda: mean_square)
class LossOfDetached(Body):
    """Half of the model is not reached by any gradient."""

    def middle(self, h: Tensor) -> Tensor:
        return h.detach()
