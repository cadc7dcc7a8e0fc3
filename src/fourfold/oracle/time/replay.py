"""The action lists of a pipeline played through on a described cluster: a predicted `Timeline`.

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
    still: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Ranks that act together: their list, which node they are on and how many they are there."""

    first: int  # rank
    tasks: tuple[StageAction, ...]
    nodes: tuple[tuple[int, int], ...]  # node, ranks of the lane on it
    beside: int = 0  # ranks of other lanes there, whose exchanges at the same time are in the measured times of this one's

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
    mean_over_max: float = 1.0
    begun: float = 0.0
    running: bool = False
    waiting: float | None = None  # since when
    speed: float = 1.0
    since: float = 0.0  # when `left` and `still` were true
    end: float = math.inf  # when the work, or then the exchanges, will be done at this speed


@dataclass(slots=True)
class _Message:
    sent: float | None = None
    posted: float | None = None


@dataclass
class Replay:
    """One step played through. `work[stage, kind, microbatch]`; `messages[source, target, way]`: seconds on the link.

    At each moment only lanes to which something happened are looked at: a lane whose work ended, one that a message reached,
    and those whose speed changed because another on their node began or ended something.
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
        self.post: dict[tuple[int, int, str, int], _Message] = {}
        self.expected: dict[tuple[int, str, int], list[tuple[int, int, str, int]]] = {}
        self.coming: list[tuple[float, int]] = []  # messages under way: when, to which lane
        self.ending: list[tuple[float, int]] = []
        self.links: dict[tuple[int, int], float] = {}
        self.arrivals: dict[tuple[int, int, str, int], float] = {}
        self.looked = list(range(len(self.lanes)))  # lanes to be looked at
        self.open = sum(len(lane.tasks) for lane in self.lanes)  # tasks
        self._start()
        while self.open:
            self._advance()
            self._start()
        return Timeline(tuple(self.events))

    def _start(self) -> None:
        """Let lanes do all that they can at this moment, one after the other."""
        while self.looked:
            k = self.looked.pop(0)
            while self._started(k):
                pass

    def _started(self, k: int) -> bool:
        """Let a lane do what takes no time and begin what does; whether anything happened."""
        lane, state = self.lanes[k], self.states[k]
        if state.running or state.at == len(lane.tasks):
            return False
        task = lane.tasks[state.at]
        if task.kind in ("receive", "send"):
            self._mail(task)
            self._note(lane, str(task), task.kind, self.now)
            self._done(state)
            return True
        if not self._ready(task):
            state.waiting = self.now if state.waiting is None else state.waiting
            return False
        if state.waiting is not None and state.waiting < self.now:
            self._note(lane, str(task), "wait", state.waiting)
        work = self.work[task.stage, task.kind, task.microbatch]
        state.waiting, state.running, state.begun = None, True, self.now
        state.left, state.still, state.busy = work.seconds, work.still, work.busy
        state.mean_over_max = work.mean_over_max if work.seconds else 1.0
        if state.left or lane.near:
            self._occupy(k, state.mean_over_max)
        self._timed(k)
        return True

    def _mail(self, task: StageAction) -> None:
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
            arrival = self.arrivals[key] = self.links[link] = begin + self.messages[source, target, task.way]
            if arrival > self.now + 1e-12:
                heapq.heappush(self.coming, (arrival, self.home[target]))
            else:
                self.looked.append(self.home[target])

    def _ready(self, task: StageAction) -> bool:
        """Whether everything a compute action needs has arrived."""
        if task.kind not in ("F", "B"):
            return True
        needed = self.expected.get((task.stage, task.kind, task.microbatch), [])
        return max([self.arrivals.get(key, math.inf) for key in needed], default=0.0) <= self.now + 1e-12

    def _advance(self) -> None:
        """To the next moment something ends or arrives."""
        if self.changed:
            self._retime()
        while self.ending and self.states[self.ending[0][1]].end != self.ending[0][0]:
            heapq.heappop(self.ending)  # of a lane that has another speed since
        then = min(self.ending[0][0] if self.ending else math.inf, self.coming[0][0] if self.coming else math.inf)
        assert then < math.inf, "the lists wait for each other for ever"
        self.now = then
        ended: set[int] = set()
        while self.ending and self.ending[0][0] <= then + 1e-12:
            end, k = heapq.heappop(self.ending)
            if self.states[k].end == end:
                ended.add(k)
        for k in sorted(ended):
            self._end(k)
        while self.coming and self.coming[0][0] <= then + 1e-12:
            ended.add(heapq.heappop(self.coming)[1])
        self.looked = sorted(ended)

    def _end(self, k: int) -> None:
        """A lane's work is done: its exchanges follow, or it is through with its action."""
        lane, state = self.lanes[k], self.states[k]
        if state.left and state.still:
            self._occupy(k, (1.0 if lane.near else 0.0) - state.mean_over_max)
            state.left, state.mean_over_max = 0.0, 1.0
            self._timed(k)
            return
        if state.left or lane.near:
            self._occupy(k, -state.mean_over_max)
        state.left = state.still = 0.0
        task = lane.tasks[state.at]
        self._note(lane, str(task), task.kind, state.begun)
        state.running, state.end = False, math.inf
        self._done(state)

    def _done(self, state: _State) -> None:
        state.at += 1
        self.open -= 1

    def _timed(self, k: int) -> None:
        """When what a lane has begun will end, if nothing changes."""
        state = self.states[k]
        state.since, state.speed = self.now, self._speed(k)
        state.end = self.now + (state.left or state.still) / state.speed
        heapq.heappush(self.ending, (state.end, k))

    def _occupy(self, k: int, each: float) -> None:
        """A lane's ranks take so much of a core each, or let go of it."""
        for node, count in self.lanes[k].nodes if self.on and each else ():
            if node in self.on:
                self.busy[node] = round(self.busy[node] + each * count, 9)
                self.changed.add(node)

    def _retime(self) -> None:
        """Lanes on nodes where others began or ended something go on at another speed."""
        for k in sorted({k for node in self.changed for k in self.on[node]}):
            state = self.states[k]
            speed = self._speed(k) if state.running else state.speed
            if speed != state.speed:
                done = (self.now - state.since) * state.speed
                if state.left:
                    state.left = max(state.left - done, math.ulp(state.left))
                else:
                    state.still = max(state.still - done, math.ulp(state.still))
                self._timed(k)
        self.changed.clear()

    def _speed(self, k: int) -> float:
        """How fast a lane works: the slowest of its nodes decides."""
        lane, state = self.lanes[k], self.states[k]
        if not self.on or (not state.left and not lane.near):
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

    def _note(self, lane: Lane, action: str, kind: str, start: float) -> None:
        self.events.append(Event(rank=lane.first, action=action, kind=kind, start=start, end=self.now))
