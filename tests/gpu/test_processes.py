"""Ranks that are processes and share a GPU, over memory mapped by CUDA IPC; and the checker of memory accesses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
)
REAL = not os.environ.get("KVHVD_TEST_FAKE_GPU")

PROGRAM = """
import cupy, numpy as np, kvstore_hvd

kvstore_hvd.init()
rank, size = kvstore_hvd.topology().rank, kvstore_hvd.topology().size
for count in (1, 1000, 3_000_000):
    for dtype in ("float16", "float32", "int64"):
        for op in ("sum", "average", "max"):
            if (dtype, op) == ("int64", "average"):
                continue
            given = (np.random.default_rng(rank).standard_normal(count) * 100).astype(dtype)
            there = kvstore_hvd.allreduce(cupy.asarray(given), f"there/{count}/{dtype}/{op}", op=op)
            here = kvstore_hvd.allreduce(given, f"here/{count}/{dtype}/{op}", op=op)
            np.testing.assert_array_equal(cupy.asnumpy(there), here)
got = kvstore_hvd.broadcast(cupy.full(5, rank), size - 1, "got")
assert (got == size - 1).all()
try:
    kvstore_hvd.allreduce(cupy.ones(3 + rank % 2), "unequal")
except kvstore_hvd.errors.MismatchError as error:
    assert "unequal" in str(error)
else:
    raise SystemExit("unequal shapes pass")
kvstore_hvd.allreduce(cupy.ones(3), "after")
print("all right", flush=True)
"""

ELASTIC = """
import os, signal, cupy, kvstore_hvd
from kvstore_hvd import elastic

kvstore_hvd.init()

@elastic.run
def train(state):
    rank, size = kvstore_hvd.topology().rank, kvstore_hvd.topology().size
    while state.step < 200:
        for count in (3, 5000, 400_000):
            total = kvstore_hvd.allreduce(cupy.full(count, rank + state.step, "float32"), f"sum/{count}")
            assert (total == size * (size - 1) // 2 + size * state.step).all()
        if state.step == 100 and os.environ["KVHVD_WORKER"] == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        if state.step % 10 == 0:
            state.commit()

train(elastic.ObjectState(step=0))
print("all right", flush=True)
"""

pytestmark = pytest.mark.skipif(not REAL, reason="needs a real GPU")


def environment():
    # Packages may have been installed beside the interpreter's own.
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "CUDA_MODULE_LOADING": "EAGER"}


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.timeout(150)
def test_no_access_beside_arrays(device):
    command = [str(SANITIZER), "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q"]
    chosen = "test_exchange or test_as_half or test_arrays_that_begin or test_pack"
    command += ["-m", "gpu", "tests/gpu/test_kernels.py", "-k", chosen]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=140)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


PATHS = [("auto", ""), ("staged", ""), ("staged", "2"), ("staged", "2,1,1")]


def run(folder, program, path, hosts, *options):
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "kvstore_hvd.launch", "-np", "4", *options, sys.executable, "program.py"]
    variables = {**environment(), "KVHVD_TEST_HOSTS": hosts, "KVHVD_GPU_PATH": path}
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=100)
    return ended.stdout + ended.stderr


@pytest.mark.parametrize(("path", "hosts"), PATHS)
def test_workers_on_several_hosts(device, tmp_path, path, hosts):
    """CuPy's arrays give the bits of NumPy's, over virtual hosts too."""
    printed = run(tmp_path, PROGRAM, path, hosts)
    assert printed.count("all right") == 4, printed


@pytest.mark.parametrize(("path", "hosts"), PATHS)
def test_a_worker_is_killed_in_elastic_training(device, tmp_path, path, hosts):
    """Nobody gets half of a sum, and the others go on."""
    printed = run(tmp_path, ELASTIC, path, hosts, "--min-np", "2")
    assert "worker 3 (localhost:3) was killed by SIGKILL" in printed, printed
    assert printed.count("all right") >= 3, printed
