"""Scripts written for Horovod, started as they are: by kvhvdrun --as-horovod and by python -m kvstore_hvd."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import LIMIT_S, variables_of
from support.launchers import environment, kvhvdrun, mpirun

pytestmark = pytest.mark.timeout(120)

# In place of horovod.mxnet, lest these tests depend on more than the name.
IMPORTS = """
import os, sys
import horovod
from horovod.common.exceptions import HorovodInternalError
rank = int(os.environ.get('KVHVD_RANK', 0))
def say(text, stream=sys.stdout):
    stream.write(text + '\\n'); stream.flush()
"""


JOIN = "import kvstore_hvd; kvstore_hvd.init(); "


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The path of the script; `write` puts it there."""
    return tmp_path / "train.py"


def write(path: Path, program: str) -> None:
    path.write_text(IMPORTS + program)


def job(
    marker: str, folder: Path, *options: str, program: tuple[str, ...] = (sys.executable, "train.py"), **variables: str
) -> tuple[int, str, str]:
    """Run kvhvdrun in a folder: exit code, stdout, stderr."""
    done = subprocess.run(
        [*kvhvdrun().prefix, *options, *program],
        cwd=folder,
        env={**variables_of(marker), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout, done.stderr


# -- --as-horovod -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_script_finds_horovod_in_every_worker(marker: str, script: Path, how: str) -> None:
    write(script, "say(f'{horovod.__version__} {__name__} {sys.argv[1:]} {sys.path[0]}')")
    program = (
        (sys.executable, "train.py", "--lr", "1") if how == "script" else (sys.executable, "-m", "train", "--lr", "1")
    )
    code, out, err = job(marker, script.parent, "-np", "2", "--as-horovod", program=program)
    assert (code, err) == (0, "")
    line = f"0.28.1 __main__ ['--lr', '1'] {script.parent}"
    assert sorted(out.splitlines()) == [f"[0] {line}", f"[1] {line}"]


def test_without_the_option_there_is_no_horovod(marker: str, script: Path) -> None:
    write(script, "")
    code, _, err = job(marker, script.parent, "-np", "2")
    assert code == 1
    assert "ModuleNotFoundError: No module named 'horovod'" in err


def test_a_framework_that_is_not_offered(marker: str, script: Path) -> None:
    write(script, "import horovod.torch")
    code, _, err = job(marker, script.parent, "-np", "2", "--as-horovod")
    assert code == 1
    assert "ModuleNotFoundError: No module named 'horovod.torch': kvstore_hvd answers for Horovod here" in err
    assert "Fix: import horovod.mxnet; for other frameworks install Horovod." in err


def test_a_script_that_does_not_exist_is_said_by_every_rank(marker: str, tmp_path: Path) -> None:
    code, out, err = job(marker, tmp_path, "-np", "3", "--as-horovod", program=(sys.executable, "absent.py"))
    assert (code, out) == (2, "")
    for rank in range(3):
        assert f"[{rank}] python -m kvstore_hvd: no such file: 'absent.py'" in err


def test_exit_codes_and_tracebacks_are_those_of_the_script(marker: str, script: Path) -> None:
    write(script, "if rank == 1: sys.exit(7)")
    assert job(marker, script.parent, "-np", "2", "--as-horovod")[0] == 7
    write(script, "raise ValueError(rank)")
    code, _, err = job(marker, script.parent, "-np", "2", "--as-horovod")
    assert code == 1
    assert "[1] ValueError: 1\n" in err
    assert "kvstore_hvd" not in err


def test_a_command_that_is_no_python(marker: str, tmp_path: Path) -> None:
    code, out, err = job(
        marker, tmp_path, "-np", "2", "--as-horovod", program=("env", "A=1", sys.executable, "train.py")
    )
    assert (code, out) == (2, "")
    assert "kvhvdrun: --as-horovod knows how to change 'python script.py', and the command begins with 'env'." in err


STORE = """
import mxnet as mx
ones = mx.nd.ones if mx.__version__ < '2' else mx.np.ones
net = mx.gluon.nn.Dense(1, in_units=2)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {'learning_rate': 1}, kvstore='horovod')
for step in range(2):
    with mx.autograd.record():
        loss = net(ones((1, 2)) * (rank + 1)).sum()
    loss.backward()
    trainer.allreduce_grads()
    say(str(net.weight.grad().asnumpy().tolist()))
"""


@pytest.mark.parametrize("start", [("--as-horovod", sys.executable), (sys.executable, "-m", "kvstore_hvd")])
def test_a_script_that_names_the_store_only(marker: str, script: Path, start: tuple[str, ...]) -> None:
    write(script, STORE)
    code, out, err = job(marker, script.parent, "-np", "2", *start, program=("train.py",))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] [[3.0, 3.0]]" for rank in (0, 0, 1, 1)]


TRAIN = """
import mxnet as mx
import horovod.mxnet as hvd
from horovod.mxnet.mpi_ops import allreduce

ones = mx.nd.ones if mx.__version__ < '2' else mx.np.ones

class Data(mx.gluon.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, item):
        return (ones((2,)) * item).asnumpy()

def main():
    hvd.init()
    mx.random.seed(hvd.rank())
    net = mx.gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.Uniform(1))
    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    trainer = hvd.DistributedTrainer(params, 'sgd', {'learning_rate': 0.01})
    loader = mx.gluon.data.DataLoader(Data(), batch_size=4, num_workers=1)
    for batch in loader:
        with mx.autograd.record():
            loss = net(batch * (1 + hvd.rank())).sum()
        loss.backward()
        trainer.step(4)
    assert allreduce is hvd.allreduce
    mean = allreduce(ones((1,)) * hvd.rank(), name='mean').asnumpy()[0]
    print(hvd.size(), mean, net.weight.data().asnumpy().tobytes().hex(), flush=True)

if __name__ == '__main__':
    if sys.argv[1:] == ['spawn']:
        import multiprocessing
        multiprocessing.set_start_method('spawn')
    main()
"""


@pytest.mark.skipif(importlib.util.find_spec("kvstore_hvd.mxnet") is None, reason="kvstore_hvd.mxnet is not there yet")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_training_with_horovods_interface(marker: str, script: Path, method: str) -> None:
    script.write_text("import sys\n" + TRAIN)
    program = (sys.executable, "train.py", method)
    code, out, err = job(marker, script.parent, "-np", "2", "--as-horovod", "--no-prefix", program=program)
    assert code == 0, err
    first, second = out.splitlines()
    assert first == second
    assert first.startswith("2 0.5 ")


@pytest.mark.skipif(mpirun() is None, reason="no mpirun and mpi4py beside this interpreter")
def test_under_mpirun(script: Path) -> None:
    write(script, JOIN + "os.write(1, f'{horovod.__version__} {kvstore_hvd.topology().rank}\\n'.encode())")
    launcher = mpirun()
    assert launcher is not None
    done = subprocess.run(
        launcher.command(2, [sys.executable, "-m", "kvstore_hvd", "train.py"]),
        cwd=script.parent,
        env={**environment(launcher), "PYTHONPATH": variables_of()["PYTHONPATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0.28.1 0", "0.28.1 1"]


# -- Other processes of the script --------------------------------------------------------------------------------

WORKERS = """
import multiprocessing
import horovod.common.exceptions
def version(item):
    import horovod.common.exceptions
    return horovod.__version__, os.getpid()
if __name__ == '__main__':
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        answers = pool.map(version, range(4))
    assert os.getpid() not in {pid for _, pid in answers}
    say(str({text for text, _ in answers}))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing(marker: str, script: Path, method: str) -> None:
    write(script, WORKERS)
    program = (sys.executable, "train.py", method)
    code, out, err = job(marker, script.parent, "-np", "2", "--as-horovod", program=program)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] {'0.28.1'}", "[1] {'0.28.1'}"]


LOADER = """
import mxnet as mx, numpy as np
class Data(mx.gluon.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        import horovod.common.exceptions
        return np.float32(i * len(horovod.__version__))
if __name__ == '__main__':
    if sys.argv[1] == 'spawn':
        import multiprocessing
        multiprocessing.set_start_method('spawn')
    loader = mx.gluon.data.DataLoader(Data(), batch_size=4, num_workers=1)
    say(str([float(batch.asnumpy().sum()) for batch in loader]))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(marker: str, script: Path, method: str) -> None:
    write(script, LOADER)
    program = (sys.executable, "train.py", method)
    code, out, err = job(marker, script.parent, "-np", "2", "--as-horovod", program=program)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] [36.0, 132.0]", "[1] [36.0, 132.0]"]


def test_a_program_that_the_script_starts(marker: str, script: Path) -> None:
    write(script, "import subprocess; subprocess.run([sys.executable, 'other.py'], check=True)")
    (script.parent / "other.py").write_text("import kvstore_hvd, horovod; print(horovod.__version__)")
    code, out, err = job(marker, script.parent, "-np", "1", "--as-horovod")
    assert (code, out, err) == (0, "0.28.1\n", "")


# -- Output kept in files -----------------------------------------------------------------------------------------


def test_output_is_kept_in_files_too(marker: str, script: Path) -> None:
    write(script, "say(f'out {rank}'); say(f'err {rank}', sys.stderr); sys.stdout.write('no end')")
    code, out, err = job(marker, script.parent, "-np", "2", "--as-horovod", "--output-filename", "logs/today")
    assert code == 0
    assert sorted(out.split()) == sorted(["[0]", "out", "0", "[1]", "out", "1", "[0]", "no", "end", "[1]", "no", "end"])
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1"]
    for rank in range(2):
        folder = script.parent / "logs" / "today" / f"rank.{rank}"
        assert (folder / "stdout").read_text() == f"out {rank}\nno end"
        assert (folder / "stderr").read_text() == f"err {rank}\n"


def test_folders_sort_by_rank_and_old_output_goes(marker: str, script: Path) -> None:
    write(script, "say(str(rank))")
    old = script.parent / "logs" / "rank.03"
    old.mkdir(parents=True)
    (old / "stdout").write_text("a long line of an earlier job\n")
    assert job(marker, script.parent, "-np", "11", "--as-horovod", "--output-filename", "logs")[0] == 0
    assert sorted(path.name for path in (script.parent / "logs").iterdir()) == [
        f"rank.{rank:02d}" for rank in range(11)
    ]
    assert (old / "stdout").read_text() == "3\n"


def test_one_worker_has_files_and_no_prefix(marker: str, script: Path) -> None:
    write(script, "say('x')")
    code, out, _ = job(marker, script.parent, "-np", "1", "--as-horovod", "--output-filename", "logs")
    assert (code, out) == (0, "x\n")
    assert (script.parent / "logs" / "rank.0" / "stdout").read_text() == "x\n"


def test_a_full_disk_is_said_and_ends_no_work(marker: str, script: Path) -> None:
    write(script, "for i in range(50): say(str(i))\nsay('done', sys.stderr)")
    (script.parent / "logs" / "rank.0").mkdir(parents=True)
    (script.parent / "logs" / "rank.0" / "stdout").symlink_to("/dev/full")
    code, out, err = job(marker, script.parent, "-np", "2", "--as-horovod", "--output-filename", "logs")
    assert code == 1
    assert len(out.splitlines()) == 100
    assert err.count("kvhvdrun: stdout of rank 0 cannot be written to its file: No space left on device.") == 1
    assert (script.parent / "logs" / "rank.1" / "stdout").read_text().splitlines()[-1] == "49"
    assert err.count("done") == 2


# -- Settings -----------------------------------------------------------------------------------------------------


def test_variables_without_effect_are_said_by_one_rank(marker: str, script: Path) -> None:
    write(script, JOIN + "kvstore_hvd.barrier()")
    options = ("-np", "2", "--as-horovod")
    code, _, err = job(marker, script.parent, *options, HOROVOD_CYCLE_TIME="1", HOROVOD_LOG_LEVEL="warning")
    assert code == 0
    assert err.count("these variables of Horovod have no effect here") == 1
    assert "[0] [rank 0/2] kvstore_hvd warning: these variables" in err
    assert "HOROVOD_CYCLE_TIME: operations are carried out as soon as" in err
    assert "HOROVOD_LOG_LEVEL" not in err


AFFINITY = """
before, allowed = set(os.listdir('/proc/self/task')), os.sched_getaffinity(0)
import kvstore_hvd; kvstore_hvd.init(); kvstore_hvd.barrier()
started = set(os.listdir('/proc/self/task')) - before
pinned = [t for t in started if os.sched_getaffinity(int(t)) == {int(sys.argv[1])}]
say(f'{len(pinned) >= 1} {os.sched_getaffinity(0) == allowed}')
"""


def test_communication_threads_run_where_horovods_variable_says(marker: str, script: Path) -> None:
    write(script, AFFINITY)
    core = str(min(os.sched_getaffinity(0)))
    program = (sys.executable, "train.py", core)
    variables = {"HOROVOD_THREAD_AFFINITY": f"{core},{core}"}
    code, out, err = job(marker, script.parent, "-np", "2", "--as-horovod", program=program, **variables)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] True True", "[1] True True"]


@pytest.mark.parametrize("cores", ["0", "0,1000000"])
def test_cores_that_cannot_be_are_said_by_every_rank(marker: str, script: Path, cores: str) -> None:
    write(script, JOIN)
    code, _, err = job(marker, script.parent, "-np", "2", "--as-horovod", HOROVOD_THREAD_AFFINITY=cores)
    assert code == 1
    for rank in range(2):
        assert f"[{rank}] kvstore_hvd.errors.ConfigError: KVHVD_THREAD_AFFINITY (or HOROVOD_THREAD_AFFINITY)" in err


def test_a_job_from_a_file(marker: str, script: Path) -> None:
    write(script, "say(os.environ['KVHVD_SIZE'])")
    (script.parent / "job.yaml").write_text("num-proc: 2\nas-horovod: true\nno-prefix: true\nhosts: localhost:4\n")
    code, out, err = job(marker, script.parent, "--config-file", "job.yaml")
    assert (code, out, err) == (0, "2\n2\n", "")
