"""`plan` without a strategy: the planner's search, from its arguments to what is printed and written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.cli.console import Console
from fourfold.cli.output import check_trace, draw_step, write_trace
from fourfold.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The arguments of the command."""

    model: str
    devices: int
    cluster: str | None
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

    def run(self, console: Console) -> int:
        """Search, answer and write; the exit code."""
        with console.working(f"capturing {self.model}") as say:
            from fourfold.api.output import check_place, write_plan
            from fourfold.api.page import write_page
            from fourfold.api.planning import graph_of, search_plans
            from fourfold.api.settings import LOCAL, freeze_gc, setting_of
            from fourfold.report.pictures import check_picture
            from fourfold.report.ranking import ranking_record, ranking_text

            cluster = self.cluster or LOCAL
            setting = setting_of(cluster, self.devices, precision=self.precision, optimizer=self.optimizer)
            fixed = tuple(_fixed(text) for text in self.fix)
            check_place(self.output)
            check_place(self.report)
            check_trace(self.trace, setting)
            check_place(self.plot)
            check_picture(self.plot)
            source = graph_of(self.model, batch=self.batch)
            freeze_gc()
            say(f"starting {self.devices} ranks" if self.measure else "searching")
            limit = self.limit if self.limit is not None else float("inf")
            ranking = search_plans(source, setting, fixed=fixed, limit=limit, measure=self.measure, say=say)
            best = ranking.best
            if self.output is not None and best is not None and not console.silent:
                made_for = {"cluster": cluster, "precision": self.precision, "optimizer": self.optimizer}
                write_plan(source.adopted(best.plan, ranking.task.graph), source.graph, self.output, made_for=made_for)
            cost = best
            trace_file = write_trace(cost, self.trace)
            if best is not None:
                draw_step(cost, self.plot, f"{self.model} by {best.plan.strategy}")
            if self.report is not None and not console.silent:
                write_page(
                    self.report,
                    ranking,
                    model=self.model,
                    cluster=cluster,
                    limit=self.what_if,
                    progress=lambda words, *_: say(words),
                )
        file = str(self.output) if self.output is not None and best is not None else None
        page = str(self.report) if self.report is not None else None
        record = {**ranking_record(ranking, model=self.model, top=self.top, file=file, trace=trace_file), "report": page}
        files = [path for path in (file, trace_file, page) if path]
        console.answer(record, lambda: ranking_text(ranking, model=self.model, top=self.top, files=files))
        return 0 if best is not None else 1


def _fixed(text: str) -> tuple[str, str]:
    pattern, sign, split = text.partition("=")
    if not (pattern and sign and split):
        raise InvalidInput(f"--fix {text}: write OPS=SPLIT, as 'classifier.*=filter'")
    return pattern, split
