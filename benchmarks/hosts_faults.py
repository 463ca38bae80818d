"""What becomes of a job when a rank or a host is lost: hosts_faults.py [--runs N] [EVENT...] prints a table.

Four ranks on two hosts, which are namespaces, under the mpirun beside this Python. Needs root.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from common import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from hosts.faults import EVENTS, SILENCE_S, TIMEOUT_S, cause
from hosts.network import Network
from support.launchers import mpirun


def main() -> None:
    """Print a row for each event: who told of it, and after how many seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--texts", action="store_true", help="also what the ranks said in the last run")
    parser.add_argument("events", nargs="*", default=list(EVENTS))
    options = parser.parse_args()
    mpi = mpirun()
    assert mpi is not None, "no mpirun beside this Python"
    sys.stdout.write(f"{mpi.version}; silence {SILENCE_S} s, timeout {TIMEOUT_S} s; {options.runs} runs\n")
    sys.stdout.write("Seconds after the event: median (worst).\n\n")
    sys.stdout.write("| event | told by ranks (times) | same host | other host | job ended | left behind |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for event in options.events:
        outcomes = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder, Network(Path(folder), 2) as network:
                outcomes.append(cause(network, mpi, event))
        told = ", ".join(f"{r}: {sum(r in one.seconds for one in outcomes)}" for r in range(4))
        cells = [event, told]
        for there in ((2, 3), (0, 1)):
            cells += [_summary([one.seconds[r] for one in outcomes for r in there if r in one.seconds])]
        cells.append(_summary([one.ended_s for one in outcomes if one.ended_s is not None]))
        cells[-1] += "".join(f"; {n} never" for n in [sum(one.ended_s is None for one in outcomes)] if n)
        kinds = Counter(re.sub(r" \d+ |_[0-9a-f]{6,}_\d", " ", each)[:40] for one in outcomes for each in one.left)
        cells.append("; ".join(f"{kind} ({times})" for kind, times in kinds.items()) or "nothing")
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
        if options.texts:
            for rank, text in sorted(outcomes[-1].texts.items()):
                sys.stdout.write(f"    {rank}: {text}\n")


def _summary(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else "-"


if __name__ == "__main__":
    main()
