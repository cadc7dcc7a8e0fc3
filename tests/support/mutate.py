"""Damaged files by the thousand: plans, clusters and records of runs, mutated from a seed and given to their readers.

    python tests/support/mutate.py --plans 10000 --clusters 10000 --records 2000 --seed 0

Each must be valid or refused in one line. A valid plan is checked against its graph and lowered, a valid cluster written, told
and priced, a valid record put into a page, since that is where a bad value would show. Everything runs in one process without
torch; the graphs are made by another one beforehand. Exit code 1 if anything was not caught, took more than 5 s, or the process
more than 1 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from fourfold.calibrate.kernel_table import known_prices
from fourfold.cluster import Cluster, cluster_text, load_cluster, preset_names
from fourfold.errors import Error
from fourfold.files import json_text
from fourfold.graph import Graph
from fourfold.graph.graph_file import graph_data, graph_from
from fourfold.oracle.predict import predict
from fourfold.plans import Options, Plan, lower_plan, named
from fourfold.plans.spec.plan_file import plan_data, read_plan
from fourfold.report.clusters import cluster_record
from fourfold.report.page.html_file import html_file
from fourfold.report.runs import read_run

SECONDS, BYTES = 5.0, 2**30
HANGS = 20  # seconds after which a case is given up
GUARD = 4 * 2**30  # bytes of addresses the process may have at all, so that a case that runs away takes no machine with it
STRATEGIES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("data", 4, {}), ("data+filter", 4, {"zero": 1}), ("spatial", 2, {}), ("splitbrain:k=2", 4, {}),
    ("grid", 4, {"recompute": 2}), ("pipeline", 3, {"microbatches": 4}), ("data+pipeline", 4, {"microbatches": 4, "zero": 1}),
    ("pipeline", 2, {"stages": 4, "microbatches": 4, "schedule": "interleaved"}), ("fsdp", 4, {}),
)  # fmt: skip
MODELS = ("vgg16-cifar", "gpt2")
MEASURED = """
[[measured]]
collective = "all_reduce"
level = "{level}"
ranks = 2
size_bytes = [1024, 1048576]
time_us = [50, 400.5]
spread_us = [2, 10]
[[waits]]
level = "{level}"
ranks = 2
groups = 2
computing_ms = [3, 12]
time_ms = [1.5, 3]
"""


# --- what is mutated -------------------------------------------------------------------------------------------------------


def material() -> dict[str, Any]:
    """Graphs, plans and records, as data. Needs torch."""
    from small import batch_of, graph_of

    graphs = {name: graph_of(name) for name in MODELS}
    plans, records = [], []
    for name, graph in graphs.items():
        for strategy, ranks, options in STRATEGIES:
            if name == "gpt2" and strategy in ("spatial", "splitbrain:k=2"):
                continue
            made = named(strategy, graph, ranks=ranks, batch=batch_of(name), options=Options(**options), model=name)
            made = replace(made, signature={"inputs": [["x", [8, 3, 32, 32], "float32"]], "targets": [["", [8], "int64"]]})
            made_for = {"cluster": "ethernet-1g", "precision": "fp32", "optimizer": "sgd"}
            plans.append({"model": name, "plan": {**plan_data(made), "made_for": made_for}})
            records += [_trained(made), _verified(made)]
    return {"graphs": {name: graph_data(graph) for name, graph in graphs.items()}, "plans": plans, "records": records}


def _both(plan: Plan) -> dict[str, Any]:
    return {
        "version": 1, "model": plan.model, "graph": plan.graph, "strategy": plan.strategy, "ranks": plan.size,
        "precision": "fp32", "optimizer": "sgd", "steps": 2, "predicted_seconds": 0.19,
        "predicted_interval_seconds": [0.1, 0.3], "predicted_peak_bytes": 100.0, "waiting": [0.1, 0.2], "nonfinite_step": None,
    }  # fmt: skip


def _trained(plan: Plan) -> dict[str, Any]:
    return {**_both(plan), "batch": plan.batch, "losses": [2.0, None], "step_seconds": 0.2, "samples_per_second": 40.0,
            "peak_bytes": [90, 95], "trace": None}  # fmt: skip


def _verified(plan: Plan) -> dict[str, Any]:
    check = {"tensor": "w", "what": "loss", "step": 1, "error": 1e-12, "limit": 1e-9, "holds": True}
    errors = {f"{what}_error": 1e-12 for what in ("loss", "gradient", "parameter", "output")}
    return {
        **_both(plan), **errors, "plan": plan_data(plan), "equal": True, "noise_floor": None, "worst": check, "checks": [check],
        "reference": "eager", "plain_rule": True, "split_flops_fraction": 1.0, "ops_replicated": ["a.b"],
        "replicated_bytes": 12, "measured_seconds": 0.2, "measured_peak_bytes": 95,
    }  # fmt: skip


def clusters() -> list[str]:
    """Built-in clusters as text, with measurements."""
    found = []
    for name in preset_names():
        text = (Path(__file__).parents[2] / "src" / "fourfold" / "cluster" / "presets" / f"{name}.toml").read_text()
        level = next((line.split('"')[1] for line in reversed(text.splitlines()) if line.startswith("name = ")), "")
        found += [text, text + MEASURED.format(level=level)]
    return found


# --- mutations -------------------------------------------------------------------------------------------------------------

RAW = ("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "9" * 5000, '"\\ud800"', '"\\u0000"', "-0", "1e-400",
       "[" * 2000, '{"a":1,"a":2}', '"' + "x" * 300_000 + '"', "0x10", "01", "+1", "'a'", "//", "\ufeff")  # fmt: skip
"""Written as they are: what no Python value gives."""


NUMBERS = (0, -1, 1, 2, 3.0, 2.5, -0.0, 2**16, 2**17, 2**20, 2**31, 2**40, 2**62, -(2**62), 1e300, 1e-300)
TEXTS = ("", "3", "x", "batch", "domain:99999999999999999999", "dim:7", "*", "a" * 5000, "\x1b[31m", "a\nb", "\u202e", "gpipe",
         "fbp-as", "interleaved", "1f1b-as", "features.0", "subprocess:getoutput,cmd=true")  # fmt: skip
OTHERS = (None, True, False, [], {}, [1], [[]], [0], [0, 1], [1, 0], {"a": 1}, {"op": 2}, {"data": 2**17},
          {"data": 2**9, "model": 2**9}, {f"k{i}": i for i in range(100)}, ["*a" * 30] * 50)  # fmt: skip


def copied(data: Any) -> Any:
    """The same data with nothing shared: a change in one place shall not be one in many."""
    return json.loads(json.dumps(data))


def odd_value(dice: random.Random) -> Any:
    return copied(_odd_value(dice))


def _odd_value(dice: random.Random) -> Any:
    kind = dice.randrange(6)
    if kind < 3:
        return dice.choice((NUMBERS, TEXTS, OTHERS)[kind])
    if kind == 3:
        return list(range(dice.choice((10, 1000, 100_000))))
    if kind == 4:
        return [{"op": "*" * 20 + "x", "data": "batch"}] * dice.choice((2, 150, 5000))
    deep: Any = 1
    for _ in range(dice.choice((3, 40, 400))):
        deep = [deep] if dice.random() < 0.5 else {"a": deep}
    return deep


SPLITS = ("batch", "filter", "channel", "replicate", "domain:0", "domain:1", "domain:2", "dim:0", "dim:1", "dim:2")


def mutate_plan(data: dict[str, Any], ops: list[str], dice: random.Random) -> dict[str, Any]:
    """A plan that a person might write: other splits, sizes, stages, segments, of the right kinds."""
    axes = [*data["mesh"]]
    axis, pick = dice.choice(axes), lambda: dice.choice(ops)
    kind = dice.randrange(11)
    if kind < 3:
        pattern = dice.choice((pick(), pick().split(".")[0] + "*", "*"))
        data["splits"].insert(dice.randrange(len(data["splits"]) + 1), {"op": pattern, axis: dice.choice(SPLITS)})
    elif kind == 3:
        data["inputs"][axis] = dice.choice(SPLITS)
    elif kind == 4:
        data["mesh"][dice.choice((axis, "new"))] = dice.choice((1, 2, 3, 5, 8, 64))
    elif kind == 5:
        data["batch"] = dice.choice((1, 2, 3, 7, 64, 2**20, 2**40))
    elif kind == 6:
        data["microbatches"], data["schedule"] = dice.choice((1, 2, 3, 4, 8)), dice.choice(TEXTS[11:15])
    elif kind == 7:
        data["recompute"] = [{"first": pick(), "last": pick()} for _ in range(dice.randrange(1, 4))]
    elif kind == 8:
        data["passes"] = [{"first": pick(), "last": pick(), "count": dice.choice((1, 2, 3, 250, 9999)), "axis": axis}]
    elif kind == 9:
        data["zero"] = dice.choice((0, 1, 3))
    else:
        count = dice.randrange(1, 5)
        firsts = sorted(dice.sample(range(len(ops)), min(count, len(ops))))
        data["stages"] = [{"first": ops[k] if k or n else "", "ranks": [n], "mesh": {axis: 1}} for n, k in enumerate(firsts)]
    return data


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def mutate_data(data: Any, dice: random.Random) -> Any:
    """The data with one thing changed."""
    found = list(places(data))
    path = dice.choice(found[1:] or found)
    if not path:
        return odd_value(dice)
    parent, key = at(data, path[:-1]), path[-1]
    value = parent[key]
    kind = dice.randrange(9)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        name = str(key)
        spot = dice.randrange(len(name) + 1)
        parent[name[:spot] + dice.choice("xyz_") + name[spot + dice.randrange(2) :]] = parent.pop(key)
    elif kind == 2:
        parent[key] = copied(at(data, dice.choice(found)))
    elif kind == 3 and isinstance(value, int | float) and not isinstance(value, bool):
        parent[key] = dice.choice((value + 1, value - 1, value * 2, value * 1000, -value, float(value), str(value)))
    elif kind == 4 and isinstance(value, list) and value:
        often = dice.choice((2, 3, max(2, 10_000 // len(json.dumps(value)))))
        parent[key] = copied(dice.choice((value * often, value[::-1], value[1:], [*value, value[0]])))
    elif kind == 5 and isinstance(value, str):
        spot = dice.randrange(len(value) + 1)
        parent[key] = value[:spot] + dice.choice(("", "*", "?", "[", ":", "0", "\x00", "\udc80", ".")) + value[spot + 1 :]
    elif kind == 6 and isinstance(parent, dict):
        parent[dice.choice(("extra", "Batch", "op", "data", "plan", "version", ""))] = odd_value(dice)
    else:
        parent[key] = odd_value(dice)
    return data


def mutate_text(text: str, dice: random.Random, raw: tuple[str, ...]) -> bytes:
    """The text with something cut, doubled, put in or changed, as bytes."""
    data, spot = text.encode("utf-8", "surrogatepass"), dice.randrange(len(text) + 1)
    kind = dice.randrange(6)
    if kind == 0:
        return data[:spot]
    if kind == 1:
        return data[:spot] + data[spot + dice.randrange(1, 20) :]
    if kind == 2:
        return data[:spot] + bytes(dice.randrange(256) for _ in range(dice.randrange(1, 4))) + data[spot:]
    if kind == 3:
        return data[:spot] + data[max(0, spot - dice.randrange(1, 200)) :]
    if kind == 4:
        return data[:spot] + dice.choice(raw).encode() + data[spot:]
    numbers = [i for i, c in enumerate(text) if c.isdigit() and text[max(0, i - 1)] in " [:"]
    if not numbers or not text.isascii():
        return data + dice.choice(raw).encode()
    spot = dice.choice(numbers)
    end = next((i for i in range(spot, len(text)) if text[i] not in "0123456789.e+-"), len(text))
    return (text[:spot] + dice.choice(raw) + text[end:]).encode()


def mutant_plan(base: Any, graph: Graph, dice: random.Random) -> bytes:
    if dice.random() < 0.6:
        return mutant_json(base, dice)
    data, ops = copied(base), [op.path for op in graph.ops]
    for _ in range(dice.randrange(1, 5)):
        data = mutate_plan(data, ops, dice)
    return json.dumps(data).encode()


def mutant_json(base: Any, dice: random.Random) -> bytes:
    data = copied(base)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        data = mutate_data(data, dice)
        if not isinstance(data, dict | list):
            break
    text = json.dumps(data, indent=dice.choice((None, 1)))
    if dice.random() < 0.002:
        return text.encode() + b" " * 17 * 2**20
    return mutate_text(text, dice, RAW) if dice.random() < 0.3 else text.encode()


TOML = ("nan", "inf", "-inf", "1e999", "9" * 400, "9" * 5000, "0", "-1", "true", '"3"', "3.0", "1979-05-27T07:32:00Z", "[]",
        "[1, 2]", "1" + "0" * 17, '"\\u0000"', '"' + "x" * 20_000 + '"', "{}", "{a = 1}", "[" * 500, "1e300", "1e-300",
        "4294967296", "07:32:00", "[[1]]", '["a"]', "1" + ", 1" * 5000, "0x" + "f" * 9000,
        "{" + "a." * 1200 + "b = 1}")  # fmt: skip
HEADERS = ("[device.x]", "[[nodes]]", "[[link]]", "[[measured]]", "[[waits]]", "[device]", "[a.b.c]", "[" + "a." * 900 + "b]",
           "[[link]]\n" * 70)  # fmt: skip


def mutant_toml(base: str, dice: random.Random) -> bytes:
    lines = base.splitlines()
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        k = dice.randrange(len(lines))
        key, sign, _ = lines[k].partition(" = ")
        kind = dice.randrange(8)
        if kind == 0:
            lines[k] = ""
        elif kind == 1 and sign:
            spot = dice.randrange(len(key) + 1)
            lines[k] = key[:spot] + dice.choice("xyz_") + key[spot + dice.randrange(2) :] + lines[k][len(key) :]
        elif kind == 2:
            lines.insert(k, lines[dice.randrange(len(lines))])
        elif kind == 3:
            lines.insert(k, dice.choice(HEADERS))
        elif kind == 4:
            j = dice.randrange(len(lines))
            lines[k], lines[j] = lines[j], lines[k]
        elif sign:
            lines[k] = f"{key} = {dice.choice(TOML)}"
    text = "\n".join(lines) + "\n"
    if dice.random() < 0.002:
        return text.encode() * (2**20 // len(text) + 1)
    return mutate_text(text, dice, TOML) if dice.random() < 0.2 else text.encode()


# --- readers ---------------------------------------------------------------------------------------------------------------


def lowered(path: Path, graph: Graph) -> None:
    """All that the commands do with a plan."""
    plan, _ = read_plan(path)
    json_text(plan_data(plan))
    plan = replace(plan, graph=graph.hash)
    plan.check(graph)
    program = lower_plan(graph, plan)
    for ranks in program.places:
        program.rank_schedule(ranks[0])


def priced(path: Path, program: Callable[[], Any]) -> None:
    """All that the commands do with a cluster."""
    cluster = load_cluster(path)
    again = path.with_name("again.toml")
    again.write_text(cluster_text(cluster), "utf-8")
    if load_cluster(again) != cluster:
        raise AssertionError("the cluster does not survive its file")
    json_text(cluster_record(cluster))
    _predicted(cluster, program())


def _predicted(cluster: Cluster, program: Any) -> None:
    prices = known_prices(cluster.with_size(program.plan.size), "fp32")
    json_text(predict(program, prices).estimate.step_seconds)


def shown(path: Path, plan: Plan) -> None:
    """All that `report` does with a record."""
    from dataclasses import asdict

    html_file("page", {"runs": [asdict(read_run(path, of=plan))]})


# --- the run ---------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the files of one kind."""

    valid: int = 0
    refused: int = 0
    slowest: float = 0.0
    slow: int = 0
    uncaught: list[str] = field(default_factory=list)
    words: Counter[str] = field(default_factory=Counter)

    def take(self, content: bytes, path: Path, read: Callable[[Path], None], name: str) -> None:
        path.write_bytes(content)
        begun = time.perf_counter()
        signal.alarm(HANGS)
        try:
            read(path)
            self.valid += 1
        except Error as error:
            line = str(error)
            if not line or "\n" in line or len(line) > 4000:
                self.uncaught.append(f"{name}: the refusal is no line: {line[:300]!r} ({len(line)} characters)")
            else:
                self.refused += 1
            self.words[" ".join(line.replace(str(path), "FILE").split()[1:5])[:50]] += 1
        except BaseException as error:  # whatever it is, it is counted
            if isinstance(error, KeyboardInterrupt):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.uncaught.append(f"{name}: {type(error).__name__} {str(error)[:200]} at {where.filename}:{where.lineno}")
        signal.alarm(0)
        seconds = time.perf_counter() - begun
        self.slowest = max(self.slowest, seconds)
        if seconds > SECONDS:
            self.slow += 1
            self.uncaught.append(f"{name}: took {seconds:.1f} s")


def peak_bytes() -> int:
    """The most memory this program held. Of the two that Linux tells, the other one counts the parent's before the exec too."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, count in (("plans", 10_000), ("clusters", 10_000), ("records", 2_000)):
        parser.add_argument(f"--{kind}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the one case of this number, its file left as mutant.bin")
    parser.add_argument("--material", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.material is not None:
        asked.material.write_text(json.dumps(material()))
        return 0
    with tempfile.TemporaryDirectory(prefix="fourfold-mutants-") as folder:
        return run(asked, Path(folder))


def gave_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no answer after {HANGS} s")


def run(asked: argparse.Namespace, folder: Path) -> int:
    file = folder / "material.json"
    subprocess.run([sys.executable, __file__, "--material", str(file)], check=True)
    data = json.loads(file.read_text())
    graphs = {name: graph_from(found) for name, found in data["graphs"].items()}
    signal.signal(signal.SIGALRM, gave_up)
    resource.setrlimit(resource.RLIMIT_AS, (GUARD, resource.getrlimit(resource.RLIMIT_AS)[1]))
    tallies = {kind: Tally() for kind in ("plans", "clusters", "records")}
    path, toml = folder / "mutant.json", folder / "mutant.toml"
    bases = clusters()
    first = graphs[MODELS[0]]
    program = lower_plan(first, named("data", first, ranks=2, batch=8))

    def plan(dice: random.Random, name: str) -> None:
        base = dice.choice(data["plans"])
        graph = graphs[base["model"]]
        content = mutant_plan(base["plan"], graph, dice)
        save(content)
        tallies["plans"].take(content, path, lambda p: lowered(p, graph), name)

    def cluster(dice: random.Random, name: str) -> None:
        content = mutant_toml(dice.choice(bases), dice)
        save(content)
        tallies["clusters"].take(content, toml, lambda p: priced(p, lambda: program), name)

    def record(dice: random.Random, name: str) -> None:
        base = dice.choice(data["records"])
        content = mutant_json(base, dice)
        save(content)
        of = replace(program.plan, graph=base["graph"], model=base["model"])
        tallies["records"].take(content, path, lambda p: shown(p, of), name)

    def save(content: bytes) -> None:
        if asked.only is not None:
            Path("mutant.bin").write_bytes(content)

    for kind, one in (("plans", plan), ("clusters", cluster), ("records", record)):
        for number in range(getattr(asked, kind)) if asked.only is None else [asked.only] * (getattr(asked, kind) > 0):
            one(random.Random(f"{asked.seed} {kind} {number}"), f"{kind} {number}")
    return told(tallies, asked.seed)


def told(tallies: dict[str, Tally], seed: int) -> int:
    print(f"seed {seed}   {'files':>8}{'valid':>8}{'refused':>9}{'uncaught':>10}{'over 5 s':>10}{'slowest':>10}{'reasons':>9}")
    for kind, t in tallies.items():
        bad = len(t.uncaught) - t.slow
        row = f"{t.valid + t.refused + bad:>8}{t.valid:>8}{t.refused:>9}{bad:>10}{t.slow:>10}{t.slowest:>8.2f} s"
        print(f"{kind:<9}{row}{len(t.words):>9}")
    peak, torch = peak_bytes(), "torch" in sys.modules
    print(f"peak of the process: {peak / 2**20:.0f} MiB of 1024{', with torch' if torch else ''}")
    found = [line for t in tallies.values() for line in t.uncaught]
    for line in found[:40]:
        print(line)
    return 1 if found or peak > BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
