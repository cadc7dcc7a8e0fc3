"""SplitBrain (arXiv 2112.15317): VGG for CIFAR-10, convolutions by examples and the classifier by filters within groups of K.

On 2 and 4 ranks: equality with one device, bytes by what they are, throughput on this machine and on 1 Gbit/s links. Foretold:
32 workers on Ethernet, and the classifier's width at which the paper's 67 % would be reached. Its machines are not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from fourfold.calibrate.kernel_table import known_prices
from fourfold.cluster import cluster_named
from fourfold.errors import InvalidInput
from fourfold.graph import Graph
from fourfold.graph.spec import ITEM_BYTES
from fourfold.oracle.cost_model import Setting
from fourfold.oracle.scaling import Row, Study
from fourfold.plans import lower_plan, named
from fourfold.reproduce.race import OPTIMIZER, Contender, Outcome, Race, between, local
from fourfold.reproduce.study import Expectation, Progress, Reproduction, Steps, Table, at_least, close_to, silent
from fourfold.runs.reference import Reference
from fourfold.runs.verify import verify
from fourfold.runtime.rank_pool import rank_pool
from fourfold.units import bytes_text
from fourfold.workload.workload import Workload, load_workload

MODEL = "vgg16-cifar"
BATCH = 32
EACH = 8  # examples of a rank, as many as the largest group has members
GROUPS = {2: (1, 2), 4: (1, 2, 4)}  # by number of ranks
RATE = "1gbit"
STEPS = 4
CLUSTER = "ethernet-10g"
WORKERS = (1, 2, 4, 8, 16, 32)
SIMULATED = (1, 2, 4, 8)
EXAMPLES = (64, 128, 256, 512)  # of a worker
SAVED = 0.67  # the paper's
EFFICIENT = 0.85


def strategy(k: int) -> str:
    return f"splitbrain:k={k}" if k > 1 else "data"


def reproduce(progress: Progress = silent, *, runs: bool = True) -> Reproduction:
    """The paper rerun."""
    steps = Steps(progress, 2 + (sum(map(len, GROUPS.values())) + 2 * len(GROUPS) if runs else 0))
    tables: list[Table] = []
    expected: list[Expectation] = []
    notes = [
        "The paper's machines, batch and tables are not known: its memory saved and its speedup are what it claims in words."
    ]
    if runs:
        for table, some in (_equality(steps), *_raced(steps, notes)):
            tables.append(table)
            expected += some
    for table, some in (_buffers(steps), _simulated(steps), _widths()):
        tables.append(table)
        expected += some
    return Reproduction(
        name="splitbrain",
        title="SplitBrain: hybrid data and model parallelism",
        tables=tuple(tables),
        expectations=tuple(expected),
        notes=tuple(notes),
    )


@cache
def seen(batch: int) -> Workload:
    return load_workload(MODEL, batch=batch, data=False)


def classifier_share(graph: Graph) -> float:
    """f: the part of the parameters that is sharded."""
    sizes = {p.key: graph.values[p.name].numel for p in graph.parameters}
    return sum(size for key, size in sizes.items() if key.startswith("classifier")) / sum(sizes.values())


def _equality(steps: Steps) -> tuple[Table, list[Expectation]]:
    model = load_workload(MODEL, batch=8)
    reference = Reference(workload=model, optimizer=OPTIMIZER, steps=2)
    rows, held = [], []
    for ranks, groups in GROUPS.items():
        with rank_pool(ranks) as team:
            for k in groups:
                steps(f"comparing {ranks} ranks, K = {k}, with one device")
                found = verify(model, model.plan(strategy(k), ranks=ranks), team, reference=reference)
                assert found is not None
                held.append(found.equal)
                rows.append(
                    (
                        str(ranks),
                        str(k),
                        f"{found.error('gradient'):.1e}",
                        f"{found.error('parameter'):.1e}",
                        "equal" if found.equal else "NOT EQUAL",
                    )
                )
    table = Table(
        title="The numbers of one device, float64, largest relative error",
        rows=tuple(rows),
        head=("ranks", "K", "gradients", "parameters", ""),
    )
    return table, [
        Expectation(
            what="every K gives the numbers of one device",
            ours=f"{sum(held)} of {len(held)}",
            paper="",
            mark="unknown",
            holds=all(held),
            chief=True,
        )
    ]


def _raced(steps: Steps, notes: list[str]) -> Iterator[tuple[Table, list[Expectation]]]:
    """What ranks hold, and how fast they are."""
    found: dict[tuple[str, int], dict[str, Outcome]] = {}
    for ranks, groups in GROUPS.items():
        race = Race(
            model=MODEL,
            batch=BATCH,
            steps=STEPS,
            contenders=tuple(Contender(name=str(k), strategy=strategy(k)) for k in groups),
        )
        steps(f"timing {ranks} ranks of this machine")
        found["this machine", ranks] = local(race, ranks)
        try:
            steps(f"timing {ranks} hosts at 1 Gbit/s")
            found["1 Gbit/s", ranks] = between(race, count=ranks, rate=RATE)
        except InvalidInput as reason:
            notes.append(f"Not measured at 1 Gbit/s: {reason}")
    yield _held({ranks: found["this machine", ranks] for ranks in GROUPS})
    rows = []
    for (where, ranks), outcomes in found.items():
        speeds = {k: BATCH / outcome.median for k, outcome in outcomes.items()}
        rows += [(where, str(ranks), k, f"{speed:.1f}", f"{speed / speeds['1']:.2f}") for k, speed in speeds.items()]
    yield (
        Table(
            title=f"Throughput, batch {BATCH}, medians of {STEPS} steps taken in turn",
            rows=tuple(rows),
            head=("links", "ranks", "K", "examples/s", "of K = 1"),
            note="Four ranks share two cores where there are no more; ranks of one machine share memory.",
        ),
        [],
    )


def _held(outcomes: dict[int, dict[str, Outcome]]) -> tuple[Table, list[Expectation]]:
    share, rows, expected = classifier_share(seen(BATCH).graph), [], []
    for ranks, some in outcomes.items():
        whole = some["1"].held
        for name, outcome in some.items():
            held, k = outcome.held, int(name)
            active = held["peak"] - sum(held[kind] for kind in ("parameters", "gradients", "optimizer"))
            saved = 1 - held["parameters"] / whole["parameters"]
            rows.append(
                (
                    str(ranks),
                    name,
                    *(bytes_text(held[kind]) for kind in ("parameters", "gradients", "optimizer")),
                    bytes_text(active),
                    bytes_text(held["peak"]),
                    f"{saved:.1%}",
                    f"{1 - held['peak'] / whole['peak']:.1%}",
                )
            )
            if k > 1:
                expected.append(
                    close_to(
                        f"{ranks} ranks, K = {k}: weights saved, f (1 - 1/K), %",
                        100 * saved,
                        100 * share * (1 - 1 / k),
                        within=0.01,
                        mark="remembered",
                        chief=k == 4,
                    )
                )
    head = ("ranks", "K", "parameters", "gradients", "optimizer", "activations", "peak", "weights saved", "all saved")
    note = f"Measured, of the fullest rank; momentum SGD. f, the classifier's share of the parameters, is {share:.1%}."
    return Table(title="Bytes of a rank", head=head, rows=tuple(rows), note=note), expected


def gathered(text: str, ranks: int) -> int:
    """Bytes of the largest buffer that activations are gathered into."""
    graph = seen(BATCH).graph
    program = lower_plan(graph, named(text, graph, ranks=ranks, batch=EACH * ranks)).parts[0].program
    sizes = [
        math.prod(step.target.local_shape(program.mesh.coords(0))) * ITEM_BYTES[graph.values[move.value].dtype]
        for move in program.moves()
        for step in move.exchange.steps
        if step.pattern == "all_gather" and move.kind == "layer_exchange"
    ]
    return max(sizes, default=0)


def _buffers(steps: Steps) -> tuple[Table, list[Expectation]]:
    steps("the buffers of passes")
    rows, expected = [], []
    for k in (2, 4, 8):
        once, often = gathered(f"splitbrain:k={k},passes=1", k), gathered(f"splitbrain:k={k}", k)
        rows.append((str(k), bytes_text(once), bytes_text(often), f"{once / often:.2f}"))
        expected.append(
            close_to(
                f"K = {k}: the buffer of one pass is so many times smaller", once / often, k, within=0.01, mark="remembered"
            )
        )
    return Table(
        title=f"The largest buffer that activations are gathered into, {EACH} examples a rank",
        rows=tuple(rows),
        head=("K", "all at once", "in K passes", "times smaller"),
    ), expected


def _simulated(steps: Steps) -> tuple[Table, list[Expectation]]:
    steps(f"foretelling {WORKERS[-1]} workers")
    prices = {n: known_prices(cluster_named(CLUSTER, devices=n), "fp32") for n in WORKERS}
    settings = {n: Setting(prices=known, optimizer=OPTIMIZER) for n, known in prices.items()}
    studies = {b: Study(graph=seen(BATCH).graph, settings=settings, batch=b, scaling="weak") for b in EXAMPLES}
    rows, curves = [], {}
    for batch, study in studies.items():
        for k in SIMULATED:
            row = study.row(strategy(k), WORKERS[-1])
            rows.append((str(batch), str(k), *_cells(row)))
    study = studies[EXAMPLES[-1]]
    for k in SIMULATED:
        some = [study.row(strategy(k), n) for n in WORKERS if n >= k and n % k == 0]
        curves[f"K = {k}"] = [(row.devices, 100 * (row.efficiency or 0.0)) for row in some]
    best, which = max((curve[-1][1] / 100, name) for name, curve in curves.items() if name != "K = 1")
    note = (
        f"Weak scaling on {CLUSTER}, whole steps; efficiency against one worker. The curves, in percent, are those of "
        f"{EXAMPLES[-1]} examples a worker. The paper's machines are unknown, and so is its batch."
    )
    head = ("examples a worker", "K", "step, s", "examples/s", "efficiency")
    table = Table(title=f"{WORKERS[-1]} workers, predicted", head=head, rows=tuple(rows), note=note, plot=curves)
    return table, [
        at_least(
            f"efficiency of {WORKERS[-1]} workers, {which}, {EXAMPLES[-1]} examples each",
            best,
            EFFICIENT,
            mark="unknown",
            chief=True,
        )
    ]


def _cells(row: Row) -> tuple[str, str, str]:
    if row.forecast is None:
        return "cannot be", "", ""
    return f"{row.forecast.step_seconds:.3f}", f"{row.samples_per_second:,.0f}", f"{row.efficiency:.0%}"


def width_saving(saved: float, k: int) -> float | None:
    """The classifier's width w at which weights of 512 w + w^2 + 10 w and their biases, sharded K ways, save so much of all."""
    rest = sum(seen(BATCH).graph.values[p.name].numel for p in seen(BATCH).graph.parameters if p.key.startswith("features"))
    share = saved / (1 - 1 / k)
    if share >= 1:
        return None
    need = rest * share / (1 - share)
    inputs, classes = 512, 10
    linear = inputs + classes + 2
    return (-linear + math.sqrt(linear**2 + 4 * (need - classes))) / 2


def _widths() -> tuple[Table, list[Expectation]]:
    rows = []
    for name in (MODEL, "vgg16"):
        share = classifier_share(load_workload(name, batch=2, data=False).graph)
        rows.append((f"weights saved, {name}", f"{share:.1%}", *(f"{share * (1 - 1 / k):.1%}" for k in SIMULATED[1:])))
    widths = (width_saving(SAVED, k) for k in SIMULATED[1:])
    rows.append((f"width that saves 67 %, {MODEL}", "", *("none" if w is None else f"{w:,.0f}" for w in widths)))
    note = (
        "Whole networks, the classifier 4096 wide. The paper says up to 67 % of memory, not of which network. With K = 2 "
        "no width saves more than half."
    )
    return Table(
        title="f (1 - 1/K), and the classifier's width at which the paper's 67 % of weights are saved",
        rows=tuple(rows),
        head=("", "f", *(f"K = {k}" for k in SIMULATED[1:])),
        note=note,
    ), []
