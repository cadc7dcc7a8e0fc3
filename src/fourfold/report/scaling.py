"""How strategies scale, for scripts and for a terminal: throughput by strategy and devices, the fastest in detail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fourfold.oracle.cost_model import Forecast, Setting
from fourfold.oracle.scaling import Row, Study, fastest
from fourfold.oracle.time.items import CATEGORY_LABELS
from fourfold.report.costs import assumed, cost_record, known_text, setting_record, setting_words
from fourfold.report.text import WIDTH, _table
from fourfold.units import bytes_text, count_text, seconds_text

GAP = 3  # signs between columns


def scaling_record(study: Study, rows: Sequence[Row], setting: Setting, *, model: str, trace: str | None) -> dict[str, Any]:
    """`simulate --json`, in SI units. `best`: by number of devices, the index of the fastest row that fits."""
    best, counts = fastest(rows), dict.fromkeys(row.devices for row in rows)
    return {
        "model": model,
        **setting_record(setting),
        "scaling": study.scaling,
        "samples": study.samples,
        "assumed_devices": _assumed(study),
        "best": {str(count): rows.index(best[count]) if count in best else None for count in counts},
        "rows": [_row_record(row) for row in rows],
        "trace": trace,
    }


def _row_record(row: Row) -> dict[str, Any]:
    return {
        "devices": row.devices,
        "strategy": row.strategy,
        "batch": row.batch,
        **cost_record(row.forecast),
        "epoch_seconds": row.epoch_seconds,
        "samples_per_second": row.samples_per_second,
        "efficiency": row.efficiency,
        "feasible": row.feasible,
        "limits": list(row.limits),
    }


def scaling_text(study: Study, rows: Sequence[Row], setting: Setting, *, model: str, trace: str | None) -> RenderableType:
    """`simulate`: all strategies on all numbers of devices, the fastest of each number in detail, why others fail."""
    weak = study.scaling == "weak"
    parts: list[RenderableType] = [_head(study, setting, model)]
    shown = [row for row in rows if row.forecast is not None]
    several = len({row.devices for row in shown}) > 1
    if several and len({row.strategy for row in shown}) > 1:
        parts.append(Matrix(rows=shown, weak=weak))
        shown = list(fastest(rows).values())
        parts += [Text("")] if shown else []
    elif not several:
        shown.sort(key=lambda row: (not row.feasible, -(row.samples_per_second or 0.0)))
    parts += [Details(rows=shown, varied=weak)] if shown else []
    parts += [Text(f"Kernel times: {_known(shown)}.")] if any(row.forecast.known_from for row in shown if row.forecast) else []
    lines = [*_mixed(study), *_reasons(rows), *([f"written to {trace}"] if trace is not None else [])]
    return Group(*parts, *map(Text, lines))


def _assumed(study: Study) -> list[int]:
    """Numbers of devices, one for the efficiency included, whose rates nobody measured."""
    return [count for count, setting in study.settings.items() if assumed(setting.cluster)]


def _mixed(study: Study) -> list[str]:
    """A warning where some rates are assumed and others are not: the rows cannot be compared."""
    counts = _assumed(study)
    if not 0 < len(counts) < len(study.settings):
        return []
    return [f"Rates of {', '.join(map(str, counts))} devices are assumed, not calibrated: do not compare with other rows."]


def _head(study: Study, setting: Setting, model: str) -> Text:
    batch = f"batch {study.batch}" + (" a device" if study.scaling == "weak" else "")
    what = f"{model}: {study.scaling} scaling, {batch}"
    where = f"on {setting_words(setting)}"
    return Text(f"{what}, {where}" if len(what) + 2 + len(where) <= WIDTH else f"{what},\n{where}")


@dataclass(frozen=True, slots=True)
class Sparks:
    """A curve of shares, one sign each; a point where there is none. Terminals without blocks get tenths."""

    shares: tuple[float | None, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        levels = "0123456789" if options.ascii_only else "▁▂▃▄▅▆▇█"
        top = len(levels) - 1
        yield Text("".join("." if s is None else levels[min(round(s * top), top)] for s in self.shares), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(self.shares), len(self.shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Samples per second by strategy and devices, as many numbers of devices beside each other as fit, and the curves.

    Curves are of efficiency under weak scaling; under strong scaling that falls to nothing, so they are of speed, in the
    fastest row's.
    """

    rows: Sequence[Row]
    weak: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        counts = sorted({row.devices for row in self.rows})
        each = next(n for n in range(len(counts), 0, -1) if n == 1 or self._fits(_runs(counts, n), options.max_width))
        *before, last = _runs(counts, each)
        for run in before:
            yield self._block(self._cells(run), [])
        yield self._block(self._cells(last), counts)
        curve = "efficiency, full height 100 %" if self.weak else "samples/s, full height the fastest"
        yield Text(f"* fastest that fits   ( ) does not fit   - not possible   curve: {curve}")

    def _fits(self, runs: Sequence[Sequence[int]], width: int) -> bool:
        curve = GAP + max(sum(map(len, runs)), len(self._curve))
        return all(_width(self._cells(run)) + curve <= width for run in runs)

    @property
    def _curve(self) -> str:
        return "efficiency" if self.weak else "speed"

    def _cells(self, counts: Sequence[int]) -> dict[str, list[str]]:
        best, cells = fastest(self.rows), {(row.strategy, row.devices): row for row in self.rows}
        names = list(dict.fromkeys(row.strategy for row in self.rows))
        columns = {f"{count}>": [_cell(cells.get((name, count)), best) for name in names] for count in counts}
        return {"samples/s": names, **columns}

    def _block(self, columns: dict[str, list[str]], curve: Sequence[int]) -> Table:
        cells = {(row.strategy, row.devices): row for row in self.rows}
        table = _table(*columns, *([self._curve] if curve else []))
        for name, *texts in zip(*columns.values(), strict=True):
            heights = tuple(self._height(cells.get((name, count))) for count in curve)
            table.add_row(name, *texts, *([Sparks(heights)] if curve else []))
        return table

    def _height(self, row: Row | None) -> float | None:
        if row is None or self.weak:
            return row.efficiency if row is not None else None
        return (row.samples_per_second or 0.0) / max(other.samples_per_second or 0.0 for other in self.rows)


def _runs(counts: Sequence[int], most: int) -> list[Sequence[int]]:
    """The numbers in runs of about the same length, at most so many each."""
    runs = -(-len(counts) // most)
    each = -(-len(counts) // runs)
    return [counts[start : start + each] for start in range(0, len(counts), each)]


def _cell(row: Row | None, best: dict[int, Row]) -> str:
    if row is None or row.samples_per_second is None:
        return "- "
    text = count_text(row.samples_per_second)
    if not row.feasible:
        return f"({text})"
    return f"{text}*" if best.get(row.devices) is row else f"{text} "


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A line for each row: step, how sure, epoch, where the time goes, memory. On a narrow terminal some columns give way."""

    rows: Sequence[Row]
    varied: bool  # whether batches differ

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = {heading: cells for heading, cells in self._columns().items() if any(cells)}
        for dispensable in ("samples/s>", "next term", "compute>", "peak>"):
            if _width(columns) > options.max_width:
                columns.pop(dispensable, None)
        table = _table(*columns)
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*cells)
        yield table

    def _columns(self) -> dict[str, list[str]]:
        cells = [(row, row.forecast) for row in self.rows if row.forecast is not None]
        return {
            "devices>": [str(row.devices) for row, _ in cells],
            "strategy": [row.strategy for row, _ in cells],
            "batch>": [str(row.batch) if self.varied else "" for row, _ in cells],
            "step>": [seconds_text(found.step_seconds) for _, found in cells],
            "+->": [_half(found) for _, found in cells],
            "epoch>": [seconds_text(row.epoch_seconds) if row.epoch_seconds else "" for row, _ in cells],
            "samples/s>": [count_text(row.samples_per_second or 0.0) for row, _ in cells],
            "efficiency>": [_share(row.efficiency or 0.0) for row, _ in cells],
            "compute>": [_share(found.breakdown["compute"] / found.step_seconds) for _, found in cells],
            "next term": [_rest(found) for _, found in cells],
            "peak>": [_peak(found) for _, found in cells],
        }


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(len, (heading, *cells))) for heading, cells in columns.items()) + GAP * (len(columns) - 1)


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _peak(forecast: Forecast) -> str:
    return bytes_text(forecast.peak_bytes) if forecast.feasible else f"({bytes_text(forecast.peak_bytes)})"


def _half(forecast: Forecast) -> str:
    """Half the interval, relative."""
    if forecast.interval is None:
        return ""
    low, high = forecast.interval
    return f"{(high - low) / 2 / forecast.step_seconds:.0%}"


def _rest(forecast: Forecast) -> str:
    """The largest term besides compute."""
    rest = {term: seconds for term, seconds in forecast.breakdown.items() if term != "compute"}
    term = max(rest, key=lambda name: rest[name])
    return f"{CATEGORY_LABELS[term]} {rest[term] / forecast.step_seconds:.0%}" if rest[term] else ""


def _known(rows: Sequence[Row]) -> str:
    """Where the times of kernels come from, in all rows together or from the first to the last."""
    texts = dict.fromkeys(known_text(row.forecast) for row in rows if row.forecast is not None)
    return next(iter(texts)) if len(texts) == 1 else f"from {next(iter(texts))} to {list(texts)[-1]}"


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Why a strategy is not possible or does not fit, with the first number of devices where this is so."""
    listed: set[tuple[str, bool]] = set()
    for row in rows:
        key = row.strategy, row.forecast is None
        if not row.feasible and key not in listed:
            listed.add(key)
            yield f"{row.strategy} on {row.devices}: {row.limits[0]}"
