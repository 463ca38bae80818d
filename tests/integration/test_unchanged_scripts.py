"""Scripts written for Horovod, started as they are: by kvhvdrun --as-horovod and by python -m kvstore_hvd."""

import os
import sys

import pytest

JOIN = "import kvstore_hvd; kvstore_hvd.init(); "


@pytest.mark.alike
@pytest.mark.parametrize("how", ["script", pytest.param("module", marks=pytest.mark.slow)])
def test_a_script_finds_horovod_in_every_worker(run, tmp_path, how):
    """So do other processes of the script, however they are started."""
    (tmp_path / "other.py").write_text("import kvstore_hvd, horovod; print(horovod.__version__)")
    (tmp_path / "train.py").write_text("""
import multiprocessing, os, subprocess, sys
import horovod.common.exceptions
def version(item):
    import horovod.common.exceptions
    return horovod.__version__
if __name__ == '__main__':
    print(horovod.__version__, __name__, sys.argv[1:], sys.path[0], flush=True)
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        print(pool.map(version, range(2)), flush=True)
    subprocess.run([sys.executable, 'other.py'], check=True)
""")
    program = ["train.py"] if how == "script" else ["-m", "train"]
    job = run("-np 2 --as-horovod", ["env", "A=1", sys.executable, *program, "--lr", "1"])
    own = f"0.28.1 __main__ ['--lr', '1'] {tmp_path}\n['0.28.1', '0.28.1']\n0.28.1\n"
    assert (job.of(0), job.of(1)) == (own, own)


@pytest.mark.alike
def test_a_script_that_cannot_be_started(run):
    """By name of Horovod only with the option, and for MXNet only; what every rank says names the reason."""
    err = run("-np 2", "import horovod", code=1).err
    assert "ModuleNotFoundError: No module named 'horovod'" in err
    err = run("-np 2 --as-horovod", "import horovod.torch", code=1).err
    assert "ModuleNotFoundError: No module named 'horovod.torch': kvstore_hvd answers for Horovod here" in err
    assert "Fix: import horovod.mxnet; for other frameworks install Horovod." in err
    err = run("-np 3 --as-horovod", [sys.executable, "absent.py"], code=2).err
    for rank in range(3):
        assert f"[{rank}] {sys.executable}: can't open file" in err


TRAIN = """
import mxnet as mx
import horovod.mxnet as hvd
from horovod.mxnet.mpi_ops import allreduce
ones = mx.nd.ones if mx.__version__ < '2' else mx.np.ones
class Data(mx.gluon.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, item):
        import horovod.common.exceptions
        return (ones((2,)) * item).asnumpy()
def main():
    hvd.init()
    mx.random.seed(hvd.rank())
    net = mx.gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.Uniform(1))
    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    trainer = hvd.DistributedTrainer(params, 'sgd', {'learning_rate': 0.01})
    for batch in mx.gluon.data.DataLoader(Data(), batch_size=4, num_workers=1):
        with mx.autograd.record():
            loss = net(batch * (1 + hvd.rank())).sum()
        loss.backward()
        trainer.step(4)
    assert allreduce is hvd.allreduce
    mean = allreduce(ones((1,)) * hvd.rank(), name='mean').asnumpy()[0]
    say(f'{hvd.size()} {mean} {net.weight.data().asnumpy().tobytes().hex()}\\n')
if __name__ == '__main__':
    if SPAWN:
        import multiprocessing
        multiprocessing.set_start_method('spawn')
    main()
"""


@pytest.mark.parametrize("spawn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_with_horovods_interface(run, spawn):
    first, second = run("-np 2 --as-horovod --no-prefix", f"SPAWN = {spawn}\n" + TRAIN).out.splitlines()
    assert first == second
    assert first.startswith("2 0.5 ")


# -- Output kept in files -----------------------------------------------------------------------------------------


@pytest.mark.alike
def test_output_is_kept_in_files_too(run, tmp_path):
    """What an earlier job has written goes; options may stand in a file."""
    old = tmp_path / "logs" / "today" / "rank.2"
    old.mkdir(parents=True)
    (old / "stdout").write_text("a long line of an earlier job\n")
    (tmp_path / "job.yaml").write_text("num-proc: 3\nas-horovod: true\nhosts: localhost:4\n")
    program = "say(f'out {rank}\\n'); say(f'err {rank}\\n', sys.stderr); sys.stdout.write('no end')"
    job = run("--config-file job.yaml --output-filename logs/today", program)
    assert sorted(job.err.splitlines()) == sorted(f"[{rank}] err {rank}" for rank in range(3))
    folders = sorted(path.name for path in old.parent.iterdir())
    assert folders == [f"rank.{rank}" for rank in range(3)]
    assert (old / "stdout").read_text() == "out 2\nno end"
    assert (old / "stderr").read_text() == "err 2\n"


# -- Settings -----------------------------------------------------------------------------------------------------


@pytest.mark.alike
def test_variables_of_horovod(run):
    """Those without effect are said by one rank; communication threads run where one of them says."""
    program = """
before, allowed = set(os.listdir('/proc/self/task')), os.sched_getaffinity(0)
import kvstore_hvd; kvstore_hvd.init(); kvstore_hvd.barrier()
started = set(os.listdir('/proc/self/task')) - before
pinned = [t for t in started if os.sched_getaffinity(int(t)) == {min(allowed)}]
say(f'{len(pinned) >= 1} {os.sched_getaffinity(0) == allowed}\\n')
"""
    core = min(os.sched_getaffinity(0))
    variables = {"HOROVOD_THREAD_AFFINITY": f"{core},{core}", "HOROVOD_CYCLE_TIME": "1"}
    job = run("-np 2 --as-horovod", program, HOROVOD_LOG_LEVEL="warning", **variables)
    assert sorted(job.out.splitlines()) == ["[0] True True", "[1] True True"]
    assert job.err.count("these variables of Horovod have no effect here") == 1
    assert "[0] [rank 0/2] kvstore_hvd warning: these variables" in job.err
    assert "HOROVOD_CYCLE_TIME: operations are carried out as soon as" in job.err
    assert "HOROVOD_LOG_LEVEL" not in job.err


@pytest.mark.alike
def test_settings_that_cannot_be_are_errors(run):
    """Cores that are not there are said by every rank, a misspelt name by the launcher."""
    err = run("-np 2 --as-horovod", JOIN, code=1, HOROVOD_THREAD_AFFINITY="0,1000000").err
    for rank in range(2):
        assert f"[{rank}] kvstore_hvd.errors.ConfigError: KVHVD_THREAD_AFFINITY (or HOROVOD_THREAD_AFFINITY)" in err
    err = run("-np 2", ["true"], code=2, KVHVD_TIMEUOT="3").err
    assert "  KVHVD_TIMEUOT does not exist; did you mean KVHVD_TIMEOUT?\n  Fix: " in err


@pytest.mark.alike
def test_a_full_disk_is_said_and_ends_no_work(run, tmp_path):
    (tmp_path / "logs" / "rank.0").mkdir(parents=True)
    (tmp_path / "logs" / "rank.0" / "stdout").symlink_to("/dev/full")
    program = "for i in range(50): say(f'{i}\\n')\nsay('done', sys.stderr)"
    job = run("-np 2 --output-filename logs", program, code=1)
    assert len(job.out.splitlines()) == 100
    assert job.err.count("kvhvdrun: stdout of rank 0 cannot be written to its file: No space left on device.") == 1
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text().splitlines()[-1] == "49"
    assert job.err.count("done") == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--as-horovod", f"{sys.executable} -m kvstore_hvd"])
def test_a_script_that_names_the_store_only(run, how):
    program = """
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
    say(str(net.weight.grad().asnumpy().tolist()) + '\\n')
"""
    assert run(f"-np 2 {how}", program).out.count("[[3.0, 3.0]]\n") == 4
