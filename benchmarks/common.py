"""What all benchmarks share: statistics, tables, a description of the machine, and writing results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

__all__ = [
    "ROOT",
    "Samples",
    "describe",
    "joined",
    "median_ratio",
    "ratio_text",
    "shape",
    "size_text",
    "slowest",
    "summary",
    "table",
    "time_text",
    "write",
]

ROOT = Path(__file__).resolve().parents[1]

Samples = dict[str, list[float]]  # of each method, in the order of the repetitions


def shape(network: Any, rate: str, *names: str, burst: str = "128kb", latency: str = "50ms") -> None:
    """Limit what each host of a network, or each of these, sends and receives, as ``'1gbit'``; '' ends that."""
    for name in names or network.names:
        for space, device in ((network._bridge, name), (network._space(name), "eth0")):
            words = ["dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", latency]
            words = ["replace", *words] if rate else ["del", *words[:3]]
            subprocess.run(["tc", "-n", space, "qdisc", *words], check=True)


# -- Statistics ---------------------------------------------------------------------------------------------------


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return minimum, median and maximum of samples, and their number."""
    return {"min": min(samples), "median": statistics.median(samples), "max": max(samples), "samples": len(samples)}


def median_ratio(samples: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of samples that were taken one after the other, in the same repetition."""
    pairs = [(a, b) for a, b in zip(samples, others) if b > 0]
    return statistics.median(a / b for a, b in pairs) if pairs else float("nan")


def slowest(ranks: Sequence[Samples]) -> Samples:
    """Return, for every method and repetition, the time of the slowest rank."""
    return {method: [max(times) for times in zip(*(rank[method] for rank in ranks))] for method in ranks[0]}


def joined(launches: Sequence[Samples]) -> Samples:
    """Put the samples of several launches one after the other."""
    return {method: [sample for launch in launches for sample in launch[method]] for method in launches[0]}


# -- Texts --------------------------------------------------------------------------------------------------------


def size_text(size: int) -> str:
    """Return a number of bytes for people: '4 B', '64 KiB', '256 MiB'."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """Return seconds as microseconds with three digits that mean something."""
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def ratio_text(ratio: float) -> str:
    """Return a ratio with two decimals, or a dash if there is none."""
    return "-" if ratio != ratio else f"{ratio:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned text: the first column to the left, figures to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in (head, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines)


# -- What was run, and where --------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Return the command of this process, the machine, and the commit of the source tree."""
    model = "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        model = platform.processor() or model
    return {
        # A path says nothing on another machine: its last two parts show what it is.
        "command": " ".join(
            ["python", *("/".join(arg.split("/")[-2:]) if arg.startswith("/") else arg for arg in sys.argv)]
        ),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short=12", "HEAD")
        + ("+changes" if _git("status", "--porcelain", "-uno") else ""),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)  # noqa: PLW1510
    except OSError:
        return ""
    return answer.stdout.strip()


def write(path: Path, run: Mapping[str, Any], results: Any, text: str) -> None:
    """Print `text`, and write results as JSON to `path` and the text beside it."""
    told = (
        f"{run['command']}\n{run['cpu']}, {run['cores']} cores, Linux {run['kernel']}, "
        f"load before {run['load_before']}\n"
        f"commit {run['commit']}, {run['time']}\n"
    )
    for name, versions in run.get("versions", {}).items():
        told += f"{name}: {', '.join(f'{what} {version}' for what, version in versions.items())}\n"
    full = f"{told}\n{text}\n"
    print(full)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"run": run, "results": results}, indent=1) + "\n")
    path.with_suffix(".txt").write_text(full)
    print(f"written: {path} and {path.with_suffix('.txt')}")
