"""Measure our kernels on one GPU, beside its own copies and NCCL: virtual ranks in one launch.

    benchmarks/gpu/run.sh                                       # everything, in one call
    PYTHONPATH=.:tests:benchmarks python benchmarks/gpu/device.py [--quick]

N ranks on one GPU move N buffers through its memory, so the floor of an allreduce is ``2 N S`` bytes (each is read once
and written once) at the bandwidth that a copy reaches in the same run. What links between GPUs would give is not
measured, and nothing is said about it. Times are of the device's own clock, medians of repetitions.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from common import ROOT, describe, size_text, summary, table, write

from kvstore_hvd import native
from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.executor import buffer_bytes, rounds
from kvstore_hvd.gpu.kernels import Segment
from kvstore_hvd.gpu.launcher import Kernels, Launcher
from kvstore_hvd.gpu.nccl import library
from kvstore_hvd.gpu.nccl_executor import NcclExecutor
from kvstore_hvd.gpu.ring_executor import RingExecutor
from kvstore_hvd.gpu.runtime import Device, activate, cupy, version_text
from kvstore_hvd.gpu.streams import DeviceMemory, Stream
from support.gpu_ranks import Exchange, device_operation, on_ranks
from support.virtual_ranks import Reduction, VirtualRanks

RESULTS = ROOT / "benchmarks" / "results"
FLOAT = Reduction("float32", "average", 1.0, 0.5)
MIB = 1 << 20
_REGISTERS, _LOCAL_BYTES = 4, 3  # CUfunction_attribute
_LIMIT_S = 20.0  # that ranks may wait for each other
_LOOK_S = 50e-6  # between two looks at an operation: as the package's thread does

# -- Timing -------------------------------------------------------------------------------------------------------


class Clock:
    """Times what is enqueued on a stream, by events of the device."""

    def __init__(self, stream: Stream) -> None:
        runtime = cupy().cuda.runtime
        self._runtime, self._stream = runtime, stream
        self._events = runtime.eventCreate(), runtime.eventCreate()

    def seconds(self, enqueue: Callable[[], object], count: int) -> float:
        """Of one `enqueue`, in a row of some."""
        first, second = self._events
        self._runtime.eventRecord(first, self._stream.address)
        for _ in range(count):
            enqueue()
        self._runtime.eventRecord(second, self._stream.address)
        self._stream.synchronize()
        return float(self._runtime.eventElapsedTime(first, second)) / 1e3 / count

    def samples(self, enqueue: Callable[[], object], repetitions: int, count: int = 1) -> list[float]:
        """Of several such rows, after some that are not counted."""
        for _ in range(3):
            enqueue()
        self._stream.synchronize()
        return [self.seconds(enqueue, count) for _ in range(repetitions)]


# -- What is measured ---------------------------------------------------------------------------------------------


class Bench:
    """All measurements; each returns what goes into the JSON file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.large, self.repetitions = options.large, options.repetitions
        self.sizes: Sequence[int] = options.ranks
        activate(0)
        self.device = Device.of(0, "here")
        self.bandwidth = 0.0

    def copies(self) -> dict[str, Any]:
        """The bandwidth of a copy within the device: bytes read and written in a second."""
        stream, first, second = Stream(), DeviceMemory(4 * self.large), DeviceMemory(4 * self.large)
        clock = Clock(stream)
        found = clock.samples(lambda: stream.copy(second.address, first.address, first.nbytes), self.repetitions)
        self.bandwidth = 2 * first.nbytes / statistics.median(found)
        for each in (first, second):
            each.close()
        return {"bytes": first.nbytes, "seconds": summary(found), "bytes_per_second": self.bandwidth}

    def resources(self) -> dict[str, Any]:
        """Registers of every kernel, and bytes of local memory, which a kernel that spills has."""
        modules = Kernels(self.device.capability, self.device.multiprocessors)
        found = {}
        for dtype in native.DTYPES:
            for name in kernels.kernel_names(dtype):
                function, _ = modules._load(name, dtype)
                ask = cupy().cuda.driver.funcGetAttribute
                found[name] = {
                    "registers": ask(_REGISTERS, function.ptr),
                    "local_bytes": ask(_LOCAL_BYTES, function.ptr),
                    "blocks_per_multiprocessor": modules.limits(name, dtype).blocks_per_multiprocessor,
                }
        return found

    def allreduce(self, size: int, way: str, nbytes: int, latency: bool) -> dict[str, Any]:
        """One allreduce of virtual ranks, for several numbers of blocks unless it is a small one."""
        ranks = VirtualRanks(size, self.device, nbytes, slot_vectors=2048)
        name = kernels.allreduce_kernel(way, "float32", "average", ranks=size if way == "twoshot" else 0)
        data = [DeviceMemory(nbytes) for _ in range(size)]
        # A large two-shot works on what lies in staging memory: that is what fused gradients do.
        segments = [[Segment(memory.address, 0, nbytes)] for memory in data]
        inputs = outputs = [[] for _ in data] if way == "twoshot" and not latency else segments
        tables = ranks.prepare(inputs, outputs)
        clock = Clock(ranks.stream)
        best: dict[str, Any] = {}
        limits = ranks.modules.limits(name, "float32")
        most = kernels.ring_channels(nbytes, ranks.slot_vectors, limits) if way == "ring" else limits.blocks(nbytes)
        choices = [0] if latency else sorted({max(1, most // part) for part in (1, 2, 4)})
        for blocks in choices:

            def enqueue(blocks: int = blocks) -> None:
                ranks.launch(name, FLOAT, tables, inputs, outputs, nbytes, blocks)

            samples = clock.samples(enqueue, self.repetitions, 20 if latency else 1)
            if not best or statistics.median(samples) < best["seconds"]["median"]:
                best = {"blocks": blocks, "seconds": summary(samples)}
        if any(ranks.statuses()):
            raise RuntimeError(f"{name} of {size} ranks ended early: {ranks.statuses()}")
        ranks.close()
        for memory in data:
            memory.close()
        floor = 2 * size * nbytes / self.bandwidth
        return {
            "ranks": size,
            "way": way,
            "bytes": nbytes,
            "floor_seconds": floor,
            "of_floor": floor / best["seconds"]["median"],
            **best,
        }

    def packing(self) -> dict[str, Any]:
        """Gathering the gradients of a ResNet-50 in one buffer, and spreading them, with a factor and another type."""
        counts = resnet50()
        stream = Stream()
        launcher = Launcher(Kernels(self.device.capability, self.device.multiprocessors), stream, 20.0)
        (pieces,) = rounds(counts, 4, 8 * sum(counts), len(counts))
        offsets, total = [piece.offset for piece in pieces], buffer_bytes(pieces, 4)
        tensors, buffer = DeviceMemory(total), DeviceMemory(total)
        segments = [Segment(tensors.address + offset, offset, count) for offset, count in zip(offsets, counts)]
        clock, found = Clock(stream), {}
        for packed in ("float32", "float16", "bfloat16"):
            for into in (True, False):

                def enqueue(into: bool = into, packed: str = packed) -> None:
                    launcher.copy(segments, buffer.address, into, "float32", packed, 0.5)

                samples = clock.samples(enqueue, self.repetitions, 5)
                moved = sum(counts) * (4 + native.ITEM_BYTES[packed])
                floor = moved / self.bandwidth
                found[f"{'pack' if into else 'unpack'} {packed}"] = {
                    "bytes": moved,
                    "seconds": summary(samples),
                    "of_floor": floor / statistics.median(samples),
                }
        stream.synchronize()
        launcher.close()
        for memory in (tensors, buffer):
            memory.close()
        return found

    def executors(self, size: int, nbytes: int, way: str) -> dict[str, Any]:
        """A whole operation of ranks that are threads, from its call to its completion: with Python's part in it."""
        exchange, together = Exchange(size), threading.Barrier(size)
        data = [DeviceMemory(nbytes) for _ in range(size)]
        unique_id = library().unique_id() if way == "nccl" else ""

        def run(rank: int) -> list[float]:
            activate(0)
            if way == "nccl":
                own = rank, size, self.device, 0
                executor: Any = NcclExecutor(library(), unique_id, *own, 64 * MIB, _LIMIT_S, _LIMIT_S)
            else:
                executor = RingExecutor(rank, [self.device] * size, 0, 64 * MIB, _LIMIT_S, exchange.of(rank))
                # Loading may wait for kernels that run, which here are those of other ranks.
                for name in kernels.kernel_names("float32"):
                    executor.modules.limits(name, "float32")
            address = data[rank].address
            request = device_operation([address], [address], nbytes // 4, "float32", "average", 1.0, 1 / size)
            samples = []
            for repetition in range(self.repetitions + 3):
                together.wait(_LIMIT_S)
                start = time.perf_counter()
                for _ in executor.start("allreduce", [request]):
                    time.sleep(_LOOK_S)
                if repetition >= 3:
                    samples.append(time.perf_counter() - start)
            together.wait(_LIMIT_S)
            executor.close()
            return samples

        everyone = on_ranks(size, run)
        for memory in data:
            memory.close()
        slowest = [max(each) for each in zip(*everyone)]
        return {"ranks": size, "way": way, "bytes": nbytes, "seconds": summary(slowest)}


def resnet50() -> list[int]:
    """The elements of the 161 parameters of a ResNet-50, in its order: convolutions, each with two of its norm."""

    def convolution(inputs: int, outputs: int, window: int) -> list[int]:
        return [inputs * outputs * window * window, outputs, outputs]

    counts, inside = convolution(3, 64, 7), 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            counts += convolution(inside, width, 1) + convolution(width, width, 3) + convolution(width, 4 * width, 1)
            if block == 0:
                counts += convolution(inside, 4 * width, 1)
            inside = 4 * width
    return [*counts, 2048 * 1000, 1000]


# -- All of it ----------------------------------------------------------------------------------------------------


class Said(list[str]):
    """What is found, printed at once: whoever ends this program in the middle has it, too."""

    def append(self, text: str) -> None:
        """Print a text, and keep it."""
        print(text, flush=True)
        super().append(text)


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the results, and the tables of them."""
    bench, text = Bench(options), Said()
    results: dict[str, Any] = {
        "device": bench.device.name,
        "multiprocessors": bench.device.multiprocessors,
        "failed": [],
    }
    results["copy"] = bench.copies()
    text.append(f"{bench.device.name}: copies move {bench.bandwidth / 1e12:.2f} TB/s (read and written)")

    def attempt(what: str, act: Callable[[], Any]) -> Any:
        """What fails is said, and the rest is still measured."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - whatever it is: a machine with a GPU is not there every day
            traceback.print_exc()
            text.append(f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            results["failed"].append(what)
            return None

    results["resources"] = attempt("resources", bench.resources) or {}
    spilling = [name for name, each in results["resources"].items() if each["local_bytes"]]
    text.append(f"kernels that spill registers: {', '.join(spilling) or 'none'}")

    results["large"] = []
    for way in ("twoshot", "ring"):
        for size in bench.sizes:
            found = attempt(f"{way} of {size}", partial(bench.allreduce, size, way, bench.large, False))
            results["large"] += [found] if found else []
    rows = [
        [
            f"{each['way']}, {each['ranks']} ranks",
            f"{each['seconds']['median'] * 1e3:.3f}",
            f"{each['floor_seconds'] * 1e3:.3f}",
            f"{each['of_floor']:.0%}",
            str(each["blocks"]),
        ]
        for each in results["large"]
    ]
    text.append(
        table([f"float32, {size_text(bench.large)} of each rank", "ms", "floor ms", "of floor", "blocks"], rows)
    )

    results["small"] = []
    for size in bench.sizes:
        for nbytes in (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10):
            for way in ("oneshot", "twoshot"):
                found = attempt(way, partial(bench.allreduce, size, way, nbytes, True))
                results["small"] += [found] if found else []
    rows = [
        [f"{each['way']}, {each['ranks']} ranks, {size_text(each['bytes'])}", f"{each['seconds']['median'] * 1e6:.1f}"]
        for each in results["small"]
    ]
    text.append(table(["launches in a row", "us"], rows))

    results["packing"] = attempt("packing", bench.packing) or {}
    rows = [
        [what, f"{each['seconds']['median'] * 1e6:.0f}", f"{each['of_floor']:.0%}"]
        for what, each in results["packing"].items()
    ]
    text.append(table(["gradients of ResNet-50", "us", "of floor"], rows))

    results["executors"] = []
    for way, sizes in (("kernels", bench.sizes), ("nccl", options.nccl_ranks)):
        for size in sizes:
            for nbytes in (4, 64 << 10, MIB, 16 * MIB, bench.large):
                found = attempt(f"{way} of {size}", partial(bench.executors, size, nbytes, way))
                if found is None:
                    break
                results["executors"].append(found)
    rows = [
        [f"{each['way']}, {each['ranks']} ranks, {size_text(each['bytes'])}", f"{each['seconds']['median'] * 1e6:.0f}"]
        for each in results["executors"]
    ]
    text.append(table(["whole operations, from Python", "us"], rows))
    return results, "\n\n".join(text)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the large ones beside the floor, and the small ones."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way in ("twoshot", "ring"):
        points = [(each["ranks"], 100 * each["of_floor"]) for each in results["large"] if each["way"] == way]
        left.plot(*zip(*points), marker="o", label=way)
    left.set(xlabel="ranks on the GPU", ylabel="% of what a copy reaches", ylim=(0, 105), title=results["device"])
    for way, ranks in sorted({(each["way"], each["ranks"]) for each in results["small"]}):
        points = [
            (each["bytes"], 1e6 * each["seconds"]["median"])
            for each in results["small"]
            if (each["way"], each["ranks"]) == (way, ranks)
        ]
        right.plot(*zip(*points), marker=".", label=f"{way}, {ranks} ranks")
    right.set(xscale="log", xlabel="bytes", ylabel="us", title="small messages")
    for axes in (left, right):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path)
    print(f"written: {path}")


def main() -> None:
    """Measure, and write the results; the exit code is 1 if a measurement has failed."""
    parser = argparse.ArgumentParser(description="Measure our kernels on one GPU.")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu-device.json")
    parser.add_argument("--large", type=int, default=256 * MIB, help="bytes of a large array")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--nccl-ranks", type=int, nargs="*", default=[1], help="NCCL: more than 1 need 2.30 or newer")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="small and few, to see whether all of it runs")
    options = parser.parse_args()
    if options.quick:
        options.large, options.repetitions = min(options.large, MIB), 2
    run = describe()
    runtime = cupy().cuda.runtime
    versions = {"CuPy": cupy().__version__, "CUDA": version_text(int(runtime.runtimeGetVersion()))}
    with contextlib.suppress(KVHvdError):
        versions["NCCL"] = library().version_text
    run["versions"] = {"GPU": versions}
    results, text = measure(options)
    write(options.json, run, results, text)
    draw(results, options.json.with_suffix(".png"))
    if results["failed"]:
        sys.exit(f"failed: {', '.join(results['failed'])}")


if __name__ == "__main__":
    main()
