"""Runs as `train --record` and `verify --record` write them, read for a page: checked key by key, and for the plan's own model.

Records without a version are refused: they do not say which graph was run, so that nobody can tell whether they belong to the
plan; the run that wrote one can be done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.errors import InvalidInput
from fourfold.files import parse_json, read_text
from fourfold.plans import Plan
from fourfold.plans.spec.plan_file import MOST_BATCH, MOST_RANKS
from fourfold.report.record import VERSION
from fourfold.table import NAME, Table

MOST_STEPS = 10**6
Reader = Callable[[Table, str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a page shows of a run; None where it was not predicted, measured or compared."""

    strategy: str
    ranks: int
    predicted: float | None
    measured: float
    predicted_peak: float | None
    measured_peak: float | None
    equal: bool | None
    losses: tuple[float | None, ...]


def read_run(path: Path, *, of: Plan) -> Run:
    """The run of a record; one of another model than the plan's is refused."""
    table = _table(path)
    verified = "equal" in table.data
    fields = VERIFY if verified else TRAIN
    found = _read(table, fields)
    if found["graph"] != of.graph:
        raise InvalidInput(
            f"{path} is a run of {found['model']} (graph {found['graph']}), the plan is for "
            f"{of.model or 'a model'} (graph {of.graph}); give runs of the plan's own model"
        )
    return Run(
        strategy=found["strategy"],
        ranks=found["ranks"],
        predicted=found["predicted_seconds"],
        measured=found["measured_seconds" if verified else "step_seconds"],
        predicted_peak=found["predicted_peak_bytes"],
        measured_peak=found["measured_peak_bytes"] if verified else max(found["peak_bytes"], default=None),
        equal=found.get("equal"),
        losses=found.get("losses", ()),
    )


def _table(path: Path) -> Table:
    remedy = f"write it with `fourfold train ... --record {path}`"
    try:
        data = parse_json(read_text(path))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"{path} is no JSON: {error}; {remedy}") from None
    if not isinstance(data, dict) or not {"step_seconds", "measured_seconds"} & set(data):
        raise InvalidInput(f"{path} is no record of a run; {remedy}")
    table = Table(str(path), "", data)
    if "version" not in data:
        raise InvalidInput(f"{path} has no version: an earlier Fourfold wrote it; run it again with --record")
    if (version := table.whole("version")) != VERSION:
        raise InvalidInput(f"{path}: record version {version}, this Fourfold reads {VERSION}; run it again with --record")
    return table


def _read(table: Table, fields: Mapping[str, Reader]) -> dict[str, Any]:
    """Every one of the fields, and nothing else; None for those that older files do not have."""
    table.check(tuple(fields))
    for key in fields.keys() - OPTIONAL:
        if key not in table.data:
            table.fail(key, "is missing")
    return {key: read(table, key) if key in table.data else None for key, read in fields.items()}


def _text(table: Table, key: str) -> str:
    return table.text(key)


def _name(table: Table, key: str) -> str:
    return table.text(key, most=NAME)


def _flag(table: Table, key: str) -> bool:
    return table.flag(key)


def _amount(table: Table, key: str) -> float:
    """Seconds, bytes, an error, a share: a number that is not negative."""
    return table.number(key, least=0)


def _count(most: int) -> Reader:
    return lambda table, key: table.whole(key, least=0, most=most)


def _or_null(read: Reader) -> Reader:
    """Null, or what the reader reads."""
    return lambda table, key: None if table.data[key] is None else read(table, key)


def _numbers(most: int) -> Reader:
    """A list of numbers and nulls."""

    def read(table: Table, key: str) -> tuple[float | None, ...]:
        entries = table.entries(key, "numbers", most)
        each = (Table(table.file, f"{key} {i}", {"": entry}) for i, entry in enumerate(entries, start=1))
        return tuple(_or_null(lambda one, name: one.number(name))(entry, "") for entry in each)

    return read


def _texts(table: Table, key: str) -> tuple[str, ...]:
    return table.texts(key)


def _check(table: Table, key: str) -> None:
    _read(table.table(key), CHECK)


def _checks(table: Table, key: str) -> None:
    for entry in table.tables(key):
        _read(entry, CHECK)


def _plan(table: Table, key: str) -> None:
    table.table(key)  # whoever runs it reads it as a plan


_known = _or_null(_amount)  # null: there is none, or it is no number
CHECK: Mapping[str, Reader] = {
    "tensor": _text,
    "what": _name,
    "step": _count(MOST_STEPS),
    "error": _known,
    "limit": _known,
    "holds": _flag,
}
BOTH: Mapping[str, Reader] = {
    "version": _count(VERSION),
    "model": _text,
    "graph": _name,
    "strategy": _name,
    "ranks": _count(MOST_RANKS),
    "precision": _name,
    "optimizer": _name,
    "steps": _count(MOST_STEPS),
    "predicted_seconds": _known,
    "predicted_interval_seconds": _or_null(_numbers(2)),
    "predicted_peak_bytes": _known,
    "waiting": _or_null(_numbers(MOST_RANKS)),
    "nonfinite_step": _or_null(_count(MOST_STEPS)),
}
OPTIONAL = {"accuracy", "held_out"}
TRAIN: Mapping[str, Reader] = {
    **BOTH,
    "accuracy": _or_null(_amount),
    "held_out": _or_null(_count(MOST_STEPS)),
    "batch": _count(MOST_BATCH),
    "losses": _numbers(MOST_STEPS),
    "step_seconds": _amount,
    "samples_per_second": _amount,
    "peak_bytes": lambda table, key: table.integers(key, count=MOST_RANKS),
    "trace": _or_null(_text),
}
VERIFY: Mapping[str, Reader] = {
    **BOTH,
    "plan": _plan,
    "equal": _flag,
    "loss_error": _known,
    "gradient_error": _known,
    "parameter_error": _known,
    "output_error": _known,
    "noise_floor": _known,
    "worst": _check,
    "reference": _text,
    "plain_rule": _flag,
    "checks": _checks,
    "split_flops_fraction": _amount,
    "ops_replicated": _texts,
    "replicated_bytes": _amount,
    "measured_seconds": _amount,
    "measured_peak_bytes": _known,
}
"""What `train_record` and `verify_record` write, key by key."""
