"""Time one step's gradients of a network: all enqueued in priority, then waited for, beside MPI and an in-place scale.

    python benchmarks/gradients.py -np 2
    python benchmarks/gradients.py -np 2 --network bert
    python benchmarks/gradients.py -np 2 --loaded                                  # beside four busy processes
    python benchmarks/gradients.py -np 2 --python OTHER-ENVIRONMENT/bin/python     # that has the other MPI

The tensors have the shapes of `resnet50_v1` in MXNet's model zoo (only shapes are taken; nothing is downloaded), of
BERT-base, or of 1,000 tensors of 1 KiB. Layer i has priority -i, as in Gluon's Trainer. Ours is timed as users call it:
'Trainer' is `Trainer.allreduce_grads()` on gradients of Gluon's parameters, which live in shared memory; 'pushpull' is
`kv.pushpull` on arrays that do not, in two orders of enqueueing: 'backward', last layer first, as gradients become
ready, and 'forward', the first layer first. MPI reduces tensor after tensor, in place, backward. 'scale' multiplies the
Trainer's gradients in place. Everything happens in the same processes, one after the other in every repetition and in
another order in each; gradients are rewritten before; a repetition counts as its slowest rank.

'first layer' is the time from the last enqueue, on the rank that comes last, until the first layer's sum is there on
all ranks: how long the next forward pass would have to wait if the computation ended with the last enqueue.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from common import Samples, describe, joined, median_ratio, ratio_text, slowest, summary, table, write
from ranks import BUSY_PROCESSES, Rank, arguments_of_launches, busy_processes, start_launches, start_or_be_a_rank

SCRIPT = Path(__file__).resolve()
MPI_METHOD = "MPI, per tensor"
FIRST_LAYER = ", first layer"
ENQUEUED = ", enqueued"
OURS = ("Trainer", "pushpull")
FLOORS = ("memcpy of all", "scale of all")
NOTHING = (0.0, 0.0)


# -- As a rank ----------------------------------------------------------------------------------------------------


def shapes_of_resnet50(with_biases: bool) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters with gradients, from the first layer to the last.

    MXNet's network has 32 biases that BatchNorm cancels at once, which the network of other frameworks lacks: without
    them there are 161 tensors of 25,557,032 elements.
    """
    import mxnet as mx

    net = mx.gluon.model_zoo.vision.resnet50_v1()
    net.initialize()
    net(mx.nd.zeros((1, 3, 32, 32)) if mx.__version__.startswith("1.") else mx.np.zeros((1, 3, 32, 32)))
    shapes = []
    before: tuple[int, ...] = ()
    for name, parameter in net.collect_params().items():
        if parameter.grad_req != "null":
            shape = tuple(parameter.shape)
            # A bias that follows the four-dimensional weight of a convolution.
            if with_biases or not (name.endswith("bias") and len(before) == 4):
                shapes.append(shape)
            before = shape
    return shapes


def shapes_of_bert() -> list[tuple[int, ...]]:
    """Return the shapes of the 199 parameters of BERT-base with its pooler."""
    units, hidden, vocabulary, positions = 768, 3072, 30522, 512
    norm, square = [(units,), (units,)], [(units, units), (units,)]
    layer = [*square * 4, *norm, (hidden, units), (hidden,), (units, hidden), (units,), *norm]
    return [(vocabulary, units), (positions, units), (2, units), *norm, *layer * 12, *square]


def shapes_of(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the shapes that the command line asks for."""
    if options.network == "resnet50":
        return shapes_of_resnet50(options.biases)
    return shapes_of_bert() if options.network == "bert" else [(256,)] * 1000


def make_trainer(shapes: Sequence[tuple[int, ...]], store: Any) -> Any:
    """Return a Trainer of parameters of these shapes."""
    import mxnet as mx

    params = {
        # The Trainer sorts by name.
        f"layer{number:03}": mx.gluon.Parameter(f"layer{number:03}", shape=shape)
        for number, shape in enumerate(shapes)
    }
    for param in params.values():
        param.initialize()
    trainer = mx.gluon.Trainer(params, "sgd", kvstore=store)
    trainer.allreduce_grads()  # starts the store: broadcasts the parameters
    return trainer


def make_methods(
    methods: Any, trainer: Any, gradients: Sequence[Any], arrays: Sequence[Any], memories: Sequence[Any], mpi: Any
) -> dict[str, Callable[[], tuple[float, float]]]:
    """Return the methods; each returns when it had enqueued all, and when the first layer was ready (or nothing)."""
    import ctypes

    import numpy as np
    from mxnet.ndarray import waitall

    store = methods.store
    first_gradient = trainer._params[0].list_grad()[0]
    others = [np.ones_like(memory) for memory in memories]
    backward = list(enumerate(arrays))[::-1]
    forward = list(enumerate(arrays))

    def enqueue(order: Sequence[tuple[int, Any]]) -> tuple[float, float]:
        for key, array in order:
            store.pushpull(key, array, priority=-key)
        enqueued = perf_counter()
        arrays[0].wait_to_read()
        first = perf_counter()
        waitall()
        return enqueued, first

    def step() -> tuple[float, float]:
        trainer.allreduce_grads()
        enqueued = perf_counter()
        first_gradient.wait_to_read()
        first = perf_counter()
        waitall()
        return enqueued, first

    def copy() -> tuple[float, float]:
        for other, memory in zip(others, memories):
            ctypes.memmove(other.ctypes.data, memory.ctypes.data, memory.nbytes)
        return NOTHING

    def scale() -> tuple[float, float]:
        for memory in gradients:
            np.multiply(memory, np.float32(0.5), memory)
        return NOTHING

    found = {
        "memcpy of all": copy,
        "scale of all": scale,
        "Trainer": step,
        "pushpull, backward": lambda: enqueue(backward),
        "pushpull, forward": lambda: enqueue(forward),
    }
    raw = [methods.on(array, f"gradient/{key}")["raw"] for key, array in backward]

    def one_by_one() -> tuple[float, float]:
        for run in raw:
            run()
        return NOTHING

    found["raw, one after the other"] = one_by_one
    if mpi is not None:
        allreduce, in_place = mpi.COMM_WORLD.Allreduce, mpi.IN_PLACE
        specs = [[memory, mpi.FLOAT] for memory in memories[::-1]]

        def per_tensor() -> tuple[float, float]:
            for spec in specs:
                allreduce(in_place, spec)
            return NOTHING

        found[MPI_METHOD] = per_tensor
    return found


def be_a_rank(options: argparse.Namespace) -> None:
    """Measure, and leave the samples in the folder."""
    rank = Rank(options)
    from methods import Methods, memory_of, zeros

    shapes = shapes_of(options)
    arrays = [zeros(shape) for shape in shapes]
    memories = [memory_of(array) for array in arrays]
    methods = Methods(rank.mpi)
    trainer = make_trainer(shapes, methods.store)
    gradients = [memory_of(param.list_grad()[0]) for param in trainer._params]
    actions = make_methods(methods, trainer, gradients, arrays, memories, rank.mpi)
    samples: Samples = {method: [] for method in actions}
    for what in (ENQUEUED, FIRST_LAYER):
        samples.update({f"{method}{what}": [] for method in actions if method.startswith(OURS)})
    order = list(actions)
    shuffle = random.Random(0).shuffle  # the same order on all ranks
    for repetition in range(-2, options.repetitions):
        shuffle(order)
        for method in order:
            used = gradients if method in ("Trainer", "scale of all") else memories
            for memory in used:
                memory.fill(rank.rank + 1)
            rank.gate.wait()
            start = perf_counter()
            enqueued, first = actions[method]()
            seconds = perf_counter() - start
            if repetition < 0 and method not in FLOORS:
                _check(method, used, rank.size)
            if repetition >= 0:
                samples[method].append(seconds)
                if method.startswith(OURS):
                    samples[method + ENQUEUED].append(enqueued)
                    samples[method + FIRST_LAYER].append(first)
    rank.gate.wait()
    methods.close()
    rank.save(samples=samples, tensors=len(shapes), elements=sum(memory.size for memory in memories))


def _check(method: str, memories: Sequence[Any], ranks: int) -> None:
    for number, memory in enumerate(memories):
        if not (memory == ranks * (ranks + 1) / 2).all():
            raise RuntimeError(f"{method}: tensor {number} has a wrong sum: {memory[:4]}")


# -- As the one that starts them ----------------------------------------------------------------------------------


def slowest_times(ranks: Sequence[Samples]) -> Samples:
    """Return the time of the slowest rank; of the first layer, since the last rank had enqueued. They share a clock."""
    samples = slowest(ranks)
    for method in [each for each in samples if each.endswith(FIRST_LAYER)]:
        enqueued = samples.pop(method[: -len(FIRST_LAYER)] + ENQUEUED)
        samples[method] = [first - last for first, last in zip(samples[method], enqueued)]
    return samples


def show(samples: Samples, launches: Sequence[Samples], mpi: str) -> str:
    """Return the table of one MPI: milliseconds, ratios within repetitions, and the medians of the launches."""
    rows = []
    for method, values in samples.items():
        is_part = method.endswith(FIRST_LAYER)
        times = summary(values)
        to_mpi = median_ratio(values, samples[MPI_METHOD]) if MPI_METHOD in samples else float("nan")
        rows.append(
            [
                method.replace("MPI", mpi),
                *(f"{times[what] * 1e3:.2f}" for what in ("min", "median", "max")),
                *("-" if is_part else ratio_text(median_ratio(values, samples[floor])) for floor in FLOORS),
                "-" if is_part else ratio_text(to_mpi),
                " ".join(f"{summary(launch[method])['median'] * 1e3:.2f}" for launch in launches),
            ]
        )
    return table(["ms", "min", "median", "max", "/memcpy", "/scale", f"/{mpi}", "medians of launches"], rows)


def start(options: argparse.Namespace) -> None:
    """Start the ranks, and show and write what they found."""
    run = describe()
    arguments = ["--repetitions", str(options.repetitions), "--network", options.network]
    with busy_processes(BUSY_PROCESSES if options.loaded else 0) as loaded, loaded():
        saved = start_launches(SCRIPT, options, [*arguments, *["--biases"] * options.biases])
    run["versions"] = {name: launches[-1][0]["versions"] for name, launches in saved.items()}
    network = next(iter(saved.values()))[0][0]
    tensors, elements = network["tensors"], network["elements"]
    size = f"{tensors} tensors, {elements:,} elements ({elements * 4e-6:.1f} MB)"
    text = [f"{options.ranks} ranks, {options.network}: {size}\n"]
    results: dict[str, Any] = {}
    for name, ranks_of_launches in saved.items():
        launches = [slowest_times([rank["samples"] for rank in ranks]) for ranks in ranks_of_launches]
        samples = joined(launches)
        text.append(f"{name}, {options.launches} launches\n{show(samples, launches, name)}\n")
        results[name] = {
            "seconds": {method: summary(values) for method, values in samples.items()},
            "launches": [{method: summary(values) for method, values in launch.items()} for launch in launches],
            "ratios": {
                f"{method}/{peer}": median_ratio(values, samples[peer])
                for method, values in samples.items()
                for peer in (MPI_METHOD, *FLOORS)
                if peer in samples and peer != method and not method.endswith(FIRST_LAYER)
            },
        }
    told = {"ranks": options.ranks, "network": options.network, "tensors": tensors, "elements": elements}
    write(options.json, run, {**told, "by_mpi": results}, "\n".join(text))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = arguments_of_launches(SCRIPT, "Time the gradients of a network beside MPI, memcpy, and an in-place scale.")
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--network", choices=("resnet50", "bert", "small"), default="resnet50")
    parser.add_argument("--loaded", action="store_true", help="beside four busy processes")
    parser.add_argument("--biases", action="store_true", help="all 193 tensors of MXNet's variant of the network")
    return parser.parse_args()


if __name__ == "__main__":
    start_or_be_a_rank(parse_arguments(), start, be_a_rank)
