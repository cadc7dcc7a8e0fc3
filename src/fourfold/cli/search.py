"""`plan` without a strategy: the planner's search, from what was asked to what is printed and written."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.cli.console import Console
from fourfold.cli.options import freeze_gc, priced, setting
from fourfold.cli.output import check_place, check_trace, draw_step, write_plan, write_trace
from fourfold.cli.report import write_page
from fourfold.errors import InvalidInput

if TYPE_CHECKING:
    from fourfold.oracle.cost_model import Setting
    from fourfold.planner.search_task import Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was asked."""

    model: str
    devices: int
    cluster: str
    batch: int | None
    precision: str
    optimizer: str
    output: Path | None
    trace: Path | None
    plot: Path | None
    report: Path | None
    what_if: float
    top: int
    fix: tuple[str, ...]
    limit: float | None
    measure: bool

    def run(self, voice: Console) -> int:
        """Search, answer and write; the exit code."""
        with voice.working(f"capturing {self.model}") as say, ExitStack() as stack:
            from fourfold.planner import SearchTask, search
            from fourfold.report.pictures import check_picture
            from fourfold.report.ranking import ranking_record, ranking_text
            from fourfold.runtime.rank_pool import is_leader
            from fourfold.workload.graph_cache import model_graph

            asked_for = setting(self.cluster, self.devices, self.precision, self.optimizer, "fourfold")
            fixed = tuple(_fixed(text) for text in self.fix)
            check_place(self.output)
            check_place(self.report)
            check_trace(self.trace, asked_for)
            check_place(self.plot)
            check_picture(self.plot)
            seen = model_graph(self.model, batch=self.batch)
            freeze_gc()
            say(f"starting {self.devices} ranks" if self.measure else "searching")
            task = SearchTask(
                graph=priced(seen.graph, asked_for),
                batch=seen.batch,
                setting=asked_for,
                fixed=fixed,
                limit=self.limit if self.limit is not None else float("inf"),
                measure=self._timing(asked_for, stack),
            )
            found = search(task, say)
            best = found.best
            if self.output is not None and best is not None and is_leader():
                made_for = {"cluster": self.cluster, "precision": self.precision, "optimizer": self.optimizer}
                write_plan(seen.adopted(best.plan), seen.graph, self.output, made_for=made_for)
            traced = write_trace(best, self.trace) if best is not None else None
            if best is not None:
                draw_step(best, self.plot, f"{self.model} by {best.plan.strategy}")
            if self.report is not None and is_leader():
                write_page(
                    self.report,
                    found,
                    model=self.model,
                    cluster=self.cluster,
                    limit=self.what_if,
                    told=lambda words, *_: say(words),
                )
        file = str(self.output) if self.output is not None and best is not None else None
        page = str(self.report) if self.report is not None else None
        record = {**ranking_record(found, model=self.model, top=self.top, file=file, trace=traced), "report": page}
        files = [path for path in (file, traced, page) if path]
        voice.answer(record, lambda: ranking_text(found, model=self.model, top=self.top, files=files))
        return 0 if best is not None else 1

    def _timing(self, asked_for: Setting, stack: ExitStack) -> Measure | None:
        """How kernels are timed, if they shall be."""
        if not self.measure:
            return None
        from fourfold.calibrate.measured_prices import timing
        from fourfold.runtime.rank_pool import rank_pool

        team = rank_pool(self.devices)
        stack.enter_context(team)
        return timing(asked_for.cluster, team, asked_for.prices.precision)


def _fixed(text: str) -> tuple[str, str]:
    pattern, sign, split = text.partition("=")
    if not (pattern and sign and split):
        raise InvalidInput(f"--fix {text}: write OPS=SPLIT, as 'classifier.*=filter'")
    return pattern, split
