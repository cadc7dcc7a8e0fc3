"""The same search for other batches, links and numbers of devices: a grid of best plans, the nearest ones first."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fourfold.cluster import Cluster
from fourfold.errors import Error
from fourfold.oracle.predict import Prediction
from fourfold.planner.explain import repeat_search, with_scaled_links
from fourfold.planner.search_task import Ranking, SearchTask

BATCHES = (0.5, 1, 2, 4)  # times what was asked, as the others
LINKS = (0.1, 1, 10)
DEVICES = (0.5, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place of the grid: the batch, how many times as fast links are, the number of devices."""

    batch: int
    links: float
    devices: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best plan at a point, or why there is none."""

    best: Prediction | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class WhatIfGrid:
    """Answers at the points for which there was time."""

    batches: tuple[int, ...]
    links: tuple[float, ...]
    devices: tuple[int, ...]
    answers: Mapping[Point, Answer]


def what_if_grid(
    ranking: Ranking, sized: Callable[[int], Cluster], *, limit: float, say: Callable[[str, int, int], None] = lambda *_: None
) -> WhatIfGrid:
    """The grid around a search, as far as it comes in `limit` seconds. `sized`: the cluster with so many devices in use."""
    task = ranking.task
    batches = _batches(task)
    devices = tuple(dict.fromkeys(n for times in DEVICES if (n := int(times * task.devices)) >= 1 and _has(sized, n)))
    asked = Point(batch=task.batch, links=1, devices=task.devices)
    points = [Point(batch=b, links=f, devices=d) for b, f, d in itertools.product(batches, LINKS, devices)]
    points.sort(key=lambda p: _far(p, asked))
    answers = {asked: Answer(best=ranking.best, reason="" if ranking.best else ranking.nearest())}
    begun = time.perf_counter()
    for number, point in enumerate(points):
        left = limit - (time.perf_counter() - begun)
        if left <= 0:
            break
        say(f"batch {point.batch}, {point.devices} devices, links x {point.links:g}", number, len(points))
        if point not in answers:
            answers[point] = _answer(task, point, sized, left)
    return WhatIfGrid(batches=batches, links=LINKS, devices=devices, answers=answers)


def _batches(task: SearchTask) -> tuple[int, ...]:
    if task.graph.batch is not None:
        return (task.batch,)
    return tuple(dict.fromkeys(max(int(times * task.batch), 1) for times in BATCHES))


def _has(sized: Callable[[int], Cluster], devices: int) -> bool:
    try:
        sized(devices)
    except Error:
        return False
    return True


def _far(point: Point, asked: Point) -> tuple[int, float]:
    """How many things differ, and by how much."""
    ratios = (point.batch / asked.batch, point.links / asked.links, point.devices / asked.devices)
    return sum(r != 1 for r in ratios), sum(abs(math.log(r)) for r in ratios)


def _answer(task: SearchTask, point: Point, sized: Callable[[int], Cluster], limit: float) -> Answer:
    try:
        found = repeat_search(
            task, cluster=with_scaled_links(sized(point.devices), point.links), batch=point.batch, limit=limit
        )
    except Error as reason:
        return Answer(best=None, reason=str(reason))
    return Answer(best=found.best, reason="" if found.best is not None else found.nearest())
