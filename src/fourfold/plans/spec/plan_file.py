"""Plans as JSON files, with a format version. A file is data: it is checked key by key and within bounds, before anything of
the size it speaks of is built, and nothing that it names is imported or called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.errors import Error, InvalidInput
from fourfold.files import json_text, parse_json, read_text, write_file
from fourfold.graph.spec import ITEM_BYTES
from fourfold.plans.layout.mesh import Mesh
from fourfold.plans.spec.plan import WILD, Passes, Plan, Segment, Stage
from fourfold.plans.spec.policy import BOUNDS, Policy
from fourfold.table import NAME, Table

VERSION = 1
MOST_RANKS = 2**16  # more than any model was trained on
MOST_BATCH = 2**40  # as far as models are captured
MOST_STAGES = 2_000
MOST_TURNS = 2**16  # of a schedule, stages times (micro-batches + stages), as 64 stages and 960 micro-batches
MOST_AXES = 16
MOST_RULES, MOST_WILD = 20_000, 200  # those with wildcards are tried on every op
MOST_SEGMENTS = 10_000
MOST_PASSES = 256  # all together; each is lowered by itself
OP = 1_000  # characters of an op's path, or of a pattern
KEYS = (
    "version",
    "model",
    "strategy",
    "graph",
    "batch",
    "mesh",
    "stages",
    "microbatches",
    "schedule",
    "recompute",
    "zero",
    "policy",
    "inputs",
    "splits",
    "passes",
    "notes",
    "signature",
    "made_for",
)
REMEDY = "write it with `fourfold plan -o`"


def save_plan(plan: Plan, path: Path, *, made_for: Mapping[str, str] | None = None) -> None:
    """Write a plan; `made_for`: the cluster, precision and optimizer it was chosen for, which `explain` asks for."""
    data = plan_data(plan) | ({"made_for": dict(made_for)} if made_for is not None else {})
    text = json_text(data, indent=2)
    _plan(_table(text, path))  # what is written can be read
    write_file(path, text)


def load_plan(path: Path) -> Plan:
    """The plan of a file, or of an answer of the command line that has one inside."""
    return read_plan(path)[0]


def read_plan(path: Path) -> tuple[Plan, dict[str, str]]:
    """The plan of a file, and what it was made for: texts under cluster, precision and optimizer, as far as it says."""
    try:
        text = read_text(path)
    except OSError as error:
        raise InvalidInput(f"cannot read plan {path}: {error.strerror}") from error
    table = _table(text, path)
    try:
        return _plan(table), _made_for(table)
    except Error as error:
        said = str(error)
        raise InvalidInput(said if said.startswith(f"{path}: ") else f"{path}: {said}") from None


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan as its file has it."""
    return {
        "version": VERSION,
        "model": plan.model,
        "strategy": plan.strategy,
        "graph": plan.graph,
        "batch": plan.batch,
        "mesh": dict(plan.mesh.axes),
        "stages": [{"first": s.first, "ranks": list(s.ranks), "mesh": dict(s.mesh.axes)} for s in plan.stages],
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "recompute": [{"first": s.first, "last": s.last} for s in plan.recompute],
        "zero": plan.zero,
        "policy": plan.policy.changes(),
        "inputs": dict(plan.inputs),
        "splits": [{"op": pattern, **by_axis} for pattern, by_axis in plan.splits],
        "passes": [{"first": p.first, "last": p.last, "count": p.count, "axis": p.axis} for p in plan.passes],
        "notes": list(plan.notes),
        "signature": dict(plan.signature),
    }


def _table(text: str, path: Path) -> Table:
    """The whole file; of an answer of the command line, the plan inside it."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise InvalidInput(f"plan {path} is not valid JSON: {error}; write it again with `fourfold plan -o`") from None
    if isinstance(data, dict) and "plan" in data and "mesh" not in data:
        data = data["plan"]
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: is not a plan: no JSON object; {REMEDY}")
    return Table(str(path), "", data)


def _plan(table: Table) -> Plan:
    if not {"version", "graph"} & set(table.data):
        raise InvalidInput(f"{table.file}: is not a plan: it has neither version nor graph; {REMEDY}")
    if (version := table.whole("version")) != VERSION:
        raise InvalidInput(f"{table.file}: plan file version {version}, this Fourfold reads {VERSION}; plan it again")
    table.check(KEYS)
    mesh = _mesh(table, "mesh")
    stages = tuple(_stage(entry, mesh) for entry in table.tables("stages", most=MOST_STAGES))
    microbatches = table.whole("microbatches", 1, least=0, most=MOST_BATCH)
    turns = max(1, len(stages)) * (microbatches + len(stages))
    if turns > MOST_TURNS:
        table.fail(
            "microbatches",
            f"is {microbatches}, with {len(stages)} stages that is a schedule of {turns:,} turns; "
            f"at most {MOST_TURNS:,} are read",
        )
    return Plan(
        graph=table.text("graph", most=NAME),
        batch=table.whole("batch", least=0, most=MOST_BATCH),
        mesh=mesh,
        strategy=table.text("strategy", "by hand", most=NAME),
        model=table.text("model", ""),
        inputs=_named(table.table("inputs"), MOST_AXES),
        splits=_splits(table),
        passes=_passes(table),
        stages=stages,
        microbatches=microbatches,
        schedule=table.text("schedule", "1f1b-sno", most=NAME),
        recompute=tuple(_segment(entry) for entry in table.tables("recompute", most=MOST_SEGMENTS)),
        zero=table.whole("zero", 0, least=0),
        policy=_policy(table.table("policy")),
        notes=table.texts("notes"),
        signature=_signature(table.table("signature")),
    )


def _policy(table: Table) -> Policy:
    table.check(tuple(BOUNDS))
    return Policy(**{key: table.whole(key, least=BOUNDS[key][0], most=BOUNDS[key][1]) for key in table.names()})


def _mesh(table: Table, key: str) -> Mesh:
    if key not in table.data:
        table.fail(key, "is missing")
    sizes = table.table(key)
    axes = tuple((name, sizes.whole(name, least=0, most=MOST_RANKS)) for name in sizes.names(most=MOST_AXES))
    mesh = Mesh(axes)
    if not axes or any(size < 1 for _, size in axes):
        table.fail(key, f"{dict(axes)} needs at least one axis, each of size 1 or more")
    if "op" in mesh.names:
        table.fail(key, "has an axis 'op', which splits say their ops by; name it otherwise")
    if math.prod(size for _, size in axes) > MOST_RANKS:
        table.fail(key, f"{mesh} has {mesh.size:,} ranks, at most {MOST_RANKS:,} are read")
    return mesh


def _stage(table: Table, mesh: Mesh) -> Stage:
    table.check(("first", "ranks", "mesh"))
    if "ranks" not in table.data:
        table.fail("ranks", "is missing")
    ranks = table.integers("ranks", most=MOST_RANKS, count=MOST_RANKS)
    return Stage(first=table.text("first", most=OP), ranks=ranks, mesh=_mesh(table, "mesh") if "mesh" in table.data else mesh)


def _splits(table: Table) -> tuple[tuple[str, Mapping[str, str]], ...]:
    entries = table.tables("splits", most=MOST_RULES)
    found = tuple(
        (entry.text("op", most=OP), {a: s for a, s in _named(entry, MOST_AXES + 1).items() if a != "op"}) for entry in entries
    )
    wild = sum(bool(WILD & set(pattern)) for pattern, _ in found)
    if wild > MOST_WILD:
        table.fail("splits", f"has {wild:,} patterns with wildcards, at most {MOST_WILD} are read; name the ops")
    return found


def _passes(table: Table) -> tuple[Passes, ...]:
    found = tuple(_run(entry) for entry in table.tables("passes", most=MOST_PASSES))
    if (count := sum(run.count for run in found)) > MOST_PASSES:
        table.fail("passes", f"are {count:,} all together, at most {MOST_PASSES} are read")
    return found


def _run(table: Table) -> Passes:
    table.check(("first", "last", "count", "axis"))
    count = table.whole("count", least=0)
    first, last = table.text("first", most=OP), table.text("last", most=OP)
    return Passes(first=first, last=last, count=count, axis=table.text("axis", most=NAME))


def _segment(table: Table) -> Segment:
    table.check(("first", "last"))
    return Segment(first=table.text("first", most=OP), last=table.text("last", most=OP))


def _named(table: Table, most: int) -> dict[str, str]:
    """A table of texts."""
    return {name: table.text(name, most=OP) for name in table.names(most=most)}


def _signature(table: Table) -> dict[str, Any]:
    """Rows of name, shape and dtype: what the plan's inputs and targets look like."""
    table.check(("inputs", "targets"))
    if len(table.data) == 1:
        table.fail("", f"has {next(iter(table.data))} alone; it needs inputs and targets, or neither")
    return {key: [_row(table, key, row) for row in table.entries(key, "rows")] for key in table.data}


def _row(table: Table, key: str, row: Any) -> list[Any]:
    if not isinstance(row, list) or len(row) != 3:
        table.fail(key, "has a row that is not [name, shape, dtype]")
    parts = Table(table.file, f"{table.path}.{key}", dict(zip(("name", "shape", "dtype"), row, strict=True)))
    shape = parts.integers("shape", most=MOST_BATCH, count=NAME)
    return [parts.text("name", most=NAME), list(shape), parts.chosen("dtype", tuple(ITEM_BYTES))]


def _made_for(table: Table) -> dict[str, str]:
    made_for = table.table("made_for")
    made_for.check(("cluster", "precision", "optimizer"))
    return _named(made_for, MOST_AXES)
