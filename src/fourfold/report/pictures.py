"""Pictures for papers, as PNG, SVG or PDF by the file's ending: how strategies scale, and one step of a plan in time."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from fourfold.errors import InvalidInput
from fourfold.files import write_file
from fourfold.oracle.scaling import Row
from fourfold.report.stages import ranks_text
from fourfold.report.trace import WORDS
from fourfold.timeline import Timeline

FORMATS = (".png", ".svg", ".pdf")
COLOURS = {"F": "#3f6fb5", "B": "#c2478a", "receive": "#8a63c9", "send": "#8a63c9", "reduce": "#d9822b", "tie": "#d9822b"}
LABELLED = 0.012  # of the step: shorter actions have no name written on them


def check_picture(path: Path | None) -> None:
    """Refuse what cannot be drawn before the work for it is done."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise InvalidInput(f"cannot draw {path}: its ending is '{path.suffix}'; use {', '.join(FORMATS)}")
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InvalidInput("pictures need matplotlib; pip install matplotlib") from None
    return pyplot


def _write(figure: Any, path: Path) -> None:
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix.removeprefix("."), dpi=200)
    write_file(path, drawn.getvalue())


def scaling_picture(rows: Sequence[Row], path: Path, *, title: str, weak: bool) -> None:
    """Samples per second over devices, both logarithmic; what does not fit is hollow."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for strategy in dict.fromkeys(row.strategy for row in rows):
        mine = [(r.devices, r.samples_per_second, r.feasible) for r in rows if r.strategy == strategy and r.samples_per_second]
        if not mine:
            continue
        (line,) = axes.plot([d for d, _, _ in mine], [s for _, s, _ in mine], label=strategy, linewidth=1.5)
        for devices, speed, fits in mine:
            face = line.get_color() if fits else "white"
            axes.plot(devices, speed, "o", markersize=5, markerfacecolor=face, markeredgecolor=line.get_color())
    counts = sorted({row.devices for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="samples per second", title=title)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, title="weak scaling" if weak else "strong scaling", title_fontsize=8)
    _write(figure, path)
    pyplot.close(figure)


def timeline_picture(timeline: Timeline, path: Path, *, title: str, places: Sequence[tuple[int, ...]] = ()) -> None:
    """One step: a row for each set of ranks that act together, a box for each action."""
    pyplot = _pyplot()
    together = {ranks[0]: ranks for ranks in places}
    ranks = timeline.ranks
    figure, axes = pyplot.subplots(figsize=(9.0, 0.9 + 0.42 * len(ranks)), layout="constrained")
    for event in timeline.events:
        if event.kind == "wait" or event.seconds <= 0:
            continue
        row = ranks.index(event.rank)
        colour = COLOURS.get(event.kind, "#8b8f99")
        axes.barh(row, 1e3 * event.seconds, left=1e3 * event.start, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
        if event.seconds > LABELLED * timeline.seconds and event.kind in "FB":
            middle = 1e3 * (event.start + event.end) / 2
            axes.text(middle, row, event.action, ha="center", va="center", fontsize=6, color="white", clip_on=True)
    axes.set_yticks(range(len(ranks)), [f"rank {ranks_text(together.get(rank, (rank,)))}" for rank in ranks], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title=title)
    kinds = [kind for kind in COLOURS if any(e.kind == kind and e.seconds > 0 for e in timeline.events)]
    words = {WORDS[kind]: pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds}
    figure.legend(list(words.values()), list(words), fontsize=7, ncols=len(words) or 1, loc="outside lower center")
    _write(figure, path)
    pyplot.close(figure)
