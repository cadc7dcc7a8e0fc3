"""The table of odd modules by strategies on two ranks, each against a plain PyTorch loop written here.

    python tests/support/odd_modules.py                      the whole table, a line each, faults at the end
    python tests/support/odd_modules.py --only Hook --no-verify --strategies data,filter

Each row is planned, split and trained for three steps through the public interface. Losses, parameters and buffers must
equal those of the plain loop in the modes the user set, or the row is refused by an `Error` of one line that names the thing.
Planning must leave module and generators as they were. `verify` may raise no false alarm and miss nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fourfold as ff
import fourfold.report.ranking  # the first import of rich draws from `random`
import odd_gradients
import odd_kinds
import odd_state
from fourfold.errors import Error, WorkerFailed
from odd_row import EITHER, EQUAL, REFUSED, ROWS, RUNS, WIDE, WIDTH, Inputs, Loss, Row, mean_square, none, odd
from ranks import close_pools, pool

__all__ = ["ROWS", "odd_gradients", "odd_kinds", "odd_state"]

RANKS, STEPS = 2, 3
STRATEGIES = ("data", "filter", "pipeline")
State = dict[str, Tensor]


@dataclass(kw_only=True)
class Run:
    """Three steps: losses, and the state before and after. `changed`: what planning left changed in the user's world."""

    losses: list[float]
    start: State
    state: State
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An exception before the first step; `error` is False for those that are none of ours."""

    text: str
    error: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a row: one of equal, refused, DIFFERENT, CRASH, CHANGED, and the reason."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def sgd(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.05, momentum=0.9)


def seed_all() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def called(model: nn.Module, inputs: Inputs) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def kept(state: Mapping[str, Tensor]) -> State:
    return {key: tensor.detach().clone() for key, tensor in state.items() if isinstance(tensor, Tensor)}


def plain_run(row: Row, start: State | None = None) -> Run:
    """The loop anyone would write."""
    model, loss = row.made()
    if start is not None:
        model.to_empty(device="cpu").load_state_dict(start)
    start = kept(model.state_dict())
    own = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    trained = [p for p in (*model.parameters(), *own) if p.requires_grad]
    optimizer = sgd(trained) if trained else None
    losses = []
    seed_all()
    for step in range(STEPS):
        inputs, targets = row.data(step)
        value = loss(called(model, inputs), *targets)
        if optimizer is not None:
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        losses.append(float(value))
    return Run(losses=losses, start=start, state=kept(model.state_dict()))


def strategy_of(row: Row, strategy: str) -> str:
    return f"pipeline:microbatches={row.microbatches}" if strategy == "pipeline" else strategy


def split_run(name: str, strategy: str) -> Run | Refusal:
    """On a rank: the same by the public interface. What goes wrong before the first step, all ranks see alike."""
    row = ROWS[name]
    torch.set_num_threads(1)
    if row.split is not None:
        return row.split(strategy)  # type: ignore[no-any-return]
    model, loss = row.made()
    inputs, targets = row.data(0)
    refused, changed = None, []
    seed_all()
    before = snapshot(model)
    try:
        plan = ff.plan(model, inputs, targets=targets, loss=loss, strategy=strategy_of(row, strategy), devices=RANKS).best
        changed = changes(before, snapshot(model))
        run = ff.parallelize(model, plan, loss=loss, optimizer=lambda named: sgd([p for _, p in named]))
    except Exception as error:
        refused = refusal(error)
    if said := any_rank(refused):
        return said
    start = kept(run.state_dict())
    seed_all()
    losses = []
    for step in range(STEPS):
        inputs, targets = row.data(step)
        losses.append(float(run.step(*(inputs.values() if isinstance(inputs, Mapping) else inputs), *targets)))
    return Run(losses=losses, start=start, state=kept(run.state_dict()), changed=changed)


def refusal(error: Exception) -> Refusal:
    ours = isinstance(error, Error) and not isinstance(error, WorkerFailed)
    return Refusal(text=str(error) if ours else f"{type(error).__name__}: {error}", error=ours)


def any_rank(refused: Refusal | None) -> Refusal | None:
    """What any rank refused, so that none begins to step and waits for one that does not."""
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, refused)
    said = [part for part in parts if part is not None]
    alone = "" if len(said) == RANKS else f" (on rank {parts.index(said[0])} alone)" if said else ""
    return Refusal(text=said[0].text + alone, error=said[0].error) if said else None


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that planning has no business to change: attributes, tensors and generators."""
    out: dict[str, Any] = {"torch's generator": torch.get_rng_state().numpy().tobytes(), "random": random.getstate(),
                           "numpy's generator": np.random.get_state()[1].tobytes()}  # type: ignore[union-attr]  # fmt: skip
    for path, module in model.named_modules():
        out.update({f"{path}.{key}".removeprefix("."): frozen(value) for key, value in vars(module).items()})
    return out


def frozen(value: Any) -> Any:
    """A value to compare later: tensors and containers by identity too, since others may hold them."""
    if isinstance(value, Tensor):
        real = type(value) in (Tensor, nn.Parameter) and not value.is_meta
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if real else None
        return id(value), type(value), value.requires_grad, value.is_leaf and value.grad is None, content
    if isinstance(value, Mapping):
        return id(value), {str(key): frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return 0 if isinstance(value, tuple) else id(value), [frozen(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key, "absent") != after.get(key, "absent")]


def outcome(row: Row, strategy: str) -> Outcome:
    """A row by one strategy, judged."""
    try:
        got, *rest = pool(RANKS)(split_run, row.name, strategy)
    except WorkerFailed as error:
        return Outcome(kind="CRASH", text=last_line(str(error)))
    except Error as error:
        got, rest = Refusal(text=str(error), error=True), []
    if isinstance(got, Refusal):
        return Outcome(kind="refused" if got.error else "CRASH", text=got.text)
    want = wanted(row, got)
    if isinstance(want, str):
        return Outcome(kind="DIFFERENT", text=f"eager raises {want}; the run does not")
    faults = [found for run in (got, *rest) if (found := unlike(row, want, run))]
    if faults:
        return Outcome(kind="DIFFERENT", text=faults[0])
    return Outcome(kind="CHANGED", text=", ".join(got.changed[:4])) if got.changed else Outcome(kind="equal")


def wanted(row: Row, got: Run) -> Run | str:
    """The plain run, from the split run's start where the module has no values of its own; or what it raises."""
    if any(tensor.is_meta for tensor in row.made()[0].state_dict().values()):
        return plain_run(row, got.start)
    return plain(row.name)


@cache
def plain(name: str) -> Run | str:
    row = ROWS[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return row.plain() if row.plain is not None else plain_run(row)
    except Exception as error:
        return f"{type(error).__name__}: {last_line(str(error))}"


def unlike(row: Row, want: Run, got: Run) -> str:
    """The first thing in which a run is not as it must be, or nothing."""
    if list(got.state) != list(want.state):
        return f"the state_dicts differ in their keys {sorted(set(got.state) ^ set(want.state))}, or in the order of them"
    if row.expect == RUNS:
        return not_run(want, got)
    pairs = [torch.tensor(pair, dtype=torch.float64) for pair in zip(got.losses, want.losses, strict=True)]
    off = [distance(*pair) / (float(pair[1].abs().nan_to_num(1, 1)) or 1.0) for pair in pairs]
    if off[0] > row.first or max(off) > row.tolerance:
        return f"losses {shown(got.losses)}, eager {shown(want.losses)}"
    unit = max((distance(want.state[key], want.start[key]) for key in want.state), default=0.0) or 1.0
    unit = unit if math.isfinite(unit) else 1.0
    for key, value in want.state.items():
        error = distance(got.state[key], value) / unit
        if error > (row.tolerance if value.is_floating_point() or value.is_complex() else 0.0):
            return f"{key} is off by {error:.1e} of the largest change, {row.tolerance:.0e} allowed"
    return ""


def not_run(want: Run, got: Run) -> str:
    """Of a run that draws at random: finite losses, and the tensors that train have moved, the others not."""
    if not all(map(math.isfinite, got.losses)):
        return f"losses {shown(got.losses)}"
    for key, value in want.state.items():
        moved, should = distance(got.state[key], got.start[key]) > 0, distance(value, want.start[key]) > 0
        if moved != should or not bool(got.state[key].isfinite().all()):
            return f"{key} was {'' if moved else 'not '}trained, eager does {'' if should else 'not'}"
    return ""


def distance(got: Tensor, want: Tensor) -> float:
    """The largest difference; NaN and infinities must be in the same places."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    kind = torch.complex128 if got.is_complex() else torch.float64
    same = (got == want) | (got.isnan() & want.isnan())
    apart = (got.to(kind) - want.to(kind)).abs().masked_fill(same, 0).nan_to_num(math.inf, math.inf)
    return float(apart.max()) if apart.numel() else 0.0


def shown(losses: list[float]) -> str:
    return " ".join(f"{loss:.6g}" for loss in losses)


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def fault(row: Row, found: Outcome) -> str:
    """Why an outcome is not what the row expects, or nothing."""
    if found.kind == "refused":
        if row.expect == EQUAL:
            return "must be equal"
        if "\n" in found.text:
            return "the refusal is more than one line"
        return "" if row.word in found.text else f"the refusal does not say '{row.word}'"
    if found.kind == "equal":
        return "must be refused" if row.expect == REFUSED else ""
    return f"must be {'equal or refused' if row.expect == EITHER else row.expect}"


def case(row: str) -> tuple[nn.Module, Inputs, tuple[Tensor, ...], Loss]:
    """A row for `verify`, which takes models by text."""
    model, loss = ROWS[row].made()
    return model, *ROWS[row].data(0), loss


def verified(row: Row, strategy: str = "data") -> Outcome:
    """What `verify` says of a row: the capture against eager first, as the command does."""
    from fourfold.runs.capture_check import refuse_unfaithful
    from fourfold.runs.reference import Reference
    from fourfold.runs.verify import verify
    from fourfold.workload.workload import load_workload

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_all()
            seen = load_workload(f"odd_modules:case,row={row.name}")
            refuse_unfaithful(seen)
            plan = seen.plan(strategy, ranks=RANKS)
            verdict = verify(seen, plan, pool(RANKS), reference=Reference(workload=seen, optimizer="momentum"))
    except WorkerFailed as error:
        return Outcome(kind="CRASH", text=last_line(str(error)))
    except Error as error:
        return Outcome(kind="refused", text=str(error))
    except Exception as error:
        return Outcome(kind="CRASH", text=f"{type(error).__name__}: {last_line(str(error))}")
    assert verdict is not None
    if verdict.equal:
        return Outcome(kind="equal", text=verdict.reference)
    if verdict.bad_step is not None:
        return Outcome(kind="NaN", text=f"step {verdict.bad_step}")
    at = verdict.worst
    return Outcome(kind="UNEQUAL", text=f"{at.what} {at.tensor} {at.error:.1e} > {at.limit:.1e} ({verdict.reference})")


def verify_fault(run: Outcome, said: Outcome) -> str:
    """Where `verify` and the run by the same strategy, judged by the plain loop, do not agree."""
    truth = "equal" if run.kind == "CHANGED" else run.kind
    if said.kind == "CRASH":
        return "verify crashed"
    if truth == "equal" and said.kind == "UNEQUAL":
        return "a false alarm"
    if truth == "DIFFERENT" and said.kind == "equal":
        return "a false EQUAL"
    if truth == "refused" and said.kind != "refused":
        return "refused when run, not when verified"
    return ""


def to_one(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def gan_plain() -> Run:
    """A step of the critic, then one of the generator."""
    pair, _ = ROWS["TwoParallels"].made()
    start, losses = kept(pair.state_dict()), []
    critic, generator = sgd(list(pair.d.parameters())), sgd(list(pair.g.parameters()))
    for step in range(STEPS):
        (x,), _ = ROWS["TwoParallels"].data(step)
        for optimizer, loss in ((critic, lambda x: mean_square(pair.d(x))), (generator, lambda x: to_one(pair(x)))):
            pair.zero_grad()
            value = loss(x)
            value.backward()
            optimizer.step()
            losses.append(float(value))
    return Run(losses=losses, start=start, state=kept(pair.state_dict()))


def gan_split(strategy: str) -> Run | Refusal:
    """The critic split by itself and the pair split once more: both train the same weights."""
    row = ROWS["TwoParallels"]
    pair, _ = row.made()
    (x,), _ = row.data(0)

    def of_generator(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return sgd([p for name, p in named if name.startswith("g.")] or [torch.zeros(0, requires_grad=True)])

    def split(model: nn.Module, loss: Loss, optimizer: Any) -> Any:
        plan = ff.plan(model, (x,), loss=loss, strategy=strategy_of(row, strategy), devices=RANKS).best
        return ff.parallelize(model, plan, loss=loss, optimizer=optimizer)

    refused = None
    try:
        critic = split(pair.d, mean_square, lambda named: sgd([p for _, p in named]))
        generator = split(pair, to_one, of_generator)
    except Exception as error:
        refused = refusal(error)
    if said := any_rank(refused):
        return said
    start, losses = kept(generator.state_dict()), []
    for step in range(STEPS):
        (x,), _ = row.data(step)
        losses += [float(critic.step(x)), float(generator.step(x))]
    return Run(losses=losses, start=start, state=kept(generator.state_dict()))


@odd(EITHER, "Parallel", targets=none, loss=lambda: to_one, plain=gan_plain, split=gan_split)
class TwoParallels(nn.Module):
    """Two Parallels on shared weights, as a GAN has them: a critic by itself, and a generator before it."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDTH))
        self.d = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.g(x))


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains one of these texts, with commas between")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--no-verify", action="store_true")
    options = parser.parse_args()
    chosen = [row for row in ROWS.values() if any(text in row.name for text in options.only.split(","))]
    faults: list[str] = []
    begun = time.monotonic()
    count: dict[str, int] = {}

    def show(what: str, found: Outcome, wrong: str, since: float) -> None:
        count[found.kind] = count.get(found.kind, 0) + 1
        line = f"{what:42s} {found}"
        faults.extend([f"{line}  <-- {wrong}"] if wrong else [])
        print(f"{line} ({time.monotonic() - since:.1f} s){'  <-- ' + wrong if wrong else ''}", flush=True)

    with quiet():
        for row in chosen:
            outcomes = {}
            for strategy in options.strategies.split(","):
                since = time.monotonic()
                found = outcomes[strategy] = outcome(row, strategy)
                show(f"{row.name} | {strategy}", found, fault(row, found), since)
            if "data" in outcomes and not options.no_verify and row.split is None:
                since = time.monotonic()
                said = verified(row)
                show(f"{row.name} | verify", said, verify_fault(outcomes["data"], said), since)
    print(f"\n{len(chosen)} rows in {time.monotonic() - begun:.0f} s: {', '.join(f'{n} {k}' for k, n in count.items())}")
    print(f"{len(faults)} faults:", *faults, sep="\n  ")
    close_pools()
    return 1 if faults else 0


if __name__ == "__main__":
    os.environ.setdefault("FOURFOLD_TIMEOUT", "20")
    sys.modules["odd_modules"] = sys.modules["__main__"]
    sys.exit(main())
