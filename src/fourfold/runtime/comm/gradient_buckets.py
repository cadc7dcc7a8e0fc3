"""Sums of gradients over replicated axes by collectives, started while backward still runs.

The list says which gradients share a bucket, and the order of the buckets. A bucket is launched when its last gradient is
complete and all earlier buckets have been launched, so the order is the same on all ranks. A gradient alone in its bucket is
summed in place, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.plans.lists.comm_batches import Bucket
from fourfold.runtime.comm.world import World


class _Bucket:
    def __init__(self, bucket: Bucket) -> None:
        self.key, self.names, self.axes = bucket.key, bucket.names, bucket.axes
        self.incomplete = len(self.names)
        self.flat: Tensor | None = None


class GradientBuckets:
    """Sums the gradients of parameters, bucket by bucket."""

    def __init__(self, parameters: Mapping[str, Tensor], buckets: Sequence[Bucket], world: World) -> None:
        self.parameters, self.world = parameters, world
        self.buckets = [_Bucket(bucket) for bucket in buckets]
        self.bucket_of = {name: k for k, bucket in enumerate(self.buckets) for name in bucket.names}
        self.groups = {b.axes: world.group(b.axes, "gradients") for b in self.buckets}
        self.works: list[tuple[str, Any]] = []
        self.launch_count = 0
        self.is_last_backward = True  # whether the backward now running is the last to add to the gradients
        for name in self.bucket_of:
            parameters[name].register_post_accumulate_grad_hook(self._hook_of(name))

    def _hook_of(self, name: str) -> Any:
        bucket = self.buckets[self.bucket_of[name]]

        def hook(_: Tensor) -> None:
            if not self.is_last_backward:
                return
            bucket.incomplete -= 1
            while self.launch_count < len(self.buckets) and self.buckets[self.launch_count].incomplete <= 0:
                self._launch(self.buckets[self.launch_count])
                self.launch_count += 1

        return hook

    def _launch(self, bucket: _Bucket) -> None:
        tensors = [self.parameters[name] for name in bucket.names]
        for tensor in tensors:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        if len(tensors) == 1:
            flat = tensors[0].grad
            assert flat is not None
            if not flat.is_contiguous():
                flat = tensors[0].grad = flat.contiguous()
        else:
            if bucket.flat is None:
                bucket.flat = tensors[0].new_empty(sum(t.numel() for t in tensors))
            flat, offset = bucket.flat, 0
            views = []
            for tensor in tensors:
                views.append(flat[offset : offset + tensor.numel()].view(tensor.shape))
                offset += tensor.numel()
            torch._foreach_copy_(views, [t.grad for t in tensors if t.grad is not None])
            for tensor, view in zip(tensors, views, strict=True):
                tensor.grad = view
        if flat.numel():
            self.world.note("all_reduce", "collective", bucket.axes, flat.nbytes, bucket.key)
            self.works.append((bucket.key, dist.all_reduce(flat, group=self.groups[bucket.axes], async_op=True)))

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of the buckets."""
        return [bucket.flat for bucket in self.buckets if bucket.flat is not None]

    def finish(self) -> None:
        """Launch the remaining buckets (a parameter without a gradient counts as zero) and wait for all."""
        for bucket in self.buckets[self.launch_count :]:
            self._launch(bucket)
        for key, work in self.works:
            work.wait()
            self.world.journal.note("await", name=key)
        self.works.clear()
        self.launch_count = 0
        for bucket in self.buckets:
            bucket.incomplete = len(bucket.names)
