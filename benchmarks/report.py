"""Draw what the benchmarks have left in benchmarks/results/: pictures, and one HTML page that needs nothing else.

    pip install 'kvstore-hvd[bench]'
    python benchmarks/report.py

Reads every JSON file there that it knows, whatever the numbers of ranks, and writes ``report-*.png`` and
``report.html`` beside them. It measures nothing itself.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, size_text

RESULTS = ROOT / "benchmarks" / "results"
_WIDTH, _HEIGHT = 8.0, 4.5  # inches

Draw = Callable[[Any, Mapping[str, Any]], str]


@dataclass(frozen=True)
class Picture:
    """One figure and what is said about it."""

    name: str
    title: str
    caption: str
    png: bytes
    run: Mapping[str, Any]


# -- The figures; each draws on a figure of matplotlib and returns the caption ------------------------------------


def _methods(results: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return bytes and median seconds by method; peers are called by their names."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for number, (mpi, found) in enumerate(results["by_mpi"].items()):
        for entry in found["all"]:
            for method, times in entry["seconds"].items():
                if "alone" in method or (number > 0 and method != "MPI"):
                    continue
                lines.setdefault(mpi if method == "MPI" else method, []).append((entry["bytes"], times["median"]))
    return lines


def _over_sizes(axes: Any, lines: Mapping[str, Sequence[tuple[int, float]]], label: str) -> None:
    for method, points in lines.items():
        floor = method in ("memcpy", "scale")
        axes.plot(*zip(*points), linestyle=":" if floor else "-", marker="" if floor else "o", label=method)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend()


def latency(figure: Any, results: Mapping[str, Any]) -> str:
    """Time of one allreduce over its size."""
    lines = {
        method: [(size, seconds * 1e6) for size, seconds in points] for method, points in _methods(results).items()
    }
    _over_sizes(figure.subplots(), lines, "us, median")
    return (
        f"Time of one allreduce of float32 over {results['ranks']} ranks, lower is better: 'raw' is this package's "
        "engine, 'pushpull' the store until the array can be read; memcpy and scale are floors, on all ranks at once."
    )


def bandwidth(figure: Any, results: Mapping[str, Any]) -> str:
    """Bytes a second over the size."""
    lines = {
        method: [(size, size / seconds / 1e9) for size, seconds in points if seconds > 0]
        for method, points in _methods(results).items()
    }
    _over_sizes(figure.subplots(), lines, "GB/s of one rank's array")
    return f"The same as bytes of one rank's array by second, {results['ranks']} ranks, higher is better."


def _bars(
    axes: Any, names: Sequence[str], groups: Mapping[str, Sequence[float]], label: str, log: bool = False
) -> None:
    width = 0.8 / len(groups)
    for number, (group, values) in enumerate(groups.items()):
        places = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(names))]
        shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        axes.bar_label(axes.bar(places, values, width, label=group), shown, fontsize=7)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3, axis="y")
    if len(groups) > 1:
        axes.legend()


def gradients(figure: Any, results: Mapping[str, Any]) -> str:
    """The gradients of one network."""
    names, medians, below, above = [], [], [], []
    for number, (mpi, found) in enumerate(results["by_mpi"].items()):
        for method, times in found["seconds"].items():
            if number > 0 and not method.startswith("MPI"):
                continue
            names.append(method.replace("MPI", mpi))
            medians.append(times["median"] * 1e3)
            below.append((times["median"] - times["min"]) * 1e3)
            above.append((times["max"] - times["median"]) * 1e3)
    axes = figure.subplots()
    axes.barh(names, medians, xerr=(below, above), capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("ms, median (lines: minimum to maximum)")
    axes.grid(alpha=0.3, axis="x")
    return (
        f"All {results['tensors']} gradients of {results['network']} ({results['elements']:,} elements) over "
        f"{results['ranks']} ranks, lower is better; 'first layer': from the last enqueue of the last rank until the "
        "one that the next forward pass needs first is there."
    )


def training(figure: Any, results: Mapping[str, Any]) -> str:
    """Images a second."""
    rows = -(-len(results["networks"]) // 3)
    figure.set_figheight(rows * figure.get_figheight())
    all_axes = figure.subplots(rows, 3, squeeze=False).flat
    for axes, (network, found) in zip(all_axes, results["networks"].items()):
        modes = list(dict.fromkeys(name.split(",")[0] for name in found))
        counts = list(dict.fromkeys(name.split(", ")[1] for name in found))
        groups = {
            mode: [found[f"{mode}, {count}"]["images_per_second"]["median"] for count in counts] for mode in modes
        }
        _bars(axes, counts, groups, "images/s, median")
        axes.set_title(network)
    return "Training, higher is better; workers of 'no store' do not talk to one another, and update as MXNet does."


def waiting(figure: Any, results: Mapping[str, Any]) -> str:
    """Operations with idle cores and beside other work."""
    all_axes = figure.subplots(1, len(results["by_ranks"]), squeeze=False)[0]
    for axes, (ranks, by_mpi) in zip(all_axes, results["by_ranks"].items()):
        groups: dict[str, list[float]] = {}
        for number, (mpi, found) in enumerate(by_mpi.items()):
            for name, times in found["all"]["seconds"].items():
                method = name.split(",")[0]
                if number == 0 or method == "MPI":
                    groups.setdefault(method.replace("MPI", mpi), []).append(times["median"] * 1e6)
        states = list(dict.fromkeys(name.split(", ")[1] for name in found["all"]["seconds"]))
        _bars(axes, states, groups, "us, median", log=True)
        axes.set_title(f"{ranks} ranks")
    return (
        f"One allreduce of {size_text(results['bytes'])}, lower is better; 'busy': beside a busy thread in every rank, "
        "'loaded': beside four busy processes."
    )


def timeline(figure: Any, results: Mapping[str, Any]) -> str:
    """One step of a training."""
    all_axes = figure.subplots(len(results["steps"]), 1, sharex=True, squeeze=False)[:, 0]
    for rank, (axes, step) in enumerate(zip(all_axes, results["steps"])):
        for place, bar in enumerate(step["bars"]):
            queued, reducing = bar["scheduled"] - bar["submitted"], bar["complete"] - bar["scheduled"]
            first = place == 0
            axes.barh(place, queued, left=bar["submitted"], color="silver", label="queued" if first else None)
            axes.barh(place, reducing, left=bar["scheduled"], color="tab:blue", label="reducing" if first else None)
        if step["bars"]:
            last = max(bar["submitted"] for bar in step["bars"])
            end = max(bar["complete"] for bar in step["bars"])
            axes.axvspan(last, max(last, end), color="tab:red", alpha=0.15, zorder=0, label="exposed")
        axes.axvspan(step["begin"], step["end"], color="tab:green", alpha=0.07, zorder=0, label="step")
        axes.set_yticks(range(len(step["bars"])), [bar["name"] for bar in step["bars"]], fontsize=6)
        axes.invert_yaxis()
        axes.set_title(f"rank {rank}", fontsize=9)
    all_axes[0].legend(fontsize=7)
    all_axes[-1].set_xlabel("ms since the beginning of the step")
    return (
        f"One training step ({results['network']}): each gradient from when it is ready until its sum is there. "
        "What is red is communication after the last gradient was ready; all before it is hidden behind computation."
    )


#: Beginning of the files' names, name of the picture, title, what draws it.
PICTURES: tuple[tuple[str, str, str, Draw], ...] = (
    ("allreduce", "latency", "Latency", latency),
    ("allreduce", "bandwidth", "Bandwidth", bandwidth),
    ("gradients", "gradients", "The gradients of a network", gradients),
    ("train", "training", "Training", training),
    ("timeline", "timeline", "A step's timeline", timeline),
    ("waiting", "waiting", "Waiting", waiting),
)


# -- Drawing, and the page ----------------------------------------------------------------------------------------


def draw(folder: Path) -> list[Picture]:
    """Draw all that there are results for, write the pictures to `folder`, and return them."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("this needs matplotlib: pip install 'kvstore-hvd[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures = []
    for prefix, name, title, paint in PICTURES:
        for path in sorted(folder.glob(f"{prefix}*.json")):
            number = re.fullmatch(rf"{prefix}(|-.+)", path.stem)
            if number is None:
                continue
            read = json.loads(path.read_text())
            figure = pyplot.figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
            caption = paint(figure, read["results"])
            target = folder / f"report-{name}{number[1]}.png"
            # Without the version of matplotlib in it, equal results give equal files.
            figure.savefig(target, dpi=120, metadata={"Software": None})
            pyplot.close(figure)
            pictures.append(Picture(target.stem, f"{title}{number[1]}", caption, target.read_bytes(), read["run"]))
    return pictures


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>kvstore_hvd: benchmarks</title>
<style>
body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }}
img {{ max-width: 100% }}
figure {{ margin: 2em 0 }}
code {{ background: #eee }}
small {{ color: #666 }}
</style>
<h1>kvstore_hvd: benchmarks</h1>
<p>Medians over all repetitions of all launches; how they are taken is told in <code>benchmarks/README.md</code>.</p>
{figures}
</html>
"""


def page(pictures: Sequence[Picture]) -> str:
    """Return the HTML page with all pictures inside."""
    figures = []
    for picture in pictures:
        run = picture.run
        machine = f"{run['cpu']}, {run['cores']} cores, Linux {run['kernel']}; commit {run['commit']}, {run['time']}"
        figures.append(
            f'<figure id="{picture.name}">\n<h2>{html.escape(picture.title)}</h2>\n'
            f'<img alt="{html.escape(picture.caption)}" '
            f'src="data:image/png;base64,{base64.b64encode(picture.png).decode()}">\n'
            f"<figcaption>{html.escape(picture.caption)}<br>\n<small><code>{html.escape(run['command'])}</code><br>"
            f"{html.escape(machine)}</small></figcaption>\n</figure>"
        )
    return _PAGE.format(figures="\n".join(figures))


def main() -> None:
    """Draw, and write the page."""
    parser = argparse.ArgumentParser(description="Draw the results of the benchmarks.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder with the JSON files")
    options = parser.parse_args()
    pictures = draw(options.results)
    if not pictures:
        raise SystemExit(f"there are no results in {options.results}: run a benchmark first")
    target = options.results / "report.html"
    target.write_text(page(pictures))
    print(f"written: {target} and {len(pictures)} pictures")


if __name__ == "__main__":
    main()
