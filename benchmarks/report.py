"""Draw the results of the benchmarks as one HTML page, and the comparison at its top as a picture for README.

    pip install 'kvstore-hvd[bench]'
    python benchmarks/report.py

Nothing is measured here. `COMPARISONS` and `PICTURES` name the JSON files of ``benchmarks/results/`` that each picture
shows. The page is ``report.html`` beside them, and needs no other file; the comparison is also
``docs/static/benchmarks.svg``. Equal results give equal bytes with the same version of matplotlib.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from common import ROOT, median_ratio, size_text, time_text
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

RESULTS = ROOT / "benchmarks" / "results"
COMPARISON = ROOT / "docs" / "static" / "benchmarks.svg"
WIDTH, ROW = 6.4, 0.2  # inches: of a picture, and of a line of text in it
INK = "#010203"  # of texts and axes in matplotlib; the page's own colour takes its place
STORE, ENGINE, MPI, HOROVOD, GREY = "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#8A8A8A"
GLYPHS = {"o": "●○", "s": "■□", "^": "▲△", "D": "◆◇", "": "▬▨"}


class Method(NamedTuple):
    """One entry of a legend. A `line` that is not solid is another use of the method with the same colour."""

    label: str
    meaning: str
    colour: str
    marker: str = ""
    line: str = "-"


#: Methods by their names in the JSON files. Most colours are of Okabe and Ito's palette for colour-blind readers.
METHODS = {
    "pushpull": Method("kv.pushpull", "kv.pushpull of one array, until the sum can be read", STORE, "o"),
    "pushpull, in arena": Method("kv.pushpull, in arena", "the same, array in shared memory", STORE, "o", "--"),
    "Trainer": Method("Trainer", "Trainer.allreduce_grads of gradients in shared memory", STORE),
    "pushpull, backward": Method("kv.pushpull, backward", "one call a tensor, last layer first", STORE, "", "--"),
    "pushpull, forward": Method("kv.pushpull, forward", "one call a tensor, first layer first", STORE, "", "--"),
    "raw": Method("native engine", "the engine of kvstore-hvd, called without MXNet", ENGINE, "s"),
    "raw, in arena": Method("native engine, in arena", "the engine, array in shared memory", ENGINE, "s", "--"),
    "Open MPI": Method("Open MPI", "Allreduce(MPI.IN_PLACE) of mpi4py, tensor after tensor", MPI, "^"),
    "MPICH": Method("MPICH", "Allreduce(MPI.IN_PLACE) of mpi4py, tensor after tensor", "#A6761D", "^"),
    "memcpy": Method("memcpy", "a copy of the array by every worker at once: a floor", GREY, "", ":"),
    "scale": Method("in-place scale", "a multiplication of it by every worker at once: a floor", "#B0B0B0", "", "-."),
    "gloo": Method("gloo", "torch.distributed.all_reduce with the backend gloo", "#E69F00", "D"),
    "flat": Method("flat MPI", "one MPI_Allreduce of all ranks for each tensor", "#A6761D", "^"),
    "wire": Method("wire", "only the bytes between the hosts, by MPI_Alltoall: a floor", GREY, "", ":"),
    "ours, MPI": Method("kvstore-hvd, MPI", "kvstore_hvd.mxnet, started by mpirun", STORE, "o"),
    "ours, TCP": Method("kvstore-hvd, TCP", "kvstore_hvd.mxnet, started by kvhvdrun", STORE, "o", "--"),
    "as installed": Method("Horovod", "horovod.mxnet over MPI with its defaults", HOROVOD, "s"),
    "Horovod, yield": Method("Horovod, yield", "its ranks give up their cores while MPI waits", HOROVOD, "^", "--"),
    "yield, cycle 0.1 ms": Method("Horovod, 0.1 ms", "the same and HOROVOD_CYCLE_TIME=0.1", HOROVOD, "D", ":"),
    "floor": Method("floor", "the bytes of all parts of the sum, one after the other", GREY, "", ":"),
    "ours": Method("kvstore-hvd", "mx.kv.create('horovod'), with its fused updates", STORE),
    "ours over 2 hosts": Method("over two hosts", "the same workers on two virtual hosts", STORE, "", "--"),
    "sharded": Method("sharded", "kvstore-hvd, each worker updates a share of the parameters", "#DDCC77"),
    "dist_sync": Method("dist_sync", "MXNet's parameter server, on the same cores", "#CC79A7"),
    "no store": Method("no store", "no communication, and updates by MXNet's operators", GREY),
    "no update": Method("no update", "neither updates nor communication: a limit", GREY, "", ":"),
}


class Bar(NamedTuple):
    """One bar, the text at its end, and the ends of the line on it."""

    method: str
    value: float
    text: str
    label: str = ""  # the method's if empty
    ends: Sequence[float] = ()


Groups = dict[str, list[Bar]]


def speed(method: str, ratio: float, label: str = "") -> Bar:
    """Return the bar of a speed, relative to another one."""
    return Bar(method, ratio, f"{ratio:.{2 if ratio < 0.995 else 1 if ratio < 9.95 else 0}f}x", label)


def timed(method: str, seconds: float, ends: Sequence[float] = ()) -> Bar:
    """Return the bar of a time."""
    ms = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
    return Bar(method, seconds, ms if seconds >= 1e-3 else f"{time_text(seconds)} µs", "", ends)


def draw_bars(figure: Any, groups: Groups, origin: float, label: str) -> list[str]:
    """Draw bars from `origin`, each group below its title, and return the methods. The axis is linear if it is 0."""
    figure.set_size_inches(WIDTH, ROW * sum(1.3 + len(bars) for bars in groups.values()) + 0.6)
    axes, place, ticks = figure.subplots(), 0.0, []
    for title, bars in groups.items():
        axes.annotate(title, (0, place), xycoords=("axes fraction", "data"), va="center", weight="bold")
        axes.vlines(origin, place + 0.5, place + len(bars) + 0.5, INK, linewidth=1)
        for bar in bars:
            place, method = place + 1, METHODS[bar.method]
            look = {"color": method.colour, "hatch": "" if method.line == "-" else "////", "ec": "white", "lw": 0}
            axes.barh(place, bar.value - origin, 0.76, origin, **look)
            axes.plot(bar.ends, [place] * len(bar.ends), color=INK, linewidth=1)
            shift, side = (3, "left") if bar.value >= origin else (-3, "right")
            at = max(bar.value, *bar.ends, 0), place
            axes.annotate(bar.text, at, (shift, 0), textcoords="offset points", ha=side, va="center", fontsize=9)
            ticks.append((place, bar.label or method.label))
        place += 1.3
    values = [value for bars in groups.values() for bar in bars for value in (bar.value, *bar.ends)]
    least, most = (0.5, 2) if origin == 1 else (origin, 0)
    low, high = min(least, min(values) / 1.8), max(most, *values)
    if origin:
        axes.set_xscale("log", base=2 if origin == 1 else 10)
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.set(xlabel=label, xlim=(low, high * (high / low) ** 0.15 if origin else high * 1.17), ylim=(place - 0.6, -0.6))
    axes.set_yticks(*zip(*ticks))
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0, grid_alpha=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter("{x:g}x" if origin == 1 else EngFormatter(unit="s"))
    return list(dict.fromkeys(bar.method for bars in groups.values() for bar in bars))


# -- The comparison at the top; each function returns the speeds of kvstore-hvd, relative to another ---------------

Read = Mapping[str, Any]  # what a JSON file has
NETWORKS = {"resnet50": "ResNet-50", "bert": "BERT-base", "small": "1,000 x 1 KiB"}
SIZES = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


def beside_open_mpi(read: Read) -> list[Bar]:
    """kv.pushpull of one array and Open MPI's Allreduce, in the same processes."""
    entries = (entry for entry in read["results"]["by_mpi"]["Open MPI"]["all"] if entry["bytes"] in SIZES)
    return [speed("Open MPI", 1 / each["ratios"]["pushpull/MPI"], size_text(each["bytes"])) for each in entries]


def beside_open_mpi_tensors(*read: Read) -> list[Bar]:
    """Trainer.allreduce_grads and Open MPI's Allreduce of each tensor, in the same processes."""
    ratios = {NETWORKS[each["results"]["network"]]: each["results"]["by_mpi"]["Open MPI"]["ratios"] for each in read}
    return [speed("Open MPI", 1 / of["Trainer/MPI, per tensor"], network) for network, of in ratios.items()]


def beside_gloo(read: Read) -> list[Bar]:
    """Median of the ratios of launches that took turns."""
    ours, gloo = read["results"]["ours"], read["results"]["gloo"]
    found = {size: [[each[str(size)][0] for each in of] for of in (gloo, ours)] for size in SIZES}
    return [speed("gloo", median_ratio(*of), size_text(size)) for size, of in found.items()]


def beside_horovod(read: Read) -> list[Bar]:
    """Ratio of the medians, for each size to the fastest of Horovod's settings."""
    found = over_hosts(read["results"])
    theirs = [of for name, of in found.items() if METHODS[name].colour == HOROVOD]
    best = {size: min(of[size] for of in theirs) for size in found["ours"]}
    labels = {size: "ResNet-50" if size == "trainer" else size_text(int(size)) for size in best if size != "resnet"}
    return [speed("as installed", best[size] / found["ours"][size], label) for size, label in labels.items()]


def beside_dist_sync(read: Read) -> list[Bar]:
    """Median of the ratios of images/s of rounds that took turns."""
    networks, modes = read["results"]["networks"], ("ours, 2 workers", "dist_sync, 2 workers")
    rounds = {name: [of[mode]["rounds"] for mode in modes] for name, of in networks.items()}
    return [speed("dist_sync", median_ratio(*of), name) for name, of in rounds.items()]


#: Title, what is compared, the function, and the JSON files that it gets.
OF_NETWORKS = "gradients-2", "gradients-2-bert", "gradients-2-small"
COMPARISONS: tuple[tuple[str, str, Callable[..., list[Bar]], tuple[str, ...]], ...] = (
    ("Open MPI: one array, two workers", "kv.pushpull", beside_open_mpi, ("allreduce-2",)),
    ("Open MPI: gradients, two workers", "Trainer.allreduce_grads", beside_open_mpi_tensors, OF_NETWORKS),
    ("gloo: one array, two hosts of one worker", "the native engine", beside_gloo, ("hosts-gloo",)),
    ("Horovod: two hosts of two workers", "kvstore_hvd.mxnet", beside_horovod, ("hosts-horovod",)),
    ("MXNet's dist_sync: training, two workers", "the store", beside_dist_sync, ("train-2",)),
)


# -- All other pictures; each function draws a JSON file, and returns the caption and the methods -------------------

Told = tuple[str, Iterable[str]]


def by_method(by_mpi: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is known of each method; MPI is called by its name, others are those of the first MPI's launches."""
    found: dict[str, Any] = {}
    for mpi, methods in by_mpi.items():
        for name, value in methods.items():
            short = re.sub(r" of all|, per tensor|, one after the other", "", name)
            found.setdefault(re.sub("^MPI", mpi, short), value)
    return found


def over_hosts(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return median seconds by method and size, of hosts.py, hosts_gloo.py or hosts_horovod.py."""
    if "gloo" in results:
        return {name: {size: median(each[size][0] for each in of) for size in of[0]} for name, of in results.items()}
    if "floor" in results:
        samples = {name: {size: [each[size] for each in of] for size in of[0]} for name, of in results.items()}
        return {name: {size: median(chain(*each)) for size, each in of.items()} for name, of in samples.items()}
    methods = dict.fromkeys(method for of in results.values() for method in of if of[method])
    return {method: {size: median(of[method]) for size, of in results.items()} for method in methods}


def allreduce(figure: Any, read: Read) -> Told:
    """Time of one allreduce over its size."""
    found: dict[str, dict[int, float]] = {}
    for mpi, of in read["results"]["by_mpi"].items():
        for entry in of["all"]:
            for name, times in by_method({mpi: entry["seconds"]}).items():
                found.setdefault(name, {}).setdefault(entry["bytes"], times["median"])
    axes, methods = figure.subplots(), [name for name in METHODS if name in found]
    for colour, marker, line, of in ((*METHODS[name][2:], found[name]) for name in methods):
        face = colour if line == "-" else "none"
        axes.plot([*of], [*of.values()], line, marker=marker, color=colour, markerfacecolor=face)
    sizes = sorted({*chain(*found.values())})
    axes.set(xscale="log", yscale="log", ylabel="time")
    axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    return f"Time of one allreduce of float32 on {read['run']['cores']} cores, median.", methods


def gradients(figure: Any, read: Read) -> Told:
    """The gradients of one network."""
    results, last = read["results"], ", first layer"
    groups: Groups = {"until all sums are there": [], "from the last call to the first layer's sum": []}
    for name, times in by_method({mpi: of["seconds"] for mpi, of in results["by_mpi"].items()}).items():
        bar = timed(name.replace(last, ""), times["median"], (times["min"], times["max"]))
        groups[list(groups)[name.endswith(last)]].append(bar)
    what = f"{results['tensors']} allreduces with {results['elements']:,} elements"
    methods = draw_bars(figure, groups, 0, "time")
    return f"Time of {what}: median, and a line from minimum to maximum.", methods


def waiting(figure: Any, read: Read) -> Told:
    """Operations with idle cores and beside other work."""
    words = {"idle": "nothing else runs", "busy": "a busy thread in each worker", "loaded": "four busy processes"}
    groups: Groups = {}
    for ranks, by_mpi in read["results"]["by_ranks"].items():
        for name, times in by_method({mpi: of["all"]["seconds"] for mpi, of in by_mpi.items()}).items():
            method, state = name.split(", ")
            groups.setdefault(f"{ranks} workers: {words[state]}", []).append(timed(method, times["median"]))
    methods = draw_bars(figure, groups, 1e-7, "time, logarithmic")
    return f"Time of one allreduce on {read['run']['cores']} cores, median.", methods


def hosts(figure: Any, read: Read) -> Told:
    """Allreduces and gradients over two hosts."""
    ours = "ours, MPI" if "horovod" in read["stem"] else "raw, in arena"
    found = {ours if name == "ours" else name: of for name, of in over_hosts(read["results"]).items()}
    words = {"resnet": "161 gradients of ResNet-50", "trainer": "the same by DistributedTrainer"}
    groups: Groups = {}
    for size in next(iter(found.values())):
        groups[words.get(size) or size_text(int(size))] = [timed(name, of[size]) for name, of in found.items()]
    draw_bars(figure, groups, 1e-5, "time, logarithmic")
    return "Time of one allreduce of float32, median; the methods took turns.", found


def training(figure: Any, read: Read) -> Told:
    """Images a second, relative to the first of the methods."""
    groups: Groups = {}
    for network, found in read["results"]["networks"].items():
        base = next(iter(found)).rpartition(", ")[0]
        for name, of in found.items():
            method, _, count = name.rpartition(", ")
            if method != base:
                ratio = median_ratio(of["rounds"], found[f"{base}, {count}"]["rounds"])
                groups.setdefault(f"{network}, {count}", []).append(speed(method, ratio))
    methods = draw_bars(figure, groups, 1, f"images/s, '{METHODS[base].label}' = 1, logarithmic")
    return "Ratio of images/s: median over rounds, in which the methods took turns.", (base, *methods)


def timeline(figure: Any, read: Read) -> Told:
    """One step of a training."""
    steps = read["results"]["steps"]
    figure.set_size_inches(WIDTH, 0.8 + sum(0.5 + ROW * len(step["bars"]) for step in steps))
    all_axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    for rank, (axes, bars) in enumerate(zip(all_axes, (step["bars"] for step in steps))):
        ready, begin, end = ([bar[what] for bar in bars] for what in ("submitted", "scheduled", "complete"))
        axes.hlines(range(len(bars)), ready, begin, GREY, linewidth=10)
        axes.hlines(range(len(bars)), begin, end, STORE, linewidth=10)
        axes.plot(end, range(len(bars)), "|", color=STORE, markersize=10)
        axes.axvspan(max(ready), max(end), color=MPI, alpha=0.3, zorder=0, linewidth=0)
        axes.set_yticks(range(len(bars)), [bar["name"] for bar in bars])
        axes.set(title=f"worker {rank}", xlim=(0, None), ylim=(len(bars) - 0.4, -0.6))
    all_axes[-1].set_xlabel("ms since the beginning of the step")
    return "Grey: a gradient waits. Blue: it is summed. Orange: communication after the last gradient is ready.", ()


#: The JSON file of each picture, the title, and the function that draws it. A line without a function heads a section.
PICTURES: tuple[tuple[str, str, Callable[[Any, Read], Told] | None], ...] = (
    ("", "One host", None),
    ("allreduce", "Latency of an allreduce", allreduce),
    ("allreduce-2", "Latency of an allreduce, two workers", allreduce),
    ("allreduce-4", "Latency of an allreduce, four workers on two cores", allreduce),
    ("gradients", "Gradients of a network", gradients),
    ("gradients-2", "Gradients of ResNet-50, two workers", gradients),
    ("gradients-2-staged", "Gradients of ResNet-50, two workers, KVHVD_ZERO_COPY=0 (no arenas)", gradients),
    ("gradients-2-loaded", "Gradients of ResNet-50, two workers, beside four busy processes", gradients),
    ("gradients-2-bert", "Gradients of BERT-base, two workers", gradients),
    ("gradients-2-small", "Gradients of 1,000 tensors of 1 KiB, two workers", gradients),
    ("waiting", "Allreduce of 4 B beside other work, two and four workers", waiting),
    ("waiting-64mib", "Allreduce of 64 MiB beside other work, two workers", waiting),
    ("", "Two hosts", None),
    ("hosts-gloo", "Beside gloo: allreduce by TCP on loopback, one worker on each host", hosts),
    ("hosts-horovod", "Beside Horovod: allreduce and gradients, two workers on each host", hosts),
    ("hosts", "Beside MPI: allreduce and gradients, two workers on each host", hosts),
    ("hosts-1gbit", "Beside MPI: the same over a network of 1 Gbit/s", hosts),
    ("", "Training", None),
    ("train", "Training", training),
    ("train-2", "Training with SGD, one and two workers", training),
    ("train-updates-2", "Training with SGD, Adam and LAMB, two workers", training),
    ("train-hosts", "Training over two hosts, four workers", training),
    ("timeline-2", "Timeline of one training step, two workers", timeline),
)


# -- The page -----------------------------------------------------------------------------------------------------

COLOURED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
STYLE: dict[str, Any] = {**dict.fromkeys(COLOURED, INK), "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "savefig.transparent": True}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.w_pad": 0.1}
LIGHT_AND_DARK = "svg{color:#222;background:#fff}@media(prefers-color-scheme:dark){svg{color:#ddd;background:#16181c}}"
PAGE = """<!DOCTYPE html><html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>kvstore-hvd: benchmarks</title><style>
:root { color-scheme: light dark } body { font: 16px/1.5 sans-serif; max-width: 44em; margin: auto; padding: 1em }
svg { display: block; width: 100%; height: auto } figure { margin: 2em 0 } code { overflow-wrap: anywhere }
li { margin: 0.3em 0 } figcaption ul { list-style: none; padding: 0 }
</style><h1>kvstore-hvd: benchmarks</h1>
"""
COMPARED = """Right of 1x, kvstore-hvd is faster than the method that heads the group. Each bar comes from one run, in
which both sides took turns on one machine; groups come from different runs. A number of bytes is the size of a float32
array. Horovod has the fastest of its three settings in each bar. The name of a network is an exchange of its gradients,
or a training beside dist_sync, in which kvstore-hvd also has the faster updates of parameters."""
HINT = "The .txt files have all figures. Their ratios are of times (0.5 is 2.0x here), or of images/s to 'no store'."


def svg_of(name: str, draw: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """Return a picture whose texts have the colour of the page around it, and what `draw` returns."""
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure, buffer = Figure(layout="constrained"), io.StringIO()
        told = draw(figure, *arguments)
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()[buffer.getvalue().index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'<!--.*?-->| id="[\w.]+_\d+"|\n *(?=[^< ])|\n *(?=")', " ", text)
    return re.sub(r"\d+\.\d{3,}(?![\dx])", lambda number: f"{float(number[0]):.2f}", text), told


def source(read: Read) -> str:
    """Return the link to a result's text, and its machine."""
    run, link = read["run"], f'<a href="{read["stem"]}.txt">{read["stem"]}.txt</a>'
    return f"{link}: {html.escape(run['cpu'])}, {run['cores']} cores, {run['time'][:10]}"


def figure_of(title: str, text: str, told: Told, read: Read) -> str:
    """Return a picture with its title, caption, legend and command."""
    command = (RESULTS / f"{read['stem']}.txt").read_text().partition("\n")[0]
    legend, (caption, names) = "", told
    for label, meaning, colour, marker, line in (METHODS[name] for name in names):
        legend += f'<li><b style="color:{colour}">{GLYPHS[marker][line != "-"]}</b> <b>{label}</b>: {meaning}</li>\n'
    command = html.escape(command if "benchmarks/" in command else f"in benchmarks/: {command}")
    return (
        f'<figure id="{read["stem"]}">\n<h3>{title}</h3>\n{text}<figcaption>{caption}\n<ul>\n{legend}</ul>\n'
        f"<small>{source(read)}<br>\n<code>{command}</code></small></figcaption>\n</figure>\n"
    )


def main() -> None:
    """Draw, and write the page and the comparison."""
    files = {path.stem: {**json.loads(path.read_text()), "stem": path.stem} for path in RESULTS.glob("*.json")}
    groups, lines, page = {}, "", PAGE
    for title, what, speeds, stems in COMPARISONS:
        groups[title] = speeds(*(files[stem] for stem in stems))
        least, *_, most = sorted(groups[title], key=lambda bar: bar.value)
        found = f"Speed of {what}: {least.text} ({least.label}) to {most.text} ({most.label})."
        found += "".join(f"<br>\n<small>{source(files[stem])}</small>" for stem in stems)
        lines += f"<li><b>{title}.</b> {found}</li>\n"
    text, _ = svg_of("comparison", draw_bars, groups, 1, "relative speed of kvstore-hvd; right of 1x it is faster")
    COMPARISON.write_text(text.replace("<defs>", f"<defs>\n  <style>{LIGHT_AND_DARK}</style>", 1))
    page += f"<figure>\n{text}<figcaption>{COMPARED}</figcaption>\n</figure>\n<ul>\n{lines}</ul>\n<p>{HINT}</p>\n"
    for stem, title, draw in PICTURES:
        if draw is None:
            page += f"<h2>{title}</h2>\n"
        elif stem in files:
            page += figure_of(title, *svg_of(stem, draw, files[stem]), files[stem])
    (RESULTS / "report.html").write_text(page)
    print(f"written: {RESULTS / 'report.html'} and {COMPARISON}")


if __name__ == "__main__":
    main()
