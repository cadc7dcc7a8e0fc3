"""A command on hosts with slow links between them (`fourfold.reproduce.hosts`); without a command it measures the link.

    python benchmarks/slow_link.py --rate 100mbit -- python script.py

Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fourfold.errors import Error, WorkerFailed
from fourfold.reproduce.hosts import hosts

PROBE = [sys.executable, str(Path(__file__).with_name("link_probe.py"))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("command", nargs="*", default=PROBE)
    options = parser.parse_args()
    try:
        with hosts(count=options.hosts, rate=options.rate) as run:
            for k, output in enumerate(run(options.command)):
                print(f"host {k}:\n{output}", end="")
    except Error as error:
        print(error, file=sys.stderr)
        sys.exit(3 if isinstance(error, WorkerFailed) else 2)


if __name__ == "__main__":
    main()
