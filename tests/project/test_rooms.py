"""The arrows between rooms point one way, torch stays in its rooms, thought touches no files, clock or environment, and only
`cli` prints or exits.

A room is a module, or a package without the rooms inside it: the longest name of MAY_IMPORT that begins a module's name.
Imports are read from the source, those inside functions and under TYPE_CHECKING included: a dependency is one wherever it is
written.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "fourfold"

VALUES = {"errors", "units", "timeline", "index", "files", "table", "optimizers"}
LAYOUT = VALUES | {"plans.layout"}
PROGRAM = LAYOUT | {"graph", "ops", "plans.spec", "plans.lowering"}
PLANS = PROGRAM | {"plans", "plans.strategies", "plans.lists"}
PRICES = PLANS | {"cluster", "oracle.prices"}
ORACLE = PRICES | {"oracle", "oracle.time", "oracle.memory", "oracle.findings", "oracle.paradl"}
PLANNER = ORACLE | {"planner", "planner.search_task", "planner.splits", "planner.stages"}
WORKLOAD = PLANS | {"cluster", "models", "workload"}
MESSAGES = PLANS | {"runtime.host", "runtime.comm"}
RUNTIME = MESSAGES | {"runtime", "runtime.zero", "runtime.kernels", "runtime.execution"}
WORLD = RUNTIME | WORKLOAD | {"runs", "calibrate"}
ALL = PLANNER | WORLD | {"report", "report.page", "reproduce"}
DOOR = "__init__"  # fourfold/__init__.py, which looks its names up lazily

MAY_IMPORT = {
    **{value: VALUES for value in VALUES},
    "models": VALUES,
    "graph": VALUES,
    "ops": VALUES | {"graph"},
    "plans.layout": VALUES,
    "plans.spec": LAYOUT | {"graph"},
    "plans.lowering": PROGRAM,
    "plans.strategies": PROGRAM,
    "plans.lists": PROGRAM,
    "plans": PLANS,
    "cluster": VALUES,
    "oracle.prices": PRICES,
    "oracle.memory": PLANS,
    "oracle.time": PRICES | {"oracle.memory"},
    "oracle.findings": PRICES | {"oracle.time", "oracle.memory"},
    "oracle.paradl": PRICES | {"oracle.time"},
    "oracle": ORACLE,
    "planner.search_task": ORACLE,
    "planner.splits": ORACLE | {"planner.search_task"},
    "planner.stages": ORACLE | {"planner.search_task", "planner.splits"},
    "planner": PLANNER,
    "workload": WORKLOAD | {DOOR},
    "runtime.host": VALUES,
    "runtime.comm": MESSAGES,
    "runtime.zero": MESSAGES,
    "runtime.kernels": MESSAGES,
    "runtime.execution": RUNTIME - {"runtime"},
    "runtime": RUNTIME,
    "runs": RUNTIME | WORKLOAD,
    "calibrate": ORACLE | RUNTIME | WORKLOAD,  # times what the oracle prices, as the runtime runs it
    "reproduce": PLANNER | WORLD,  # papers rerun, by what users run
    "report": ALL | {DOOR},
    "report.page": ALL | {DOOR},
    "api": ALL | {DOOR},  # what the command line and Python users call
    "cli": VALUES | {"api", "report", "report.page", "runtime.host", DOOR},  # runtime.host: who speaks under torchrun
    DOOR: ALL | {"api"},
    "__main__": {"cli"},
}
CAPTURE = (
    "capture",
    "module_attributes",
    "export_watch",
    "export_errors",
    "refusals",
    "constant_ranges",
    "lstm_tracing",
    "fx_converter",
    "autocast",
)
GRAPH_FILES = tuple(f"graph/{name}.py" for name in CAPTURE)
WORLD_FILES = ("models/*", "runtime/*", "runs/*", "calibrate/*", "workload/*", *GRAPH_FILES)
TORCH_FILES = (*WORLD_FILES, "reproduce/*", "report/*", "api/*", "cli/*", "__init__.py")
TORCHLESS_FILES = ("workload/model_graph.py", "calibrate/kernel_table.py", "calibrate/robust_stats.py")
TORCH_MODULES = ("torch", "fourfold.runtime", "fourfold.runs", *(f"fourfold.graph.{name}" for name in CAPTURE))
SPEAKING_FILES = ("cli/*", "cli.py", "__main__.py")
THOUGHT_FILES = ("graph/*", "ops/*", "plans/*", "oracle/*", "planner/*")
OUTSIDE = {"os", "pathlib", "io", "time", "datetime", "tempfile", "logging", "subprocess", "socket", "random", "platform"}
"""Standard modules that reach for files, the clock or the environment."""
EXCEPTIONS = (*GRAPH_FILES, "plans/spec/plan_file.py", "planner/search.py", "planner/what_if.py")
"""Capture is of the world; a plan's file is one; searches have a time limit."""
ROOMS = {name.split(".")[0] for name in MAY_IMPORT}


def room_of(module: str) -> str:
    """Of a dotted name below fourfold."""
    parts = module.split(".")
    names = (".".join(parts[:k]) for k in range(len(parts), 0, -1))
    return next((name for name in names if name in MAY_IMPORT), DOOR if parts[0] not in ROOMS else parts[0])


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def imported_modules(file: str, source: str) -> Iterator[str]:
    """Absolute dotted names, one per imported name: `from torch import nn` gives torch.nn."""
    package = ["fourfold", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def room_violations(file: str, source: str) -> Iterator[str]:
    room = room_of(module_of(file)) if module_of(file).split(".")[0] in ROOMS else ""
    for module in imported_modules(file, source):
        name, _, rest = module.partition(".")
        target = room_of(rest) if rest else DOOR
        if name == "fourfold" and target != room and target not in MAY_IMPORT.get(room, set()):
            yield f"{file}: {room} may not import {module}"


def torch_violations(file: str, source: str) -> Iterator[str]:
    if matches(file, TORCH_FILES) and not matches(file, TORCHLESS_FILES):
        return
    for module in imported_modules(file, source):
        if module.startswith(TORCH_MODULES):
            yield f"{file}: imports {module}, but no torch belongs here"


def speech_violations(file: str, source: str) -> Iterator[str]:
    if matches(file, SPEAKING_FILES):
        return
    banned = {"print", "exit", "quit", "SystemExit", "sys.exit", "typer.echo", "typer.secho", "typer.Exit"}
    banned |= {"sys.stdout.write", "sys.stderr.write"}
    for node in ast.walk(ast.parse(source)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        raised = ast.unparse(node.exc) if isinstance(node, ast.Raise) and node.exc else ""
        if {called, raised} & banned:
            yield f"{file}:{node.lineno}: {called or raised}, but only cli prints or exits"
    for module in imported_modules(file, source):
        if module.split(".")[0] == "typer" or module == "sys.exit":
            yield f"{file}: imports {module}, but only cli prints or exits"


def outside_violations(file: str, source: str) -> Iterator[str]:
    if not matches(file, THOUGHT_FILES) or matches(file, EXCEPTIONS):
        return
    for module in imported_modules(file, source):
        if module.split(".")[0] in OUTSIDE or module.startswith(("fourfold.files", "fourfold.cluster.cache")):
            yield f"{file}: imports {module}, but thought touches no files, clock or environment"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "open":
            yield f"{file}:{node.lineno}: opens a file"


def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}


def test_every_room_is_known() -> None:
    assert {module_of(file).split(".")[0] for file in sources()} <= ROOMS, "a new room needs arrows in MAY_IMPORT"


def test_every_folder_says_what_it_is_for() -> None:
    folders = {path.parent for path in ROOT.rglob("*.py")}
    texts = {str(folder): ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) for folder in folders}
    assert all(texts.values()), [folder for folder, text in texts.items() if not text]


def test_folders_are_small() -> None:
    """At most fifteen files beside `__init__`; op families and their kernels have one file each."""
    folders = {path.parent for path in ROOT.rglob("*.py")} - {ROOT / "ops", ROOT / "runtime" / "kernels"}
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert all(count <= 15 for count in counts.values()), counts


@pytest.mark.parametrize("violations", [room_violations, torch_violations, speech_violations, outside_violations])
def test_the_house_is_in_order(violations) -> None:
    found = [line for file, source in sources().items() for line in violations(file, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("violations", "file", "source"),
    [
        (room_violations, "errors.py", "from fourfold.plans import Plan"),
        (room_violations, "graph/op.py", "from ..ops import conv"),
        (room_violations, "graph/op.py", "from .. import ops"),
        (room_violations, "ops/conv.py", "def f():\n    import fourfold.runtime.fetch"),
        (room_violations, "plans/mesh.py", "from fourfold import oracle"),
        (room_violations, "plans/mesh.py", "from fourfold import parallelize"),
        (room_violations, "runtime/kernels/conv.py", "from ...oracle.replay import replay"),
        (room_violations, "report/text.py", "import fourfold.cli"),
        (room_violations, "report/text.py", "from fourfold.api.planning import plan"),
        (room_violations, "cli/plan.py", "from fourfold.planner import search"),
        (room_violations, "attic/old.py", "from fourfold.errors import Error"),
        (room_violations, "plans/layout/mesh.py", "from fourfold.plans.lists.actions import Action"),
        (room_violations, "oracle/memory/rank.py", "from fourfold.oracle.time.estimate import estimate"),
        (room_violations, "runtime/comm/world.py", "from fourfold.runtime.execution.runner import Runner"),
        (room_violations, "runtime/host/launch.py", "from fourfold.runtime.comm.world import TIMEOUT"),
        (outside_violations, "oracle/time/stage.py", "import time"),
        (outside_violations, "plans/spec/plan.py", "from pathlib import Path"),
        (outside_violations, "planner/search_task.py", "def f():\n    open('x')"),
        (torch_violations, "plans/mesh.py", "import torch"),
        (torch_violations, "graph/graph.py", "from torch import nn"),
        (torch_violations, "graph/graph.py", "from .capture import capture"),
        (torch_violations, "oracle/cost.py", "from fourfold.graph import capture"),
        (torch_violations, "cluster/spec.py", "importlib.import_module('torch')"),
        (speech_violations, "runtime/train.py", "print('hello')"),
        (speech_violations, "runtime/train.py", "sys.stderr.write('hello')"),
        (speech_violations, "report/text.py", "import sys\nsys.exit(2)"),
        (speech_violations, "plans/plan.py", "raise SystemExit"),
        (speech_violations, "plans/plan.py", "import typer"),
    ],
)
def test_a_violation_is_noticed(violations, file: str, source: str) -> None:
    assert list(violations(file, source))


@pytest.mark.parametrize(
    ("violations", "file", "source"),
    [
        (room_violations, "graph/op.py", "from ..errors import Error\nfrom .spec import TensorSpec"),
        (room_violations, "runtime/kernels/conv.py", "from ..comm.exchange import fetch\nfrom ...plans import Plan"),
        (room_violations, "cli/app.py", "from fourfold import __version__"),
        (torch_violations, "graph/capture.py", "import torch.export"),
        (torch_violations, "calibrate/collectives.py", "import torch.distributed"),
        (speech_violations, "cli/app.py", "print('hello')"),
    ],
)
def test_what_is_allowed_passes(violations, file: str, source: str) -> None:
    assert not list(violations(file, source))


@pytest.mark.parametrize(
    "module", ["", ".api", ".api.planning", ".api.page", ".graph", ".ops", ".plans", ".cluster", ".oracle", ".planner"]
)
def test_importing_thought_leaves_torch_unloaded(module: str) -> None:
    place = ROOT.joinpath(*module.strip(".").split("."))
    if not (place / "__init__.py").exists() and not place.with_suffix(".py").exists():
        pytest.skip(f"fourfold{module} does not exist yet")
    script = f"import sys, fourfold{module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"import fourfold{module} loads torch"
