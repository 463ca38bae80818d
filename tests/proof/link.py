"""The model of the links, link.pml: its check by Spin, and executions for the replay on real links.

`python -m proof.link` in tests/ writes link_traces.txt anew. Spin is a package of Debian and others: apt install spin.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
# Faults of an execution; READY is none of them.
FAULTS = ("READY", "FAILURE", "SILENCE", "DEPARTURE")
# Executions that are kept of each kind, and those that are made to choose from.
KEPT, MADE = 8, 700
# Bytes of a state, and 2 to this power slots for states.
_CHECKER = ("-O2", "-DSAFETY", "-DVECTORSZ=2048", "-DHC4")
_SLOTS = 27


class Result(NamedTuple):
    errors: int
    states: int
    trace: str  # to the first error


def verify(*defines: str) -> Result:
    """Visit every state of the model with these definitions."""
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: str) -> str:
            return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout

        model = str(HERE / "link.pml")
        flags = [f"-D{name}" for name in defines]
        run("spin", *flags, "-a", model)
        run("cc", *_CHECKER, "-o", "pan", "pan.c")
        told = run("./pan", "-m10000", f"-w{_SLOTS}")
        errors, states = (int(re.search(pattern, told)[1]) for pattern in (r"errors: (\d+)", r"(\d+) states, stored"))
        trace = run("spin", *flags, "-k", str(Path(folder, "link.pml.trail")), "-T", model) if errors else ""
        return Result(errors, states, "\n".join(_events(trace)))


def _events(printed: str) -> list[str]:
    return [line.split("E ", 1)[1].strip() for line in printed.splitlines() if line.strip().startswith("E ")]


def executions(fault: str, *defines: str) -> list[tuple[int, list[str]]]:
    """Random executions with this fault, with their seeds; first those whose operations end differently on hosts."""
    found = []
    flags = [f"-D{name}" for name in (*defines, f"ONLY={fault}")]
    for seed in range(1, MADE):
        command = ["spin", *flags, f"-n{seed}", "-T", str(HERE / "link.pml")]
        events = _events(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        ends = [event.split() for event in events if event.startswith("end")]
        has_fault = fault == "READY" or any(failed == "1" for *_, failed in ends)
        if has_fault and not any(event.startswith("impatient") for event in events):  # that takes a second
            done = [done for _, _, done, _ in ends]
            found.append(((len(set(done)), len(done) - done.count("0"), len(events)), seed, events))
    return [(seed, events) for _, seed, events in sorted(found, reverse=True)[:KEPT]]


def main() -> None:
    lines = ["# Executions of link.pml: kind, fault, seed: events. Made by `python -m proof.link`."]
    for kind, defines in (("whole", ()), ("sliced", ("SLICED",))):
        for fault in FAULTS:
            for seed, events in executions(fault, *defines):
                lines.append(f"{kind} {fault.lower()} {seed}: {'; '.join(events)}")
    (HERE / "link_traces.txt").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
