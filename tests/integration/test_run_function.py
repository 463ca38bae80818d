"""`run`: a function called in workers from within a program, as notebooks do it: there is no launcher around them.

The programs are read from standard input, so that they have no file: what they define can only travel by value.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.belongings import Belongings
from support.jobs import LIMIT_S, processes, variables_of
from support.patience import patient

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

PRELUDE = """
import os, signal, sys, threading, time
from kvstore_hvd import RunError, run
def rank():
    return int(os.environ["KVHVD_RANK"])
"""


class Notebook:
    """A process that runs a program without a file, in a folder of its own."""

    def __init__(self, folder: Path, marker: str) -> None:
        self._folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._variables = {**variables_of(marker), "TMPDIR": str(self._temporary)}
        self._belongings = Belongings(marker)

    def start(self, program: str, **variables: str) -> subprocess.Popen[str]:
        """Start the program; the caller waits for its end."""
        process = subprocess.Popen(
            [sys.executable, "-u", "-"],
            cwd=self._folder,
            env={**self._variables, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(PRELUDE + textwrap.dedent(program))
        process.stdin.close()
        process.stdin = None
        return process

    def end(self, process: subprocess.Popen[str], code: int | None = 0) -> tuple[str, str]:
        """Wait for its end, which must be with the code and leave nothing behind; stdout and stderr."""
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert code is None or process.returncode == code, out + err
        self._belongings.assert_gone(limit_s=0.0 if code is not None else patient(15), about=out + err)
        assert not list(self._temporary.iterdir())
        return out, err

    def run(self, program: str, code: int = 0, **variables: str) -> tuple[str, str]:
        """Run the program to its end: stdout and stderr."""
        return self.end(self.start(program, **variables), code)


@pytest.fixture
def notebook(tmp_path: Path, marker: str) -> Notebook:
    return Notebook(tmp_path, marker)


# -- Functions, arguments, results --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_stand_in_the_order_of_ranks(notebook: Notebook, ranks: int) -> None:
    """Workers that end in another order change nothing."""
    program = f"""
        def work(base, *, step=1):
            import kvstore_hvd.mxnet as hvd
            hvd.init()
            hvd.barrier()
            time.sleep(0.2 * (hvd.size() - hvd.rank()))
            return base + step * hvd.rank(), hvd.size()
        print(run(work, (10,), {{"step": 5}}, np={ranks}))
        """
    out, _ = notebook.run(program)
    assert out == f"{[(10 + 5 * rank, ranks) for rank in range(ranks)]}\n"


def test_what_a_notebook_defines_travels_with_the_function(notebook: Notebook) -> None:
    """Closures, lambdas, globals, classes, and instances of classes on their way back; and modules by name."""
    program = """
        import collections, json
        OFFSET = 100
        class Box:
            def __init__(self, value):
                self.value = value
        def made(factor):
            def inner(box):
                return Box(json.loads("7") * factor + OFFSET + box.value + rank())
            return inner
        boxes = run(made(3), [Box(1000)], np=2)
        print([type(box) is Box and box.value for box in boxes])
        print(run(lambda *args, **more: (args, more, collections.Counter("aab")), (1, [2]), {"x": None}, np=2)[1])
        print(run(print, num_proc=2), run(os.getcwd, np=1) == [os.getcwd()])
        """
    out, _ = notebook.run(program)
    assert out.splitlines()[0] == "[1121, 1122]"
    assert out.splitlines()[1] == "((1, [2]), {'x': None}, Counter({'a': 2, 'b': 1}))"
    assert out.splitlines()[-1] == "[None, None] True"


def test_modules_are_found_as_in_the_program(notebook: Notebook, tmp_path: Path) -> None:
    """Also those on a path that the program has added, and arguments of the program are those of the workers."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_model.py").write_text("def answer():\n    return 42\n")
    program = """
        sys.path.insert(0, os.path.abspath("mine"))
        sys.argv = ["notebook", "--epochs", "3"]
        from my_model import answer
        print(run(answer, np=2), run(lambda: sys.argv, np=1), run(lambda: sys.path == path, np=1)
              if globals().update(path=list(sys.path)) is None else 0)
        """
    out, _ = notebook.run(program)
    assert out == "[42, 42] [['notebook', '--epochs', '3']] [True]\n"


def test_large_arguments_and_results(notebook: Notebook) -> None:
    """Far above what a pipe or a message holds."""
    program = """
        import numpy
        given = numpy.arange(6_000_000, dtype=numpy.float64)
        results = run(lambda array: array * (rank() + 1), (given,), np=2)
        print([bool((result == given * (i + 1)).all()) for i, result in enumerate(results)])
        """
    out, _ = notebook.run(program)
    assert out == "[True, True]\n"


def test_it_can_be_called_again_and_from_a_thread(notebook: Notebook) -> None:
    program = """
        results = []
        threads = [threading.Thread(target=lambda k=k: results.append(run(lambda: (k, rank()), np=2))) for k in (1, 2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(sorted(results), run(rank, np=1))
        """
    out, _ = notebook.run(program)
    assert out == "[[(1, 0), (1, 1)], [(2, 0), (2, 1)]] [0]\n"


def test_it_keeps_nothing_open(notebook: Notebook) -> None:
    """However it ends."""
    program = """
        def opened(): return len(os.listdir("/proc/self/fd"))
        def attempt(func, *args, **more):
            try:
                run(func, *args, **more)
            except (RunError, RuntimeError, TypeError):
                pass
        attempt(rank, np=2)
        before = opened()
        attempt(rank, np=2)
        attempt(lambda: 1 / 0, np=2)
        attempt(lambda: threading.Lock() if rank() else 3, np=2)
        attempt(rank, (threading.Lock(),), np=2)
        attempt(rank, np=-1)
        print(opened() - before)
        """
    out, err = notebook.run(program)
    assert out == "0\n", out + err


def test_settings_of_the_program_reach_the_workers(notebook: Notebook) -> None:
    """What it has put into its environment after its imports; a wrong setting is an error before anything starts."""
    program = """
        from kvstore_hvd import ConfigError
        os.environ["MY_SETTING"] = "5"
        print(run(lambda: os.environ["MY_SETTING"], np=2))
        os.environ["KVHVD_TIMEOUT"] = "soon"
        try:
            run(rank, np=2)
        except ConfigError as error:
            print("KVHVD_TIMEOUT" in str(error))
        """
    out, _ = notebook.run(program)
    assert out == "['5', '5']\nTrue\n"


def test_another_python(notebook: Notebook, tmp_path: Path) -> None:
    """That of `executable` runs the workers."""
    python = tmp_path / "python-of-mine"
    python.write_text(f'#!/bin/sh\nCHOSEN=yes exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    out, _ = notebook.run(f"print(run(lambda: os.environ.get('CHOSEN'), np=2, executable={str(python)!r}))")
    assert out == "['yes', 'yes']\n"


def test_horovods_name(notebook: Notebook) -> None:
    """`horovod.run` is the same function, and its workers find horovod.mxnet."""
    program = """
        import horovod
        def work():
            import horovod.mxnet as hvd
            hvd.init()
            return hvd.rank(), hvd.size()
        print(horovod.run is run, horovod.run(work, np=2, use_gloo=True))
        """
    out, _ = notebook.run(program, KVHVD_AS_HOROVOD="1")
    assert out == "True [(0, 2), (1, 2)]\n"


def test_a_script_run_as_horovods(tmp_path: Path, marker: str) -> None:
    """`python -m kvstore_hvd script.py` is all that a script that calls `horovod.run` needs."""
    (tmp_path / "train.py").write_text(
        "import horovod\n"
        "import horovod.mxnet as hvd\n"
        "def work(value):\n"
        "    hvd.init()\n"
        "    return value * hvd.size() + hvd.rank()\n"
        "if __name__ == '__main__':\n"
        "    print(horovod.run(work, args=(10,), np=2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "kvstore_hvd", "train.py"],
        cwd=tmp_path,
        env=variables_of(marker),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "[20, 21]\n"), done.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_equals_that_of_one_worker(notebook: Notebook, ranks: int) -> None:
    """MXNet has been imported and used by the program; every step has all the data, whatever the number of workers."""
    program = f"""
        import mxnet as mx, numpy as np
        import kvstore_hvd.mxnet as hvd
        nd = mx.np if mx.__version__.startswith("2") else mx.nd
        images = nd.array(np.random.RandomState(0).normal(size=(12, 5)).astype("float32"))
        labels = (images * nd.arange(5)).sum(axis=1)
        print(float(labels.sum().asnumpy()) != 0)

        def train(images, labels, steps):
            hvd.init()
            net = mx.gluon.nn.Dense(1, in_units=5)
            net.initialize(mx.init.Xavier())
            mx.random.seed(3 + hvd.rank())
            params = net.collect_params()
            for name, param in sorted(params.items()):
                param.set_data(nd.ones(param.shape) * 0.1)
            trainer = hvd.DistributedTrainer(params, "sgd", {{"learning_rate": 0.05}})
            mine = slice(hvd.rank() * 12 // hvd.size(), (hvd.rank() + 1) * 12 // hvd.size())
            for _ in range(steps):
                with mx.autograd.record():
                    loss = ((net(images[mine])[:, 0] - labels[mine]) ** 2).sum()
                loss.backward()
                trainer.step(12 // hvd.size())
            return net.weight.data().asnumpy(), net.bias.data()  # an array of MXNet travels, too

        whole, = run(train, (images, labels, 20), np=1)
        parts = run(train, (images, labels, 20), np={ranks})
        print(all((part[0] == parts[0][0]).all() for part in parts), np.allclose(parts[0][0], whole[0], rtol=1e-4))
        print(np.allclose(parts[0][1].asnumpy(), whole[1].asnumpy(), rtol=1e-4), abs(whole[0]).max() > 0.5)
        """
    out, err = notebook.run(program)
    assert out.splitlines() == ["True", "True True", "True True"], out + err


def test_within_a_worker_of_another_job(notebook: Notebook, tmp_path: Path) -> None:
    """What describes the outer worker is none of the inner ones' business."""
    inner = "from kvstore_hvd import run, topology; topology(); print(run(lambda: topology().size, np=3))"
    program = f"""
        import subprocess
        done = subprocess.run([sys.executable, "-m", "kvstore_hvd.launch", "-np", "1", sys.executable, "-c", {inner!r}])
        sys.exit(done.returncode)
        """
    out, err = notebook.run(program)
    assert out == "[3, 3, 3]\n", out + err


# -- Output -------------------------------------------------------------------------------------------------------


def test_output_has_the_ranks_before_its_lines(notebook: Notebook) -> None:
    """In order with what the program writes itself."""
    program = """
        print("before")
        run(lambda: print(f"out of {rank()}") or print(f"err of {rank()}", file=sys.stderr), np=2)
        print("after")
        """
    out, err = notebook.run(program)
    assert out.splitlines()[0] == "before"
    assert sorted(out.splitlines()[1:3]) == ["[0] out of 0", "[1] out of 1"]
    assert out.splitlines()[3:] == ["after"]
    assert sorted(err.splitlines()) == ["[0] err of 0", "[1] err of 1"]


def test_output_goes_to_the_streams_of_a_notebook(notebook: Notebook) -> None:
    """They have no descriptor, or that of a terminal where nobody looks; and it comes while the workers run."""
    program = """
        class Cell:
            def __init__(self): self.text = ""; self.early = False
            def write(self, text):
                self.text += text
                if "first" in text and not os.path.exists("seen"):
                    open("seen", "w").close()
            def flush(self): pass
            def fileno(self): return 2  # as ipykernel's
        def work():
            print("first \\N{GREEK SMALL LETTER ALPHA}", flush=True)
            while not os.path.exists("seen"):
                time.sleep(0.01)
            print("problem", file=sys.stderr)
        for ranks in (1, 2):
            if os.path.exists("seen"): os.remove("seen")
            kept = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = Cell(), Cell()
            try:
                run(work, np=ranks)
                cells = sys.stdout, sys.stderr
            finally:
                sys.stdout, sys.stderr = kept
            print([sorted(cell.text.splitlines()) for cell in cells])
        """
    out, err = notebook.run(program, PYTHONIOENCODING="utf-8")
    assert out.splitlines() == [
        "[['first α'], ['problem']]",
        "[['[0] first α', '[1] first α'], ['[0] problem', '[1] problem']]",
    ]
    assert err == ""


def test_files_keep_the_output(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("run(lambda: print('line of', rank()), np=2, output_filename='logs')")
    assert [(tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text() for rank in range(2)] == [
        "line of 0\n",
        "line of 1\n",
    ]


# -- Errors -------------------------------------------------------------------------------------------------------


def test_an_exception_has_the_traceback_of_its_rank(notebook: Notebook) -> None:
    """The cause is the exception itself; the ranks that fail because of it are not taken for it."""
    program = """
        class OfMine(Exception): pass
        def deep():
            raise OfMine("the third batch is odd")
        def work():
            import kvstore_hvd.mxnet as hvd
            hvd.init()
            if hvd.rank() == 1:
                deep()
            hvd.barrier()
        try:
            run(work, np=3)
        except RunError as error:
            print(error)
            print(type(error.__cause__) is OfMine, error.__cause__)
        """
    out, err = notebook.run(program)
    assert out.startswith("[rank 1/3] run: the function raised "), out
    assert "OfMine: the third batch is odd." in out.splitlines()[0]
    assert "on rank 1:\n  Traceback (most recent call last):" in out
    assert "in work" in out
    assert "in deep" in out
    assert "worker.py" not in out  # the frames are the user's
    assert "  Fix: " in out
    assert out.endswith("True the third batch is odd\n")
    assert "[1]" in err  # each rank shows its own, too


@pytest.mark.parametrize("call", ["sys.exit()", "sys.exit(0)", "sys.exit(3)", "sys.exit('no data')"])
def test_a_function_that_calls_sys_exit(notebook: Notebook, call: str) -> None:
    """It has no result, whatever the code; the others are ended."""
    program = f"""
        try:
            run(lambda: {call} if rank() == 1 else time.sleep(1000), np=2)
        except RunError as error:
            print(error)
        """
    out, _ = notebook.run(program)
    assert out.startswith(f"[rank 1/2] run: the function called {call}, and has no result.\n"), out


def test_a_worker_that_dies_is_named(notebook: Notebook) -> None:
    program = """
        try:
            run(lambda: os.kill(os.getpid(), signal.SIGKILL) if rank() == 1 else time.sleep(1000), np=2)
        except RunError as error:
            print(error)
        """
    out, _ = notebook.run(program)
    assert "rank 1 of 2" in out
    assert "was killed by SIGKILL" in out


def test_a_worker_that_ends_without_a_word_is_named(notebook: Notebook) -> None:
    program = """
        try:
            run(lambda: os._exit(0) if rank() == 1 else 5, np=2)
        except RunError as error:
            print(error)
        """
    out, _ = notebook.run(program)
    assert out.startswith("run: rank 1 ended without a result")


def test_a_result_that_cannot_be_pickled(notebook: Notebook) -> None:
    """Its rank and its type are named; so for one that the program cannot read."""
    program = """
        class Trap:
            def __reduce__(self):
                return int, ("x",)
        for value in (threading.Lock, Trap):
            try:
                run(lambda: value() if rank() == 1 else 1, np=2)
            except RunError as error:
                print(error)
        """
    out, _ = notebook.run(program)
    assert "[rank 1/2] run: the result, a _thread.lock, cannot be pickled: TypeError" in out
    assert "run: the result of rank 1 cannot be read here: ValueError" in out


def test_a_function_that_cannot_be_read_in_the_workers(notebook: Notebook) -> None:
    program = """
        class Trap:
            def __reduce__(self):
                return int, ("x",)
        try:
            run(print, (Trap(),), np=2)
        except RunError as error:
            print(error)
        """
    out, _ = notebook.run(program)
    assert "the function or its arguments cannot be read: ValueError" in out


def test_what_has_failed_after_the_function_is_an_error(notebook: Notebook) -> None:
    """As for any worker whose exit code is not 0, although there are results."""
    program = """
        import atexit
        try:
            run(lambda: atexit.register(os._exit, 9) and None, np=2)
        except RunError as error:
            print(error)
        """
    out, _ = notebook.run(program)
    assert "exited with code 9" in out


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("run(rank, np=0)", "LaunchError: -np 0: expected a whole number of at least 1."),
        ("run(rank, np='two')", "LaunchError: -np two: expected a whole number of at least 1."),
        ("run(rank, np=2, hosts='elsewhere:2')", "LaunchError: 'elsewhere' is another host"),
        ("run(rank, np=2, hosts='localhost:1')", "LaunchError: -np 2, but the hosts have 1 slots."),
        ("run(rank, min_np=2, max_np=1)", "LaunchError: --min-np 2 is more than --max-np 1."),
        ("run(rank, np=2, reset_limit=3)", "LaunchError: --reset-limit is for elastic jobs."),
        ("run(rank, np=2, executable='/no/python')", "LaunchError: command '/no/python' was not found."),
        ("run(rank, np=2, start_timeout=-1)", "LaunchError: --start-timeout -1: expected a number of seconds"),
        ("run(rank, min_np=1, output_filename='x')", "LaunchError: --output-filename keeps what each rank writes"),
    ],
)
def test_options_that_cannot_be_are_refused(notebook: Notebook, call: str, words: str) -> None:
    """Before any worker starts."""
    program = f"""
        def rank(): open("started", "w").close()
        try:
            {call}
        except Exception as error:
            print(f"{{type(error).__name__}}: {{error}}")
        print(os.path.exists("started"))
        """
    out, err = notebook.run(program)
    assert out.startswith(words), out + err
    assert "Fix: " in out
    assert out.endswith("False\n")
    assert err == ""


# -- Ends ---------------------------------------------------------------------------------------------------------

WAITING = """
    def work():
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        print("waits", flush=True)
        time.sleep(1000)
    try:
        run(work, (), np=2)
    except KeyboardInterrupt:
        print("interrupted")
    """


def until_both_wait(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert [process.stdout.readline().partition("] ")[2] for _ in range(2)] == ["waits\n"] * 2


def test_ctrl_c_ends_the_workers_first(notebook: Notebook) -> None:
    """Then it is the KeyboardInterrupt that it always is, and the program can go on."""
    process = notebook.start(WAITING + "\n    print(run(rank, np=2))\n")
    until_both_wait(process)
    process.send_signal(signal.SIGINT)
    out, err = notebook.end(process)
    assert out.splitlines()[-2:] == ["interrupted", "[0, 1]"], out + err
    assert "[0] KeyboardInterrupt" in err


def test_workers_that_ignore_ctrl_c_are_killed_by_another(notebook: Notebook) -> None:
    ignoring = WAITING.replace("import subprocess", "signal.signal(signal.SIGINT, lambda *_: print('is heard'))")
    ignoring = ignoring.replace('subprocess.Popen(["sleep", "1000"])', "")
    process = notebook.start(ignoring.replace("time.sleep(1000)", "while True: time.sleep(1)"), KVHVD_KILL_GRACE="1000")
    until_both_wait(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert [process.stdout.readline().partition("] ")[2] for _ in range(2)] == ["is heard\n"] * 2
    process.send_signal(signal.SIGINT)
    out, _ = notebook.end(process)
    assert out.endswith("interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("options", ["np=2", "min_np=2, max_np=2"])
def test_a_program_that_is_killed_takes_its_workers_along(notebook: Notebook, number: int, options: str) -> None:
    process = notebook.start(WAITING.replace("np=2", options))
    until_both_wait(process)
    process.send_signal(number)
    notebook.end(process, code=None)
    assert process.returncode == -number


def test_a_launcher_that_is_killed_is_an_error(notebook: Notebook, marker: str) -> None:
    """Its workers end with it, and the program says how it ended."""
    program = WAITING.replace("KeyboardInterrupt", "RunError as error").replace('"interrupted"', "error")
    process = notebook.start(program)
    until_both_wait(process)
    (launcher,) = (
        pid for pid in processes(marker) if b"kvstore_hvd.calling.launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(launcher, signal.SIGKILL)
    out, _ = notebook.end(process, code=None)
    assert out.startswith("run: the launcher (kvhvdrun) ended by signal 9."), out
    assert process.returncode == 0


@pytest.mark.parametrize("action", ["signal.SIG_IGN", "collect"])
def test_a_program_that_ignores_sigchld(notebook: Notebook, action: str) -> None:
    """Or collects all children itself: it does not learn the launcher's exit code."""
    program = f"""
        def collect(number, frame):
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pass
        signal.signal(signal.SIGCHLD, {action})
        print(run(rank, np=2))
        def fail_afterwards():
            import atexit
            atexit.register(lambda: os._exit(3))
        for elastic in {{}}, {{"min_np": 2}}:
            try:
                print(run(fail_afterwards, np=2, **elastic))
            except RunError as error:
                print("exited with code 3" in str(error))
        """
    out, _ = notebook.run(program)
    assert out.splitlines() == ["[0, 1]", "True", "True"]


def test_an_error_of_the_stream_ends_the_job(notebook: Notebook) -> None:
    """It is raised once the workers have gone."""
    program = """
        class Broken:
            def write(self, text): raise ValueError("I/O operation on closed file.")
            def flush(self): pass
        sys.stdout, kept = Broken(), sys.stdout
        try:
            run(lambda: print("line", flush=True) or time.sleep(1000), np=2)
        except ValueError as error:
            print(error, file=kept)
        """
    out, _ = notebook.run(program)
    assert out == "I/O operation on closed file.\n"


# -- Elastic jobs -------------------------------------------------------------------------------------------------


def test_an_elastic_job_has_the_results_of_its_last_world(notebook: Notebook) -> None:
    """A worker dies on the way; another takes its place, and every rank of the last world has a result."""
    program = """
        def work(total):
            import kvstore_hvd.mxnet as hvd
            from kvstore_hvd import elastic
            hvd.init()
            @elastic.run
            def train(state):
                while state.step < total:
                    if state.step == 3 and hvd.rank() == 1 and not os.path.exists("died"):
                        open("died", "w").close()
                        os.kill(os.getpid(), signal.SIGKILL)
                    state.sum += hvd.size()
                    hvd.allreduce_(__import__("mxnet").nd.ones(1)).wait_to_read()
                    state.step += 1
                    state.commit()
                return state.step, hvd.rank()
            result = train(elastic.ObjectState(step=0, sum=0))
            hvd.shutdown()
            return result
        print(run(work, (8,), np=2, min_np=2, max_np=2))
        """
    out, err = notebook.run(program)
    assert out.splitlines()[-1] == "[(8, 0), (8, 1)]", out + err
    assert "was killed by SIGKILL" in err


def test_an_elastic_job_that_goes_on_with_fewer(notebook: Notebook) -> None:
    """Nobody can take the place of who dies: there are as many results as ranks in the last world."""
    program = """
        def work():
            import kvstore_hvd.mxnet as hvd
            from kvstore_hvd import elastic
            hvd.init()
            @elastic.run
            def train(state):
                while state.step < 6:
                    if state.step == 3 and hvd.size() == 3 and hvd.rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    hvd.barrier()
                    state.step += 1
                    state.commit()
                return hvd.rank(), hvd.size()
            return train(elastic.ObjectState(step=0))
        results = run(work, np=3, min_np=2, max_np=3, reset_limit=9)
        print(results == [(rank, len(results)) for rank in range(len(results))], len(results) in (2, 3))
        """
    out, err = notebook.run(program)
    assert out.splitlines()[-1] == "True True", out + err


def test_an_elastic_job_without_worlds(notebook: Notebook) -> None:
    """The results stand in the order of the workers' numbers."""
    out, err = notebook.run("print(run(lambda: int(os.environ['KVHVD_WORKER']), min_np=3, max_np=3))")
    assert out == "[0, 1, 2]\n", out + err


def test_an_elastic_job_that_fails(notebook: Notebook) -> None:
    """The traceback, and why the job could not go on."""
    program = """
        def work():
            import kvstore_hvd.mxnet as hvd
            hvd.init()
            raise KeyError("no such layer")
        try:
            run(work, np=2, min_np=2, max_np=2)
        except RunError as error:
            print(error)
        """
    out, err = notebook.run(program)
    assert "the function raised KeyError: 'no such layer'." in out, out + err
    assert "no worker of generation" in out or "worker " in out
    assert "Traceback (most recent call last):" in out
