"""Plans timed on real ranks, step by step in turn, with what each holds; beside them, where asked for, torch's DDP.

On local ranks, or on hosts with slow links between them: there it is a program on each host, under torchrun.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fourfold.files import json_text, write_file
from fourfold.models import Example
from fourfold.plans import Options
from fourfold.reproduce.hosts import hosts
from fourfold.runs.train import forget, holding, one_step, start
from fourfold.runtime.execution.optimizers import optimizer_named
from fourfold.runtime.host.launch import LocalRanks
from fourfold.runtime.host.scratch import temporary_paths
from fourfold.runtime.rank_pool import TorchrunRanks, is_leader, rank_pool
from fourfold.workload.workload import Workload, load_workload

DDP = "ddp"
OPTIMIZER = "momentum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A strategy under a name, or DDP."""

    name: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A model and its batch, who takes part, and how many steps each takes after a first that is not timed."""

    model: str
    batch: int
    contenders: tuple[Contender, ...]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A contender's steps, each that of the slowest rank, and the bytes of the fullest rank by what they are."""

    seconds: tuple[float, ...]
    held: Mapping[str, int]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def local(race: Race, ranks: int) -> dict[str, Outcome]:
    """The race on ranks of this machine."""
    with rank_pool(ranks) as team:
        return run(race, team)


def between(race: Race, *, count: int, rate: str) -> dict[str, Outcome]:
    """The race on so many hosts; refuses where they cannot be made."""
    with hosts(count=count, rate=rate) as each, temporary_paths(1) as (file,):
        each([sys.executable, "-m", "fourfold.reproduce.race", json.dumps(asdict(race)), str(file)], timeout=600)
        found = json.loads(file.read_text())
    return {name: Outcome(seconds=tuple(data["seconds"]), held=data["held"]) for name, data in found.items()}


def run(race: Race, team: LocalRanks | TorchrunRanks) -> dict[str, Outcome]:
    """All contenders' steps in turn."""
    seen = load_workload(race.model, batch=race.batch)
    for contender in race.contenders:
        _start(contender, seen, team)
    times: dict[str, list[float]] = {contender.name: [] for contender in race.contenders}
    for step in range(race.steps + 1):
        for contender in race.contenders:
            answers = team(one_step if contender.strategy != DDP else peer_step, step, contender.name)
            if step:
                times[contender.name].append(max(spent for _, spent in answers))
    held = {c.name: _fullest(team(holding, c.name)) for c in race.contenders if c.strategy != DDP}
    return {name: Outcome(seconds=tuple(steps), held=held.get(name, {})) for name, steps in times.items()}


def _start(contender: Contender, seen: Workload, team: LocalRanks | TorchrunRanks) -> None:
    if contender.strategy == DDP:
        team(begin_peer, seen.example, [seen.graph.batch_dim(name) for name in (*seen.graph.inputs, *seen.graph.targets)])
        return
    plan = seen.plan(contender.strategy, ranks=team.count, options=Options(**contender.options))
    start(seen, plan, team, optimizer=OPTIMIZER, name=contender.name)


def _fullest(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return dict(max(ranks, key=lambda held: held["peak"]))


class Peer:
    """This rank's share under torch's DistributedDataParallel: its part of the examples."""

    def __init__(self, example: Example, dims: Sequence[int | None]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.module = DistributedDataParallel(example.module)
        self.loss = example.loss
        mine = [x if d is None else x.tensor_split(size, d)[rank] for x, d in zip(example.tensors, dims, strict=True)]
        self.inputs, self.targets = mine[: len(example.inputs)], mine[len(example.inputs) :]
        self.optimizer = optimizer_named(OPTIMIZER)(list(self.module.parameters()))

    def step(self) -> tuple[float, float]:
        dist.barrier()
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        made = self.module(*self.inputs)
        loss: Tensor = self.loss(made, *self.targets) if self.loss is not None else made
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()), time.perf_counter() - begun


_peer: list[Peer] = []  # of this process


def begin_peer(example: Example, dims: Sequence[int | None]) -> None:
    _peer[:] = [Peer(example, dims)]


def peer_step(number: int, name: str) -> tuple[float, float]:
    """One step of DDP."""
    return _peer[0].step()


def main() -> None:
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    race = Race(**{**asked, "contenders": tuple(Contender(**c) for c in asked["contenders"])})
    with rank_pool(None) as team:
        found = run(race, team)
        forget()
        _peer.clear()
    if is_leader():
        write_file(Path(sys.argv[2]), json_text({name: asdict(outcome) for name, outcome in found.items()}))


if __name__ == "__main__":
    main()
