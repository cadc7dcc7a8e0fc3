"""Process groups along mesh axes, the device, and this rank's coordinates.

`paths` chooses how each message is sent, from the plan's policy and from where the processes run (`running_placement`).
"""

from __future__ import annotations

import atexit
import copy
import datetime
import gc
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import InvalidInput
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.paths import Paths
from fourfold.plans.spec.placement import Placement
from fourfold.plans.spec.policy import DEFAULT, Policy
from fourfold.runtime.comm.journal import Journal
from fourfold.runtime.comm.shared.memory import SharedRows, free_bytes, shareable_host
from fourfold.runtime.host.devices import init_process_group, own_device
from fourfold.runtime.host.launch import collective_seconds, keep_memory

# newer torch renamed these two; the old names still work there, with a warning
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TIMEOUT = datetime.timedelta(seconds=collective_seconds())


class World:
    """This rank on a mesh. Groups are created once, in the same order on every rank; those along `group_axes` at once.

    `ranks` are the processes the mesh consists of, by default all; `rank` is this one's place among them. `paths`: how
    messages are sent; by default none goes through shared memory. `journal`: records them.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        rank: int,
        device: torch.device,
        group_axes: Iterable[tuple[str, ...]] = (),
        ranks: tuple[int, ...] | None = None,
        paths: Paths | None = None,
    ) -> None:
        self.mesh, self.rank, self.device = mesh, rank, device
        self.ranks = ranks or tuple(range(mesh.size))
        self.coords = mesh.coords(rank)
        self.paths = paths or Paths(mesh, self.ranks, Placement.separate_hosts(max(self.ranks) + 1), DEFAULT)
        self.journal = Journal()
        self._shared_rows: dict[tuple[tuple[str, ...], int], SharedRows] = {}
        self._groups: dict[tuple[str, tuple[str, ...]], dist.ProcessGroup] = {}
        for axes in sorted(set(group_axes)):
            self.group(axes)

    def for_run(self, placement: Placement, policy: Policy, journal: Journal) -> World:
        """The same groups for another run, whose messages may be sent otherwise."""
        out = copy.copy(self)
        out.paths, out.journal = Paths(self.mesh, self.ranks, placement, policy), journal
        return out

    @staticmethod
    def join(mesh: Mesh, *, device: torch.device | None = None, group_axes: Iterable[tuple[str, ...]] = ()) -> World:
        """The world of an initialised process group; one rank needs none."""
        device = device or torch.device("cpu")
        World.init_torchrun(mesh, device)
        if not dist.is_initialized():
            if mesh.size == 1:
                return World(mesh, rank=0, device=device)
            raise InvalidInput(f"the plan needs {mesh.size} ranks; start under torchrun or pass a plan for one rank")
        if dist.get_world_size() != mesh.size:
            raise InvalidInput(
                f"the plan's mesh {mesh} has {mesh.size} ranks, {dist.get_world_size()} are running; "
                f"run with --nproc-per-node {mesh.size} or plan for {dist.get_world_size()}"
            )
        paths = Paths(mesh, tuple(range(mesh.size)), running_placement(device, mesh.size), DEFAULT)
        return World(mesh, rank=dist.get_rank(), device=device, group_axes=group_axes, paths=paths)

    @staticmethod
    def init_torchrun(mesh: Mesh, device: torch.device) -> None:
        """Initialise the process group of a torchrun, unless that was done."""
        if not dist.is_initialized() and mesh.size > 1 and "RANK" in os.environ:
            if device.type == "cpu":
                keep_memory()
            else:
                torch.cuda.set_device(device)
            init_process_group(device, timeout=TIMEOUT)
            atexit.register(leave)

    def group(self, axes: tuple[str, ...], purpose: str = "inline") -> dist.ProcessGroup:
        """The group of ranks along the axes that this rank belongs to, created at the first call, which all ranks must make;
        another purpose has its own communicator."""
        key = (purpose, axes)
        if key not in self._groups:
            group = _new_groups(self.mesh, self.ranks, axes)[self.rank]
            assert group is not None
            self._groups[key] = group
        return self._groups[key]

    def all_reduce(self, tensor: Tensor, axes: tuple[str, ...], name: str = "") -> Tensor:
        """The sum of a tensor over the ranks along the axes: a new tensor, added in rank order."""
        if not axes:
            return tensor
        rows = self._gather_in_shared_memory(tensor, axes, "all_reduce", name)
        if rows is not None:
            return rows.sum(0, dtype=tensor.dtype)
        out = tensor.clone(memory_format=torch.contiguous_format)
        if out.numel():
            dist.all_reduce(out, group=self.group(axes))
        return out

    def all_reduce_max(self, tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
        """The largest of each element over the ranks along the axes: a new tensor."""
        if not axes:
            return tensor
        rows = self._gather_in_shared_memory(tensor, axes, "all_reduce")
        if rows is not None:
            return rows.amax(0)
        out = tensor.clone(memory_format=torch.contiguous_format)
        if out.numel():
            dist.all_reduce(out, op=dist.ReduceOp.MAX, group=self.group(axes))
        return out

    def all_gather(self, tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Equal-sized tensors of the ranks along the axes, stacked in rank order."""
        if not axes:
            return tensor.unsqueeze(0)
        rows = self._gather_in_shared_memory(tensor, axes, "all_gather")
        if rows is not None:
            return rows
        out = tensor.new_empty((self.extent(axes), *tensor.shape))
        if tensor.numel():
            all_gather_single(out.view(-1), tensor.reshape(-1), group=self.group(axes))
        return out

    def _gather_in_shared_memory(self, tensor: Tensor, axes: tuple[str, ...], kind: str, name: str = "") -> Tensor | None:
        """The gather through shared memory, where tensors of this size go that way."""
        size = tensor.nbytes
        small = self.paths.small(axes, size)
        if size and self.extent(axes) > 1:
            self.note(kind, "shared" if small else "collective", axes, size, name)
        return self.shared_rows(axes).gather(tensor) if small else None

    def note(self, kind: str, path: str, axes: tuple[str, ...], size: int, name: str = "") -> None:
        """Record a message, if the journal is recording."""
        if self.journal.records is not None:
            ranks = tuple(self.ranks[member] for member in self.members(axes))
            self.journal.note(kind, path=path, ranks=ranks, size=size, name=name)

    def shared_rows(self, axes: tuple[str, ...]) -> SharedRows:
        """The rows of the ranks along the axes, which share memory; all of them must call the first time."""
        key = axes, self.paths.policy.small_bytes
        if key not in self._shared_rows:
            self._shared_rows[key] = SharedRows.open(self.group(axes), TIMEOUT.total_seconds(), self.paths.policy.small_bytes)
        return self._shared_rows[key]

    @staticmethod
    def of_all_ranks(mesh: Mesh, device: torch.device) -> World:
        """The world of all processes as a mesh, cached: every process group costs threads."""
        if mesh.size == 1:
            return World(mesh, rank=0, device=device)
        World.init_torchrun(mesh, device)
        key = (id(dist.group.WORLD), mesh, device)
        if key not in _worlds:
            _worlds[key] = World.join(mesh, device=device)
        return _worlds[key]

    @staticmethod
    def of_stage(mesh: Mesh, ranks: tuple[int, ...], device: torch.device) -> World | None:
        """This process on the ranks of a stage, None if it is not one of them; all processes must call.

        All its groups are created now, because every process must take part in that, and later only its own ranks call.
        """
        if len(ranks) == 1 and not dist.is_initialized():
            return World(mesh, rank=0, device=device)
        key = (id(dist.group.WORLD), mesh, ranks, device)
        if key not in _stage_worlds:
            me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None
            world = World(mesh, rank=me, device=device, ranks=ranks) if me is not None else None
            for purpose, axes in itertools.product(("inline", "gradients"), _subsets(mesh)):
                groups = _new_groups(mesh, ranks, axes)
                if world is not None and me is not None:
                    world._groups[purpose, axes] = groups[me]
            _stage_worlds[key] = world
        return _stage_worlds[key]

    def connect(self) -> None:
        """Use each group once. NCCL connects at the first use, in which the host waits for the other members: done here, no
        rank waits so while a receive that was posted occupies its device."""
        for group in self._groups.values():
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return self.mesh.group(self.rank, axes)

    def extent(self, axes: tuple[str, ...]) -> int:
        size = 1
        for axis in axes:
            size *= self.mesh.extent(axis)
        return size


_worlds: dict[tuple[Any, ...], World] = {}
_stage_worlds: dict[tuple[Any, ...], World | None] = {}
_at_leave: list[Callable[[], None]] = []


def at_leave(release: Callable[[], None]) -> None:
    """Call a function before the groups are destroyed; it releases what still uses them."""
    _at_leave.append(release)


def running_placement(device: torch.device, ranks: int) -> Placement:
    """Where the processes run, and how much memory those of a host can share now; all must call, unless one rank is alone."""
    kind = "cpu" if device.type == "cpu" else "gpu"
    if ranks == 1:
        return Placement.one_host(1, kind)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (shareable_host(), kind, free_bytes()))
    hosts, devices, rooms = zip(*found, strict=True)
    numbers = {host: k for k, host in enumerate(dict.fromkeys(hosts))}
    return Placement(hosts=tuple(numbers[host] for host in hosts), devices=devices, shared_bytes=min(rooms))


def placement_of_run(ranks: int, kind: str = "cpu") -> Placement:
    """`running_placement` of this run's processes, each on its own device of a kind."""
    return running_placement(own_device(kind), ranks)


def leave() -> None:
    """Destroy all groups and end their threads while the interpreter still runs. A thread that frees a message after the
    interpreter has begun to shut down crashes the process: of twenty pipelines under torchrun, four ended so."""
    for release in _at_leave:
        release()
    _worlds.clear()
    _stage_worlds.clear()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _new_groups(mesh: Mesh, ranks: tuple[int, ...], axes: tuple[str, ...]) -> list[Any]:
    """For each member of a mesh, its group of ranks along the axes; all processes must call."""
    groups: dict[tuple[int, ...], Any] = {}
    for k in range(mesh.size):
        members = mesh.group(k, axes)
        if members not in groups:
            groups[members] = dist.new_group([ranks[m] for m in members], timeout=TIMEOUT)
    return [groups[mesh.group(k, axes)] for k in range(mesh.size)]


def _subsets(mesh: Mesh) -> list[tuple[str, ...]]:
    """Every choice of axes that joins more than one rank."""
    sizes = range(1, len(mesh.names) + 1)
    found = [axes for size in sizes for axes in itertools.combinations(mesh.names, size)]
    return [axes for axes in found if any(mesh.extent(axis) > 1 for axis in axes)]
