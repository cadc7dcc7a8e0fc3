"""Raw times of kernels (`device_kernels.py`) made into the file that comes with Fourfold for a device; no GPU is needed.

python benchmarks/device_fit.py benchmarks/results/2026-11-15-h200-kernels.json dgx-h200 src/fourfold/cluster/presets/h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from records import kernel_rows

from fourfold.cluster import cluster_named
from fourfold.files import write_file
from fourfold.oracle.prices.fitting import fit


def preset_text(data: dict[str, Any]) -> str:
    """JSON with a line for each kind of kernel."""
    parts = [f' "source": {json.dumps(data["source"])}']
    for name in ("host_seconds", "least_seconds", "points"):
        lines = (f"  {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in data[name].items())
        parts.append(f' "{name}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    raw, cluster, target = sys.argv[1:]
    record, kind = json.loads(Path(raw).read_text()), cluster_named(cluster).device(0)
    rows = kernel_rows(record)
    where = f"{record['device']} (torch {record['torch']}), {record['date']}"
    source = f"{len(record['rows'])} kernels of the built-in networks timed on one {where}"
    fitted = fit(rows, rates=dict(kind.rates), bandwidth=kind.bandwidth)
    write_file(Path(target), preset_text({"source": f"{source}; {raw}, benchmarks/device_fit.py", **fitted}))


if __name__ == "__main__":
    main()
