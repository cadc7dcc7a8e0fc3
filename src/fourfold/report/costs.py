"""The predicted cost of one plan, for scripts and for a terminal: the step's terms, the peak, where kernel times come from."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from fourfold.cluster import Cluster
from fourfold.cluster.local import ASSUMED
from fourfold.oracle.cost_model import Forecast, Setting
from fourfold.oracle.time.items import CATEGORY_LABELS
from fourfold.report.text import _table
from fourfold.units import bytes_text, seconds_text

BAR = 30  # columns of a whole step
LEAST_SHOWN = 0.0005  # of the step: terms that round to 0.0 % are left out
KNOWN = {"measured": "measured", "fitted": "from fitted curves", "roofline": "from the roofline model"}


def cost_record(forecast: Forecast | None) -> dict[str, Any]:
    """The cost fields of a plan in SI units; nulls where nothing was predicted."""
    if forecast is None:
        keys = ("step_seconds", "interval_seconds", "breakdown", "peak_bytes", "capacity_bytes", "known_from")
        return dict.fromkeys(keys)
    return {
        "step_seconds": forecast.step_seconds,
        "interval_seconds": list(forecast.interval) if forecast.interval is not None else None,
        "breakdown": dict(forecast.breakdown),
        "peak_bytes": forecast.peak_bytes,
        "capacity_bytes": int(forecast.capacity_bytes),
        "known_from": dict(forecast.known_from) or None,
    }


def setting_record(setting: Setting | None) -> dict[str, Any]:
    """What was predicted for; nulls where nothing was."""
    if setting is None:
        return dict.fromkeys(("cluster", "precision", "optimizer", "cost_model"))
    return {
        "cluster": setting.cluster.name,
        "precision": setting.prices.precision,
        "optimizer": setting.optimizer,
        "cost_model": setting.model,
    }


def cost_text(forecast: Forecast, setting: Setting) -> RenderableType:
    """The step term by term, the peak against what the device holds, and what the times rest on."""
    step = forecast.step_seconds
    table = _table("predicted", "time>", "share>", "")
    for term, seconds in forecast.breakdown.items():
        if seconds >= LEAST_SHOWN * step:
            bar = ProgressBar(total=step, completed=seconds, width=BAR)
            table.add_row(CATEGORY_LABELS[term], seconds_text(seconds), f"{seconds / step:.1%}", bar)
    table.add_section()
    between = " to ".join(seconds_text(end) for end in forecast.interval or ())
    table.add_row("a step", seconds_text(step), "", between)
    share = f"{forecast.peak_bytes / forecast.capacity_bytes:.1%}"
    table.add_row("peak memory of a rank", bytes_text(forecast.peak_bytes), share, f"of {bytes_text(forecast.capacity_bytes)}")
    return Group(Text(f"On {setting_words(setting)}"), table, *map(Text, _known(forecast)))


def setting_words(setting: Setting) -> str:
    """Where and how, in a line."""
    by = ", by ParaDL's formulas" if setting.model == "paradl" else ""
    return f"{cluster_words(setting.cluster)}, {setting.prices.precision}, {setting.optimizer}{by}"


def _known(forecast: Forecast) -> list[str]:
    return [f"Kernel times: {known_text(forecast)}."] if forecast.known_from else []


def known_text(forecast: Forecast) -> str:
    """Where the times of kernels come from, by their share of the compute."""
    shares = {source: share for source, share in forecast.known_from.items() if round(share, 2)}
    if len(shares) == 1:
        return KNOWN[next(iter(shares))]
    return ", ".join(f"{share:.0%} {KNOWN[source]}" for source, share in shares.items()) or "none"


def cluster_words(cluster: Cluster) -> str:
    """`abci (64 v100 on 16 nodes)`; "assumed" for a machine that was not calibrated."""
    runs = [f"{len(ranks)} {kind.name}" for kind, ranks in cluster.runs_in_use()]
    nodes = cluster.node(cluster.size - 1) + 1
    words = f", {ASSUMED}" if assumed(cluster) else ""
    return f"{cluster.name} ({' and '.join(runs)} on {nodes} node{'' if nodes == 1 else 's'}{words})"


def assumed(cluster: Cluster) -> bool:
    """Whether the rates of a cluster are assumptions, as those of `local` before it was calibrated."""
    return any(kind.sources.whole == ASSUMED for kind, _ in cluster.runs_in_use())
