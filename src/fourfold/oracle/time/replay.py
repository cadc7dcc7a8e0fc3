"""The action lists of a pipeline replayed on a described cluster: a predicted `Timeline`.

A lane is a set of ranks that share a list of actions. Compute of a lane is work that its ranks' cores do; where the ranks
of a node outnumber its cores, those busy at the moment draw from them evenly (processor sharing), and the more cores are
busy, the slower each is, by the kernels' own factor. Exchanges among the ranks of a lane come after its compute; within a
node they take its cores too, but how the lane's own ranks, and those measured beside them, share them is in their measured
times already.

A message between stages begins when it is sent and its receive is posted, takes its time on the link, one after the other
in each direction, and is waited for by the action that needs it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fourfold.plans.lists.rank_schedule import StageAction
from fourfold.timeline import Event, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a compute action costs a lane: seconds of work at full speed, and then seconds of exchanges among its ranks."""

    seconds: float
    busy: float = 1.0  # how many times longer the work takes with all cores of the node busy
    mean_over_max: float = 1.0  # of it, what an average rank of the lane does: the others wait and leave their cores
    blocked: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Ranks that act together: their list, which node they are on and how many they are there."""

    first: int  # rank
    tasks: tuple[StageAction, ...]
    nodes: tuple[tuple[int, int], ...]  # node, ranks of the lane on it
    beside: int = 0  # ranks of other lanes there, whose exchanges at the same time are in the measured times of this one's

    @property
    def within_node(self) -> bool:
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
    blocked: float = 0.0
    busy: float = 1.0
    mean_over_max: float = 1.0
    begun: float = 0.0
    running: bool = False
    waiting: float | None = None  # since when
    speed: float = 1.0
    since: float = 0.0  # when `left` and `blocked` were true
    end: float = math.inf  # when the work, or then the exchanges, will be done at this speed


@dataclass(slots=True)
class _Message:
    sent: float | None = None
    posted: float | None = None


@dataclass
class Replay:
    """One step replayed. `work[stage, kind, microbatch]`; `messages[source, target, way]`: seconds on the link.

    Each event wakes only the lanes it concerns: a lane whose work ended, one that a message reached, and those whose speed
    changed because another lane on their node began or ended work.
    """

    lanes: Sequence[Lane]
    machine: Machine
    work: Mapping[tuple[int, str, int], Work]
    messages: Mapping[tuple[int, int, str], float]
    now: float = 0.0
    events: list[Event] = field(default_factory=list)

    def run(self) -> Timeline:
        self.states = [_State() for _ in self.lanes]
        self.home = {task.stage: k for k, lane in enumerate(self.lanes) for task in lane.tasks if task.kind in ("F", "B")}
        self.on: dict[int, list[int]] = {}  # node with cores -> lanes
        for k, lane in enumerate(self.lanes):
            for node, _ in lane.nodes:
                if self.machine.cores.get(node, 0):
                    self.on.setdefault(node, []).append(k)
        self.busy = dict.fromkeys(self.on, 0.0)  # ranks at work
        self.changed: set[int] = set()  # nodes on which that is another number than before
        self.posted_messages: dict[tuple[int, int, str, int], _Message] = {}
        self.expected: dict[tuple[int, str, int], list[tuple[int, int, str, int]]] = {}
        self.arrivals_due: list[tuple[float, int]] = []  # messages under way: when, to which lane
        self.ends_due: list[tuple[float, int]] = []
        self.links: dict[tuple[int, int], float] = {}
        self.arrivals: dict[tuple[int, int, str, int], float] = {}
        self.to_check = list(range(len(self.lanes)))  # lanes
        self.tasks_left = sum(len(lane.tasks) for lane in self.lanes)  # tasks
        self._start()
        while self.tasks_left:
            self._advance()
            self._start()
        return Timeline(tuple(self.events))

    def _start(self) -> None:
        """Start every action that can start now."""
        while self.to_check:
            k = self.to_check.pop(0)
            while self._try_start(k):
                pass

    def _try_start(self, k: int) -> bool:
        """Start a lane's next action if what it needs has arrived; whether it started."""
        lane, state = self.lanes[k], self.states[k]
        if state.running or state.at == len(lane.tasks):
            return False
        task = lane.tasks[state.at]
        if task.kind in ("receive", "send"):
            self._post(task)
            self._record(lane, str(task), task.kind, self.now)
            self._finish_task(state)
            return True
        if not self._ready(task):
            state.waiting = self.now if state.waiting is None else state.waiting
            return False
        if state.waiting is not None and state.waiting < self.now:
            self._record(lane, str(task), "wait", state.waiting)
        work = self.work[task.stage, task.kind, task.microbatch]
        state.waiting, state.running, state.begun = None, True, self.now
        state.left, state.blocked, state.busy = work.seconds, work.blocked, work.busy
        state.mean_over_max = work.mean_over_max if work.seconds else 1.0
        if state.left or lane.within_node:
            self._use_cores(k, state.mean_over_max)
        self._schedule_end(k)
        return True

    def _post(self, task: StageAction) -> None:
        source, target = (task.peer, task.stage) if task.kind == "receive" else (task.stage, task.peer)
        key = (source, target, task.way, task.microbatch)
        message = self.posted_messages.setdefault(key, _Message())
        if task.kind == "receive":
            message.posted = self.now
            self.expected.setdefault((target, task.way, task.microbatch), []).append(key)
        else:
            message.sent = self.now
        if message.sent is not None and message.posted is not None:
            link = (source, target)
            begin = max(self.now, self.links.get(link, 0.0))
            arrival = self.arrivals[key] = self.links[link] = begin + self.messages[source, target, task.way]
            if arrival > self.now + 1e-12:
                heapq.heappush(self.arrivals_due, (arrival, self.home[target]))
            else:
                self.to_check.append(self.home[target])

    def _ready(self, task: StageAction) -> bool:
        """Whether everything a compute action needs has arrived."""
        if task.kind not in ("F", "B"):
            return True
        needed = self.expected.get((task.stage, task.kind, task.microbatch), [])
        return max([self.arrivals.get(key, math.inf) for key in needed], default=0.0) <= self.now + 1e-12

    def _advance(self) -> None:
        """Advance to the next moment at which work ends or a message arrives."""
        if self.changed:
            self._retime()
        while self.ends_due and self.states[self.ends_due[0][1]].end != self.ends_due[0][0]:
            heapq.heappop(self.ends_due)  # of a lane that has another speed since
        then = min(queue[0][0] if queue else math.inf for queue in (self.ends_due, self.arrivals_due))
        assert then < math.inf, "the lists wait for each other for ever"
        self.now = then
        ended: set[int] = set()
        while self.ends_due and self.ends_due[0][0] <= then + 1e-12:
            end, k = heapq.heappop(self.ends_due)
            if self.states[k].end == end:
                ended.add(k)
        for k in sorted(ended):
            self._end(k)
        while self.arrivals_due and self.arrivals_due[0][0] <= then + 1e-12:
            ended.add(heapq.heappop(self.arrivals_due)[1])
        self.to_check = sorted(ended)

    def _end(self, k: int) -> None:
        """End a lane's work: its exchanges follow, or its action is over."""
        lane, state = self.lanes[k], self.states[k]
        if state.left and state.blocked:
            self._use_cores(k, (1.0 if lane.within_node else 0.0) - state.mean_over_max)
            state.left, state.mean_over_max = 0.0, 1.0
            self._schedule_end(k)
            return
        if state.left or lane.within_node:
            self._use_cores(k, -state.mean_over_max)
        state.left = state.blocked = 0.0
        task = lane.tasks[state.at]
        self._record(lane, str(task), task.kind, state.begun)
        state.running, state.end = False, math.inf
        self._finish_task(state)

    def _finish_task(self, state: _State) -> None:
        state.at += 1
        self.tasks_left -= 1

    def _schedule_end(self, k: int) -> None:
        """Compute when a lane's work will end at its present speed."""
        state = self.states[k]
        state.since, state.speed = self.now, self._speed(k)
        state.end = self.now + (state.left or state.blocked) / state.speed
        heapq.heappush(self.ends_due, (state.end, k))

    def _use_cores(self, k: int, each: float) -> None:
        """Add to the cores in use on a lane's nodes, `each` for every rank."""
        for node, count in self.lanes[k].nodes if self.on and each else ():
            if node in self.on:
                self.busy[node] = round(self.busy[node] + each * count, 9)
                self.changed.add(node)

    def _retime(self) -> None:
        """Give lanes on nodes whose load changed their new speed."""
        for k in sorted({k for node in self.changed for k in self.on[node]}):
            state = self.states[k]
            speed = self._speed(k) if state.running else state.speed
            if speed != state.speed:
                done = (self.now - state.since) * state.speed
                if state.left:
                    state.left = max(state.left - done, math.ulp(state.left))
                else:
                    state.blocked = max(state.blocked - done, math.ulp(state.blocked))
                self._schedule_end(k)
        self.changed.clear()

    def _speed(self, k: int) -> float:
        """How fast a lane works: the slowest of its nodes decides."""
        lane, state = self.lanes[k], self.states[k]
        if not self.on or (not state.left and not lane.within_node):
            return 1.0
        slowest = 1.0
        for node, own in lane.nodes:
            cores = self.machine.cores.get(node, 0)
            if not cores:
                continue
            busy = self.busy[node]
            turns = min(1.0, cores / max(busy, 1))
            if state.left:
                crowd = 1.0 + (state.busy - 1.0) * max(min(busy, cores) - 1, 0) / max(cores - 1, 1)
                slowest = min(slowest, turns / crowd)
            else:
                slowest = min(slowest, turns / min(1.0, cores / (own + lane.beside)))
        return slowest

    def _record(self, lane: Lane, action: str, kind: str, start: float) -> None:
        self.events.append(Event(rank=lane.first, action=action, kind=kind, start=start, end=self.now))
