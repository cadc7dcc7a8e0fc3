"""The action lists of a pipeline played through on a described cluster: a predicted `Timeline`.

A lane is a set of ranks that share a list of actions. Compute of a lane is work that its ranks' cores do; where the ranks
of a node outnumber its cores, those busy at the moment draw from them evenly (processor sharing), and the more cores are
busy, the slower each is, by the kernels' own factor. Exchanges among the ranks of a lane come after its compute; within a
node they take its cores too, but how the lane's own ranks share them is in their measured times already.

A message between stages begins when it is sent and its receive is posted, takes its time on the link, one after the other
in each direction, and is waited for by the action that needs it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fourfold.plans.pipeline import Task
from fourfold.timeline import Event, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a compute action costs a lane: seconds of work at full speed, and then seconds of exchanges among its ranks."""

    seconds: float
    busy: float = 1.0  # how many times longer the work takes with all cores of the node busy
    still: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Ranks that act together: their list, which node they are on and how many they are there."""

    first: int  # rank
    tasks: tuple[Task, ...]
    nodes: tuple[tuple[int, int], ...]  # node, ranks of the lane on it

    @property
    def near(self) -> bool:
        """Whether its exchanges stay within a node, and so use its cores."""
        return len(self.nodes) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the replay knows of the cluster: cores of each node, 0 where each rank has a device of its own."""

    cores: Mapping[int, int]


@dataclass(slots=True)
class _State:
    at: int = 0  # the next task
    left: float = 0.0  # seconds of work left, at full speed
    still: float = 0.0
    busy: float = 1.0
    begun: float = 0.0
    running: bool = False
    waiting: float | None = None  # since when


@dataclass(slots=True)
class _Message:
    sent: float | None = None
    posted: float | None = None


@dataclass
class Replay:
    """One step played through. `work[stage, kind, microbatch]`; `messages[source, target, way]`: seconds on the link."""

    lanes: Sequence[Lane]
    machine: Machine
    work: Mapping[tuple[int, str, int], Work]
    messages: Mapping[tuple[int, int, str], float]
    now: float = 0.0
    events: list[Event] = field(default_factory=list)

    def run(self) -> Timeline:
        self.states = [_State() for _ in self.lanes]
        self.post: dict[tuple[int, int, str, int], _Message] = {}
        self.expected: dict[tuple[int, str, int], list[tuple[int, int, str, int]]] = {}
        self.coming: list[float] = []
        self.links: dict[tuple[int, int], float] = {}
        self.arrivals: dict[tuple[int, int, str, int], float] = {}
        while True:
            while any([self._started(k) for k in range(len(self.lanes))]):
                pass
            if all(s.at == len(lane.tasks) for s, lane in zip(self.states, self.lanes, strict=True)):
                return Timeline(tuple(self.events))
            self._advance()

    def _started(self, k: int) -> bool:
        """Let a lane do what takes no time and begin what does; whether anything happened."""
        lane, state = self.lanes[k], self.states[k]
        if state.running or state.at == len(lane.tasks):
            return False
        task = lane.tasks[state.at]
        if task.kind in ("receive", "send"):
            self._mail(task)
            self._note(lane, str(task), task.kind, self.now)
            state.at += 1
            return True
        if not self._ready(task):
            state.waiting = self.now if state.waiting is None else state.waiting
            return False
        if state.waiting is not None and state.waiting < self.now:
            self._note(lane, str(task), "wait", state.waiting)
        work = self.work[task.stage, task.kind, task.microbatch]
        state.waiting, state.running, state.begun = None, True, self.now
        state.left, state.still, state.busy = work.seconds, work.still, work.busy
        return True

    def _mail(self, task: Task) -> None:
        source, target = (task.peer, task.stage) if task.kind == "receive" else (task.stage, task.peer)
        key = (source, target, task.way, task.microbatch)
        message = self.post.setdefault(key, _Message())
        if task.kind == "receive":
            message.posted = self.now
            self.expected.setdefault((target, task.way, task.microbatch), []).append(key)
        else:
            message.sent = self.now
        if message.sent is not None and message.posted is not None:
            link = (source, target)
            begin = max(self.now, self.links.get(link, 0.0))
            self.arrivals[key] = self.links[link] = begin + self.messages[source, target, task.way]
            heapq.heappush(self.coming, self.arrivals[key])

    def _ready(self, task: Task) -> bool:
        """Whether everything a compute action needs has arrived."""
        if task.kind not in ("F", "B"):
            return True
        needed = self.expected.get((task.stage, task.kind, task.microbatch), [])
        return all(self.arrivals.get(key, math.inf) <= self.now + 1e-12 for key in needed)

    def _advance(self) -> None:
        """To the next moment something ends or arrives."""
        speeds = [self._speed(k) for k in range(len(self.lanes))]
        ends = [self.now + (s.left or s.still) / v for s, v in zip(self.states, speeds, strict=True) if s.running]
        while self.coming and self.coming[0] <= self.now + 1e-12:
            heapq.heappop(self.coming)
        then = min([*ends, *self.coming[:1]], default=math.inf)
        assert then < math.inf, "the lists wait for each other for ever"
        for k, (state, speed) in enumerate(zip(self.states, speeds, strict=True)):
            if state.running:
                self._spend(k, state, (then - self.now) * speed, then)
        self.now = then

    def _spend(self, k: int, state: _State, done: float, then: float) -> None:
        """Let a lane go on with its work or, when that is done, with its exchanges."""
        if state.left:
            state.left = state.left - done if state.left > done + 1e-12 else 0.0
        else:
            state.still = state.still - done if state.still > done + 1e-12 else 0.0
        if not state.left and not state.still:
            lane = self.lanes[k]
            task = lane.tasks[state.at]
            self._note(lane, str(task), task.kind, state.begun, then)
            state.at, state.running = state.at + 1, False

    def _speed(self, k: int) -> float:
        """How fast a lane works: the slowest of its nodes decides."""
        lane, state = self.lanes[k], self.states[k]
        if not state.running or (not state.left and not lane.near):
            return 1.0
        slowest = 1.0
        for node, own in lane.nodes:
            cores = self.machine.cores.get(node, 0)
            if not cores:
                continue
            busy = self._busy(node)
            turns = min(1.0, cores / max(busy, 1))
            if state.left:
                crowd = 1.0 + (state.busy - 1.0) * (min(busy, cores) - 1) / max(cores - 1, 1)
                slowest = min(slowest, turns / crowd)
            else:
                slowest = min(slowest, turns / min(1.0, cores / own))
        return slowest

    def _busy(self, node: int) -> int:
        """Ranks at work on a node."""
        out = 0
        for lane, state in zip(self.lanes, self.states, strict=True):
            if state.running and (state.left or lane.near):
                out += sum(count for where, count in lane.nodes if where == node)
        return out

    def _note(self, lane: Lane, action: str, kind: str, start: float, end: float | None = None) -> None:
        self.events.append(
            Event(rank=lane.first, action=action, kind=kind, start=start, end=self.now if end is None else end)
        )
