"""A timeline as a trace that chrome://tracing and ui.perfetto.dev show.

The form is the Trace Event Format: complete events (`ph` "X") with `ts` and `dur` in microseconds since the step began, and
metadata events (`ph` "M") that name processes and threads. Predicted and measured steps are two processes of one file, each
with a thread per rank, so that they lie below each other on one axis. Ranks that are predicted together have one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fourfold.report.stages import ranks_text
from fourfold.timeline import Event, Timeline

MICRO = 1e6
PREDICTED, MEASURED = 1, 2  # process ids
WORDS = {
    "F": "forward",
    "B": "backward",
    "receive": "receive",
    "send": "send",
    "reduce": "gradient sum",
    "tie": "tied gradients",
    "wait": "wait",
}


def trace_record(
    predicted: Timeline, measured: Timeline | None = None, *, places: Sequence[tuple[int, ...]] = ()
) -> dict[str, Any]:
    """A trace of one predicted step and, where there is one, of the measured step. `places`: ranks predicted together."""
    together = {ranks[0]: ranks for ranks in places}
    events = list(_process(PREDICTED, "predicted", predicted, together))
    if measured is not None:
        events += _process(MEASURED, "measured", measured, {})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(number: int, name: str, timeline: Timeline, together: dict[int, tuple[int, ...]]) -> Iterator[dict[str, Any]]:
    yield _named("process_name", number, 0, name)
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
    for rank in timeline.ranks:
        ranks = together.get(rank, (rank,))
        yield _named("thread_name", number, rank, f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}")
        yield {"ph": "M", "name": "thread_sort_index", "pid": number, "tid": rank, "args": {"sort_index": rank}}
    for event in timeline.events:
        yield _complete(number, event)


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(process: int, event: Event) -> dict[str, Any]:
    waits = event.kind == "wait"
    return {
        "ph": "X",
        "name": f"wait for {event.action}" if waits else event.action,
        "cat": event.kind,
        "pid": process,
        "tid": event.rank,
        "ts": event.start * MICRO,
        "dur": event.seconds * MICRO,
        "args": {"what": WORDS.get(event.kind, event.kind)},
    }
