"""Random plans with stages, without graphs: stages of any size on meshes of their own, tensors laid anyhow that skip stages,
ties, every schedule that runs; and the play of their messages under NCCL's rules.

    python tests/support/message_plans.py --plans 10000 --seed 0

Each must end with every message at its own; then a fault is planted in it, which must be found. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from fourfold.plans import Plan
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.lists.lowered_plan import LoweredPlan, TiedGradient
from fourfold.plans.lists.order.message_order import message_fault, passes_in_one_stream, play, rank_calls
from fourfold.plans.lists.order.stage_calls import Call, Entry
from fourfold.plans.lists.stage_transfer import StageTensor
from fourfold.plans.lowering.stages import Crossing, Cut
from fourfold.plans.spec.plan import Stage
from layouts import laid

SCHEDULES = ("gpipe", "1f1b-sno", "1f1b-so", "interleaved")
Lists = dict[int, list[Entry]]


@dataclass(frozen=True, kw_only=True)
class Drawn(LoweredPlan):
    """A lowered plan of which nothing is known but its stages and what passes between them, laid at random."""

    seed: str
    laid_tensors: dict[tuple[Any, ...], StageTensor] = field(default_factory=dict)

    def stage_tensor(self, stage: int, value: str, size: int) -> StageTensor:
        return self._laid(stage, value, size)

    def stored_tensor(self, stage: int, name: str) -> StageTensor:
        return self._laid(stage, name, 0)

    def _laid(self, stage: int, name: str, size: int) -> StageTensor:
        key = stage, name, size
        if key not in self.laid_tensors:
            shape_dice, dice = random.Random(f"{self.seed} {name} {size}"), random.Random(f"{self.seed} {key}")
            shape, home = [shape_dice.randint(1, 6) for _ in range(shape_dice.randint(1, 3))], self.plan.parts[stage]
            self.laid_tensors[key] = StageTensor(laid(dice, home.mesh, shape), home.mesh, home.ranks)
        return self.laid_tensors[key]

    @cached_property
    def last(self) -> Any:
        return self.parts[-1]

    @cached_property
    def ties(self) -> tuple[TiedGradient, ...]:
        found = [(name, owner, other) for name, (owner, *others) in self.cut.tied.items() for other in others]
        return tuple(t for n, a, b in found for t in (TiedGradient(n, b, a, add=True), TiedGradient(n, a, b, add=False)))


def staged_plan(stages: list[Stage], microbatches: int, schedule: str, batch: int) -> Plan:
    return Plan(graph="", batch=batch, mesh=stages[0].mesh, stages=tuple(stages), microbatches=microbatches, schedule=schedule)


def lowered_as(plan: Plan, cut: Cut, seed: str) -> Drawn:
    parts: Any = tuple(SimpleNamespace(index=k, stage=stage) for k, stage in enumerate(plan.stages))
    return Drawn(plan=plan, graph=None, loss=None, parts=parts, cut=cut, counts={}, seed=seed)  # type: ignore[arg-type]


def chain(stages: int, microbatches: int, schedule: str, ranks: int = 1) -> Drawn:
    """Equal stages, one tensor from each to the next."""
    mesh = Mesh.of(data=ranks)
    each = [Stage(first=f"op{k}", ranks=tuple(range(k * ranks, (k + 1) * ranks)), mesh=mesh) for k in range(stages)]
    crossings = tuple(Crossing(value=f"v{k}", source=k, target=k + 1, gradient=True) for k in range(stages - 1))
    plan = staged_plan(each, microbatches, schedule, microbatches * ranks)
    return lowered_as(plan, Cut(graphs=(), crossings=crossings, tied={}, live=frozenset()), "chain")


def drawn(seed: str) -> Drawn:
    """A random plan of at least two stages."""
    dice = random.Random(seed)
    schedule = dice.choice(SCHEDULES)
    chunks = dice.randint(1, 3) if schedule == "interleaved" else 1
    places = dice.randint(2 if chunks == 1 else 1, 4)
    meshes = [_mesh(dice) for _ in range(places)]
    everyone = list(range(sum(mesh.size for mesh in meshes)))
    if dice.random() < 0.3:
        dice.shuffle(everyone)
    ranks = [tuple(everyone.pop(0) for _ in range(mesh.size)) for mesh in meshes]
    count = places * chunks
    stages = [Stage(first=f"op{k}", ranks=ranks[k % places], mesh=meshes[k % places]) for k in range(count)]
    microbatches = dice.randint(1, 3) * places if schedule == "interleaved" else dice.randint(1, 7)
    plan = staged_plan(stages, microbatches, schedule, microbatches * dice.randint(1, 2) + dice.randint(0, microbatches - 1))
    return lowered_as(plan, _cut(dice, count), seed)


def _mesh(dice: random.Random) -> Mesh:
    return Mesh(tuple((name, dice.choice([1, 1, 2, 2, 3])) for name in "ab"[: dice.choice([1, 1, 2])]))


def _cut(dice: random.Random, stages: int) -> Cut:
    found: list[Crossing] = []
    for source in range(stages):
        for value in range(dice.randint(1, 3)):
            targets = [t for t in range(source + 1, stages) if dice.random() < (0.8 if t == source + 1 else 0.15)]
            gradient = dice.random() < 0.8
            found += [Crossing(value=f"v{source}.{value}", source=source, target=t, gradient=gradient) for t in targets]
    found.sort(key=lambda c: c.target)
    tied = {f"tied{k}": tuple(sorted(dice.sample(range(stages), dice.randint(2, min(3, stages)))))
            for k in range(dice.choice([0, 0, 1, 2]))}  # fmt: skip
    return Cut(graphs=(), crossings=tuple(found), tied=tied, live=frozenset())


# --- planted faults ---


def swapped(lists: Lists, dice: random.Random) -> Lists | None:
    """Two receives of one communicator change places on one rank. Without a common peer nothing would be wrong."""
    found = []
    for rank, entries in lists.items():
        known: dict[Any, list[int]] = {}
        for k, entry in enumerate(entries):
            if isinstance(entry, Call) and entry.parts and not any(part.sends for part in entry.parts):
                known.setdefault(entry.boundary, []).append(k)
        alike = [(a, b) for places in known.values() for a, b in pairwise(places)]
        found += [(rank, a, b) for a, b in alike if _peers(entries[a]) & _peers(entries[b])]
    if not found:
        return None
    rank, a, b = dice.choice(found)
    row = list(lists[rank])
    row[a], row[b] = row[b], row[a]
    return {**lists, rank: row}


def _peers(entry: Entry) -> set[int]:
    return {part.peer for part in entry.parts} if isinstance(entry, Call) else set()


def dropped(lists: Lists, dice: random.Random) -> Lists | None:
    """One part of a send is missing."""
    found = [(rank, k, entry, part) for rank, entries in lists.items() for k, entry in enumerate(entries)
             if isinstance(entry, Call) for part in entry.parts if part.sends]  # fmt: skip
    if not found:
        return None
    rank, k, entry, part = dice.choice(found)
    less = entry._replace(parts=tuple(p for p in entry.parts if p is not part))
    return {**lists, rank: [*lists[rank][:k], less, *lists[rank][k + 1 :]]}


def delayed(lists: Lists, dice: random.Random) -> Lists | None:
    """The sends of a forward stand behind its rank's first wait for a gradient that depends on them."""
    found = []
    for rank, entries in lists.items():
        for k, entry in enumerate(entries):
            if not (isinstance(entry, Call) and entry.boundary.way == "F" and any(part.sends for part in entry.parts)):
                continue
            back = entry.boundary._replace(way="B", source=entry.boundary.target, target=entry.boundary.source)
            waits = [n for n, e in enumerate(entries) if not isinstance(e, Call) and (back, entry.number) in e.waits]
            replies = {p.peer for e in entries if isinstance(e, Call) and e.key == (back, entry.number) for p in e.parts}
            if waits and waits[0] > k and replies:
                found.append((rank, k, waits[0]))
    if not found:
        return None
    rank, k, n = dice.choice(found)
    row = list(lists[rank])
    row.insert(n, row.pop(k))
    return {**lists, rank: row}


def resized(lists: Lists, dice: random.Random) -> Lists | None:
    """One message is expected with another size, or as that of another micro-batch."""
    found = [(rank, k, entry, p) for rank, entries in lists.items() for k, entry in enumerate(entries)
             if isinstance(entry, Call) for p, part in enumerate(entry.parts) if not part.sends]  # fmt: skip
    if not found:
        return None
    rank, k, entry, p = dice.choice(found)
    was = entry.parts[p].message
    now = was._replace(elements=was.elements + 1) if dice.random() < 0.5 else was._replace(number=was.number + 1)
    parts = [part._replace(message=now) if n == p else part for n, part in enumerate(entry.parts)]
    other = entry._replace(parts=tuple(parts))
    return {**lists, rank: [*lists[rank][:k], other, *lists[rank][k + 1 :]]}


FAULTS = {"swapped": swapped, "dropped": dropped, "delayed": delayed, "resized": resized}


def main() -> None:
    reader = argparse.ArgumentParser()
    reader.add_argument("--plans", type=int, default=10_000)
    reader.add_argument("--seed", type=int, default=0)
    asked = reader.parse_args()
    count, wrong, spent = Counter[str](), [], 0.0
    for number in range(asked.plans):
        name = f"{asked.seed} {number}"
        plan, dice = drawn(name), random.Random(f"faults {name}")
        lists = rank_calls(plan)
        begun = time.perf_counter()
        fault = message_fault(plan)
        spent += time.perf_counter() - begun
        count["calls"] += sum(isinstance(entry, Call) for entries in lists.values() for entry in entries)
        count["in one stream"] += passes_in_one_stream(plan)
        count[plan.plan.schedule] += 1
        wrong += [f"{name}: {found}" for found in (fault, play(lists)) if found]
        for kind, plant in FAULTS.items():
            planted = plant(lists, dice)
            count[f"{kind} planted"] += planted is not None
            if planted is not None and not play(planted):
                wrong.append(f"{name}: {kind}, and not found")
    print(f"{asked.plans} plans (seed {asked.seed}), {spent / asked.plans * 1e3:.2f} ms each to check: {len(wrong)} wrong")
    print(", ".join(f"{n} {kind}" for kind, n in sorted(count.items())))
    for line in wrong[:20]:
        print(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
