"""One rank as a process of its own, which shares a GPU with others: ``gpu_process.py RANK SIZE FOLDER``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from kvstore_hvd import native
from kvstore_hvd.gpu.ring_executor import RingExecutor
from kvstore_hvd.gpu.runtime import Device, activate
from support.gpu_memory import Arena, DeviceArray
from support.gpu_ranks import combined, device_operation, finish, samples
from support.patience import patient

COUNTS = (1, 5000, 600_000)


def main(rank: int, size: int, folder: Path) -> None:
    """Reduce, exchange and broadcast with the other processes."""
    number = 0

    def share(text: str) -> list[str]:
        nonlocal number
        number += 1
        written = folder / f"{number}-{rank}.part"
        written.write_text(text)
        written.rename(folder / f"{number}-{rank}")
        paths = [folder / f"{number}-{other}" for other in range(size)]
        end = time.monotonic() + patient(60)
        while not all(path.exists() for path in paths):
            if time.monotonic() > end:
                raise SystemExit("the other processes do not come")
            time.sleep(0.01)
        return [path.read_text() for path in paths]

    activate(0)
    device = Device.of(0, "here")
    arena = Arena(64 << 20)
    executor = RingExecutor(rank, [device] * size, 0, 4 << 20, 60.0, share)
    share("made")
    for dtype in ("float32", "float16", "int64"):
        unit = native.ITEM_BYTES[dtype]
        for count in COUNTS:
            given = [samples(each, count, dtype) for each in range(size)]
            array = DeviceArray(arena, given[rank])
            finish(executor.start("allreduce", [device_operation([array.address], [array.address], count, dtype)]))
            np.testing.assert_array_equal(array.content, combined(given, dtype, "sum"))
            request = device_operation([array.address], [array.address], count, dtype, root=size - 1)
            finish(executor.start("broadcast", [request]))
            target = DeviceArray(arena, np.zeros(count * unit * size, np.uint8))
            parts = [(each, 0, count * unit, each * count * unit) for each in range(size)]
            request = device_operation([array.address], [target.address], count, dtype, parts=parts, contributed=count)
            finish(executor.start("exchange", [request]))
            np.testing.assert_array_equal(target.content, np.tile(combined(given, dtype, "sum"), size))
            arena.reset()
    share("done")
    executor.close()
    arena.close()
    print("all right")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
