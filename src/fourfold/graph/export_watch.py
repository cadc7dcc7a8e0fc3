"""Refuses, by name, what torch.export drops silently: the module is watched while it is traced.

Export records tensor ops. The backward of a custom autograd.Function, hooks on gradients, hooks on saved tensors, numbers
drawn by Python and state kept in attributes leave no op behind: the captured program would train with other numbers. Two
things are carried instead of refused: a buffer that forward binds anew is written at the end of forward, and buffers
written inside torch.utils.checkpoint, which runs its part of forward twice, are reported for `capture.py` to write twice.

Not seen here: hooks on `grad_fn` nodes and state outside of the module. The numeric check of `runs/capture_check.py` is for
those.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpointing

from fourfold.errors import CaptureFailed
from fourfold.graph.module_attributes import plain_state, tensors_of

_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_HARMLESS = (save_on_cpu, checkpointing._checkpoint_hook, checkpointing._recomputation_hook)
"""Hooks on saved tensors that give back what was saved."""
_STATISTICS = (F.batch_norm, F.instance_norm)
"""Functions that write running statistics: their second and third argument."""


class Observer(TorchFunctionMode):
    """Watches one or more calls of a module and loss; `differentiated` says whether gradients matter."""

    def __init__(self, *, differentiated: bool) -> None:
        super().__init__()
        self.differentiated = differentiated
        self.functions: list[type] = []  # custom autograd Functions
        self.hooks: list[str] = []
        self.written: set[str] = set()  # buffers that the last call wrote in place or bound anew
        self.written_twice: set[str] = set()  # buffers written inside torch.utils.checkpoint
        self.changed: list[str] = []  # plain attributes that the last call changed
        self.replaced: dict[str, Tensor] = {}  # tensors it put another in the place of, by the attribute's name
        self.draws: list[str] = []
        self._statistics: list[Tensor] = []  # written by the current checkpoint
        self._depth = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HOOKS:
            self.hooks.append(f"the tensor hook {hook_name(args[1] if len(args) > 1 else kwargs.get('hook'))}")
        if self._depth and func in _STATISTICS:
            given = [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
            self._statistics += [t for t in given if isinstance(t, Tensor)]
        return func(*args, **kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also watch custom Functions and hooks on saved tensors, which no torch function call shows."""
        apply, enter = torch.autograd.Function.__dict__["apply"], saved_tensors_hooks.__enter__

        def watched(cls: type, *args: Any, **kwargs: Any) -> Any:
            self.functions += [cls] if _is_custom(cls) else []
            return apply.__get__(None, cls)(*args, **kwargs)

        def entered(hooks: Any) -> Any:
            if not isinstance(hooks, _HARMLESS):
                self.hooks.append("hooks on saved tensors")
            return enter(hooks)

        with (
            patch.object(torch.autograd.Function, "apply", classmethod(watched)),
            patch.object(saved_tensors_hooks, "__enter__", entered),
            patch.object(torch, "manual_seed", self._seeding(torch.manual_seed)),
            patch.object(torch, "set_rng_state", self._seeding(torch.set_rng_state)),
            self,
        ):
            yield

    def _seeding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seeded(*args: Any, **kwargs: Any) -> Any:
            self.draws.append(f"sets torch's random state (torch.{function.__name__})")
            return function(*args, **kwargs)

        return seeded

    def call(self, whole: nn.Module, forward: Callable[[], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        """One call of forward; what it did to attributes, buffers and Python's random state is kept."""
        buffers, tensors, plain = _buffers(whole), tensors_of(whole), plain_state(whole)
        versions = {key: buffer._version for key, buffer in whole.named_buffers()}
        drawn = (random.getstate(), _numpy_state())
        with self._checkpoints(whole):
            loss, outputs = forward()
        now_drawn = (random.getstate(), _numpy_state())
        sources = zip(("random", "numpy.random"), drawn, now_drawn, strict=True)
        self.draws += [f"draws numbers by {source}" for source, before, after in sources if before != after]
        now, tensors_now = plain_state(whole), tensors_of(whole)
        self.changed = [name for name in now if name not in plain or plain[name] != now[name]]
        self.replaced = {name: old for name, old in tensors.items() if tensors_now.get(name) is not old}
        _write_back(buffers)
        self.written = {key for key, buffer in whole.named_buffers() if buffer._version != versions.get(key)}
        if self.differentiated:
            self.functions += _custom_functions([loss, *pytree.tree_leaves(outputs)])
        return loss, outputs

    @contextmanager
    def _checkpoints(self, whole: nn.Module) -> Iterator[None]:
        """Note which buffers the parts of forward write that torch.utils.checkpoint runs twice."""
        hook = checkpointing._checkpoint_hook
        enter, leave = hook.__enter__, hook.__exit__
        versions: list[dict[str, int]] = []
        saved: list[bool] = []  # whether backward will want anything of a part, so that it runs again

        def entered(mine: Any) -> Any:
            versions.append({key: b._version for key, b in whole.named_buffers()})
            saved.append(False)
            self._depth += 1
            depth, pack = self._depth, mine.pack_hook

            def packed(tensor: Tensor) -> Any:
                saved[depth - 1] = True
                return pack(tensor)

            mine.pack_hook = packed
            return enter(mine)

        def left(mine: Any, *error: Any) -> Any:
            self._depth -= 1
            before, statistics = versions.pop(), {id(t) for t in self._statistics}
            again = saved.pop()
            for key, buffer in whole.named_buffers():
                if again and (buffer._version != before[key] or id(buffer) in statistics):
                    self.written_twice.add(key)
            if not self._depth:
                self._statistics.clear()
            return leave(mine, *error)

        with patch.object(hook, "__enter__", entered), patch.object(hook, "__exit__", left):
            yield

    def refuse(self, name: str) -> None:
        """Raise for what was found and cannot be carried."""
        plain = "write it with plain tensor ops, or register it by torch.library.custom_op with register_autograd"
        if self.differentiated and self.functions:
            found = self.functions[0]
            if found is checkpointing.CheckpointFunction:
                raise CaptureFailed(
                    f"{name} uses torch.utils.checkpoint with use_reentrant=True, whose gradients capture "
                    "cannot carry; use use_reentrant=False, or recompute by the plan"
                )
            raise CaptureFailed(
                f"{name} uses the autograd.Function {found.__qualname__}, whose backward capture cannot carry; {plain}"
            )
        if self.differentiated and self.hooks:
            raise CaptureFailed(
                f"{name} sets {self.hooks[0]} in forward, which capture cannot carry; change the gradients "
                "after backward (forward_backward) instead"
            )
        if self.draws:
            raise CaptureFailed(
                f"{name} {self.draws[0]} in forward, which capture would freeze; draw numbers by torch "
                "without a seed, or pass them in as inputs"
            )


def _write_back(before: Mapping[tuple[int, str], tuple[str, nn.Module, Tensor]]) -> None:
    """A buffer that forward bound anew: the stored one is written with the new value, as the last thing forward does."""
    for (_, name), (path, module, old) in before.items():
        new = module._buffers.get(name)
        if new is old:
            continue
        key = f"{path}.{name}".removeprefix("model.") if path else name
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            was, now = (None if t is None else (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in (old, new))
            raise CaptureFailed(f"forward binds buffer '{key}' to {now}, it was {was}; keep its shape and dtype")
        if new.requires_grad:
            raise CaptureFailed(
                f"forward binds buffer '{key}' to a tensor that requires grad; detach it, since eager PyTorch "
                "fails in the second step too"
            )
        with torch.no_grad():
            old.copy_(new)
        module._buffers[name] = old


def _buffers(whole: nn.Module) -> dict[tuple[int, str], tuple[str, nn.Module, Tensor]]:
    return {
        (id(module), name): (path, module, buffer)
        for path, module in whole.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _custom_functions(results: Sequence[Any]) -> list[type]:
    """Custom Functions on the way from results back to the leaves."""
    stack = [t.grad_fn for t in results if isinstance(t, Tensor)]
    seen: set[Any] = set()
    found: list[type] = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found += [cls] if _is_custom(cls := type(node)._forward_cls) else []
        stack += [behind for behind, _ in node.next_functions]
    return found


def _is_custom(function: type) -> bool:
    """Whether an autograd.Function is someone's own; torch makes one for each op that torch.library registers."""
    return not function.__module__.startswith("torch._library")


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return kind, bytes(np.asarray(keys)), *rest


def hook_name(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__name__
