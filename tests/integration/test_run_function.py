"""`run`: a function called in workers from within a program, as notebooks do it: there is no launcher around them. The
programs are read from standard input, so that they have no file: what they define can only travel by value."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.jobs import Job, processes

PRELUDE = """
import os, signal, sys, threading, time
from kvstore_hvd import RunError, run
def rank():
    return int(os.environ["KVHVD_RANK"])
def failure(*arguments, **options):
    try:
        run(*arguments, np=2, **options)
    except RunError as error:
        print(error)
        return error
"""


@pytest.fixture
def notebook(tmp_path, marker):
    """Start programs without a file; at the end their folder of temporary files is empty."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    started = []

    def start(program, **variables):
        job = Job(
            tmp_path, marker, [sys.executable, "-u", "-"], stdin=subprocess.PIPE, TMPDIR=str(temporary), **variables
        )
        started.append(job)
        assert job.process.stdin is not None
        job.process.stdin.write((PRELUDE + textwrap.dedent(program)).encode())
        job.process.stdin.close()
        return job

    yield start
    for job in started:
        job.close()
    assert not list(temporary.iterdir())


@pytest.mark.alike
def test_functions_arguments_and_results(notebook):
    """Closures, lambdas, globals and classes travel by value, modules by name; results stand in the order of ranks."""
    program = """
        import collections, json, numpy
        os.makedirs("mine")
        open("mine/my_model.py", "w").write("def answer(): return 42")
        sys.path.insert(0, os.path.abspath("mine"))
        sys.argv = ["notebook", "--epochs", "3"]
        os.environ["MY_SETTING"] = "5"
        from my_model import answer
        OFFSET, path = 100, list(sys.path)
        given = numpy.arange(2_000_000, dtype=numpy.float64)  # far above what a pipe or a message holds
        class Box:
            def __init__(self, value):
                self.value = value
        def made(factor):
            def inner(box, array, *args, more):
                time.sleep(0.2 * (1 - rank()))
                assert (answer(), sys.argv[1:], os.environ["MY_SETTING"]) == (42, ["--epochs", "3"], "5")
                assert sys.path == path and os.getcwd() == more
                return Box(json.loads("7") * factor + OFFSET + box.value + rank()), array * (rank() + 1), args
            return inner
        results = run(made(3), [Box(1000), given, [2], collections.Counter("aab")], {"more": os.getcwd()}, np=2)
        print([type(box) is Box and box.value for box, _, _ in results], [args for _, _, args in results])
        print([bool((array == given * (i + 1)).all()) for i, (_, array, _) in enumerate(results)])
        """
    counter = "([2], Counter({'a': 2, 'b': 1}))"
    assert notebook(program).end().out == f"[1121, 1122] [{counter}, {counter}]\n[True, True]\n"


@pytest.mark.slow
def test_it_can_be_called_again_and_from_threads_and_keeps_nothing_open(notebook):
    """However it ends; an unusable setting is an error before anything starts."""
    program = """
        from kvstore_hvd import ConfigError
        def opened(): return len(os.listdir("/proc/self/fd"))
        def attempt(func, *args, **more):
            try:
                run(func, *args, **more)
            except (RunError, RuntimeError, TypeError):
                pass
        results = []
        threads = [threading.Thread(target=lambda k=k: results.append(run(lambda: (k, rank()), np=2))) for k in (1, 2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        before = opened()
        attempt(lambda: 1 / 0, np=2)
        attempt(rank, (threading.Lock(),), np=2)
        attempt(rank, np=-1)
        print(sorted(results), opened() - before)
        os.environ["KVHVD_TIMEOUT"] = "soon"
        try:
            run(rank, np=2)
        except ConfigError as error:
            print("KVHVD_TIMEOUT" in str(error))
        """
    assert notebook(program).end().out == "[[(1, 0), (1, 1)], [(2, 0), (2, 1)]] 0\nTrue\n"


@pytest.mark.alike
def test_another_python_and_a_program_that_ignores_sigchld(notebook, tmp_path):
    """`executable` runs the workers; the launcher's exit code is learned without its parent's help."""
    python = tmp_path / "python-of-mine"
    python.write_text(f'#!/bin/sh\nCHOSEN=yes exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    program = f"""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print(run(lambda: os.environ.get('CHOSEN'), np=2, executable={str(python)!r}))
        def fail_afterwards():
            import atexit
            atexit.register(lambda: os._exit(3))
        print("exited with code 3" in str(failure(fail_afterwards)))
        """
    out = notebook(program).end().out
    assert out.startswith("['yes', 'yes']\n")
    assert out.endswith("True\n")


def test_a_program_whose_standard_input_and_output_are_closed(notebook):
    program = """
        os.close(0), os.close(1)
        sys.stdout = None  # as Python itself has it then
        print(run(rank, np=2), file=sys.stderr)
        """
    assert notebook(program).end().err == "[0, 1]\n"


def test_arrays_of_mxnet_travel_also_under_horovods_name(notebook):
    """MXNet has been imported and used by the program."""
    program = """
        import mxnet as mx
        import horovod, horovod.mxnet as hvd
        nd = mx.np if mx.__version__.startswith("2") else mx.nd
        def work(given, factor):
            hvd.init()
            net = mx.gluon.nn.Dense(1, in_units=3)
            net.initialize(mx.init.One())
            trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1})
            with mx.autograd.record():
                net(given * 2).sum().backward()
            trainer.step(1)
            return net.weight.data() * factor, net.bias.data().asnumpy()
        ((weight, bias),) = horovod.run(work, (nd.ones((1, 3)), 10), np=1, use_gloo=True)
        print(horovod.run is run, weight.asnumpy().tolist(), bias.tolist())
        """
    assert notebook(program, KVHVD_AS_HOROVOD="1").end().out == f"True {[[-10.0] * 3]} [-1.0]\n"


@pytest.mark.alike
def test_output_goes_to_the_streams_of_a_notebook(notebook, tmp_path):
    """As lines with ranks, while the workers run, and to files; an error of the stream ends the job and is raised."""
    (tmp_path / "logs" / "rank.0").mkdir(parents=True)
    (tmp_path / "logs" / "rank.0" / "stdout").write_text("a long line of an earlier job\n")
    program = """
        class Cell:
            def __init__(self): self.text = ""
            def write(self, text):
                self.text += text
                if "first" in text: open("seen", "w").close()
            def flush(self): pass
            def fileno(self): return 2  # as ipykernel's
        class Broken(Cell):
            def write(self, text): raise ValueError("I/O operation on closed file.")
        def work():
            print("first \\N{GREEK SMALL LETTER ALPHA}", flush=True)
            while not os.path.exists("seen"):
                time.sleep(0.01)
            print("problem", file=sys.stderr)
        kept = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = Cell(), Cell()
        run(work, np=2, output_filename="logs")
        cells = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = kept
        print([sorted(cell.text.splitlines()) for cell in cells])
        sys.stdout = Broken()
        try:
            run(lambda: print("line", flush=True) or time.sleep(1000), np=2)
        except ValueError as error:
            print(error, file=kept[0])
        """
    job = notebook(program, PYTHONIOENCODING="utf-8").end()
    lines = ["[['[0] first α', '[1] first α'], ['[0] problem', '[1] problem']]", "I/O operation on closed file."]
    assert (job.out.splitlines(), job.err) == (lines, "")
    assert [(tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text() for rank in range(2)] == ["first α\n"] * 2


@pytest.mark.alike
def test_an_exception_has_the_traceback_of_its_rank(notebook):
    """The cause is the exception itself; the ranks that fail because of it are not taken for it."""
    program = """
        class OfMine(Exception): pass
        def deep():
            raise OfMine("the third batch is odd")
        def work():
            import kvstore_hvd
            kvstore_hvd.init()
            if rank() == 1:
                deep()
            kvstore_hvd.barrier()
        error = failure(work)
        print(type(error.__cause__) is OfMine, error.__cause__)
        """
    job = notebook(program).end()
    assert job.out.startswith("[rank 1/2] run: the function raised "), job.out
    assert "OfMine: the third batch is odd." in job.out.splitlines()[0]
    for text in ("on rank 1:\n  Traceback (most recent call last):", "in work", "in deep", "  Fix: "):
        assert text in job.out
    assert "call.py" not in job.out  # the frames are the user's
    assert job.out.endswith("True the third batch is odd\n")
    assert "[1]" in job.err  # each rank shows its own, too


@pytest.mark.alike
def test_workers_without_a_result_are_named(notebook):
    """Whatever their exit code; so are results, and arguments, that cannot travel."""
    program = """
        import atexit
        class Trap:
            def __reduce__(self):
                return int, ("x",)
        failure(lambda: sys.exit(0) if rank() == 1 else time.sleep(1000))
        failure(lambda: os.kill(os.getpid(), signal.SIGKILL) if rank() == 1 else time.sleep(1000))
        failure(lambda: threading.Lock() if rank() == 1 else 1)
        failure(lambda: Trap() if rank() == 1 else 1)
        failure(lambda: atexit.register(os._exit, 9) and None)
        """
    out = notebook(program).end().out
    for text in (
        "[rank 1/2] run: the function called sys.exit(0), and has no result.\n",
        "was killed by SIGKILL",
        "[rank 1/2] run: the result, of type _thread.lock, cannot be pickled: TypeError",
        "run: the result of rank 1 cannot be read here: ValueError",
        "exited with code 9",
    ):
        assert text in out
        out = out.partition(text)[2]


WAITING = """
    def work():
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        print("waits", flush=True)
        time.sleep(1000)
    try:
        run(work, (), np=2)
    except (KeyboardInterrupt, RunError) as error:
        print("ended", error)
    print(run(rank, np=2))
    """


@pytest.mark.alike
@pytest.mark.parametrize("deaf", [False, True])
def test_ctrl_c_ends_the_workers_first(notebook, deaf):
    """Then it is the KeyboardInterrupt that it always is, and the program can go on. A second one kills the workers."""
    line = "import signal; signal.signal(signal.SIGINT, lambda *_: print('asked', flush=True)); import subprocess"
    job = notebook(WAITING.replace("import subprocess", line) if deaf else WAITING, KVHVD_KILL_GRACE="600")
    job.until_printed("waits", 2)
    if deaf:
        job.process.send_signal(signal.SIGINT)
        job.until_printed("asked", 2)
    job.end(0, signal.SIGINT)
    assert job.out.splitlines()[-2:] == ["ended ", "[0, 1]"]
    assert ("] KeyboardInterrupt" in job.err) is not deaf


@pytest.mark.alike
@pytest.mark.parametrize(("number", "options"), [(signal.SIGKILL, "np=2"), (signal.SIGTERM, "min_np=2, max_np=2")])
def test_a_program_that_is_killed_takes_its_workers_along(notebook, number, options):
    notebook(WAITING.replace("np=2", options)).until_printed("waits", 2).end(-number, number)


@pytest.mark.alike
def test_a_launcher_that_is_killed_is_an_error(notebook, marker):
    """Its workers end with it, and the program says how it ended."""
    job = notebook(WAITING).until_printed("waits", 2)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes(marker)}
    (launcher,) = (pid for pid, command in commands.items() if b"run_job" in command)
    os.kill(launcher, signal.SIGKILL)
    assert "ended run: the launcher (kvhvdrun) ended by signal 9." in job.end().out


@pytest.mark.alike
def test_an_elastic_job_has_the_results_of_its_last_world(notebook):
    """A worker dies on the way, and another takes its place; one that raises ends a job that cannot go on."""
    program = """
        def work(total):
            import kvstore_hvd
            from kvstore_hvd import elastic
            kvstore_hvd.init()
            @elastic.run
            def train(state):
                while state.step < total:
                    rank = kvstore_hvd.topology().rank
                    if state.step == 3 and rank == 1 and not os.path.exists("died"):
                        open("died", "w").close()
                        os.kill(os.getpid(), signal.SIGKILL)
                    kvstore_hvd.barrier()
                    state.step += 1
                    state.commit()
                return state.step, rank
            result = train(elastic.ObjectState(step=0))
            kvstore_hvd.shutdown()
            return result
        print(run(work, (8,), np=2, min_np=2, max_np=2))
        failure(lambda: __import__("kvstore_hvd").init() and {}["layer"], min_np=2, max_np=2)
        """
    job = notebook(program).end()
    assert "[(8, 0), (8, 1)]\n" in job.out
    assert "was killed by SIGKILL" in job.err
    assert "the function raised KeyError: 'layer'." in job.out
    assert "Traceback (most recent call last):" in job.out
