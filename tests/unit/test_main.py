"""``python -m kvstore_hvd script.py`` runs a program as if Python itself had started it; and programs without MXNet."""

import shutil
import subprocess
import sys
from pathlib import Path

import kvstore_hvd
from kvstore_hvd.__main__ import main
from support.jobs import variables_of
from support.patience import patient

ROOT = Path(kvstore_hvd.__file__).resolve().parents[1]
LIMIT_S = patient(60)

PROGRAM = """
import __main__, atexit, os, sys, threading
value = 'kept'
atexit.register(lambda: print('at exit', value))
print(__name__, __file__ == os.path.abspath(sys.argv[0]) or __spec__ is not None, sys.argv[1:], __main__.value)
print(sys.path[0], 'kvstore_hvd' in sys.modules)
"""


def python(*arguments, cwd):
    how = {"env": {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, timeout=LIMIT_S, **how)


# Python 3.14 has no module's annotations while it runs.
ANNOTATED = "assert sys.version_info >= (3, 14) or __annotations__ == {'x': 2}\n"


def run(*arguments, cwd):
    return python("-m", "kvstore_hvd", *arguments, cwd=cwd)


def test_a_script_finds_itself_its_arguments_and_its_neighbours(tmp_path):
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "neighbour.py").write_text("")
    (folder / "train.py").write_text("import neighbour, sys\nx: 1 + 1\n" + ANNOTATED + PROGRAM)
    (tmp_path / "link.py").symlink_to("sub/train.py")
    done = run("link.py", "-v", "--lr", "1", cwd=tmp_path)
    told = ["__main__ True ['-v', '--lr', '1'] kept", f"{folder} True", "at exit kept"]
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (0, "", told)


def test_a_module_a_folder_and_an_archive(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__name__, sys.argv[1:])")
    shutil.make_archive(str(tmp_path / "app"), "zip", tmp_path / "package")
    for arguments in (("-m", "package", "-m", "x"), ("package", "y"), ("app.zip", "z")):
        done = run(*arguments, cwd=tmp_path)
        told = f"__main__ {list(arguments[1 + (arguments[0] == '-m') :])}\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


def test_ends_as_python_would(tmp_path):
    for end in ("raise ValueError('bad')", "1 +"):
        (tmp_path / "train.py").write_text(f"x = 1\n{end}\n")
        ours, pythons = run("train.py", cwd=tmp_path), python("train.py", cwd=tmp_path)
        assert ours.returncode == pythons.returncode
        # Python names the script by its full path from 3.9 on in some places and as given in others.
        assert ours.stderr.replace(f"{tmp_path}/", "") == pythons.stderr.replace(f"{tmp_path}/", "")
    if sys.version_info >= (3, 11):
        (tmp_path / "train.py").write_text("import sys; print(sys.path)")
        ours, pythons = (python("-P", *how, "train.py", cwd=tmp_path) for how in (("-m", "kvstore_hvd"), ()))
        assert ours.stdout == pythons.stdout  # a safe path stays safe


def test_horovod_is_answered_for(tmp_path):
    (tmp_path / "train.py").write_text("import horovod; print(horovod.__version__)")
    done = run("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.28.1\n", "")
    (tmp_path / "horovod.py").write_text("__version__ = 'another'")
    done = run("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "another\n")
    assert f"a module 'horovod' is installed ({tmp_path}/horovod.py)" in done.stderr


def test_what_cannot_be_run_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, text in [
        ((), "usage: "),
        (("--lr", "1"), "usage: "),
        (("-m",), "-m needs the name of a module"),
        (("-m", "no_such_module"), "no module named 'no_such_module'"),
        (("-m", "absent.part"), "cannot find module 'absent.part': No module named 'absent'"),
        (("--", "absent.py"), "no such file: 'absent.py'"),
        (("absent.py",), "no such file: 'absent.py'"),
        ((".",), "the folder '.' has no __main__.py"),
    ]:
        assert main(arguments) == 2
        assert text in capsys.readouterr().err
    assert (main(["--help"]), main(["-h"]), capsys.readouterr().out.count("usage: ")) == (0, 0, 2)


def test_arrays_of_numpy_need_none_and_what_does_says_so():
    """Each of the others is a KVHvdError with a fix; what is missing is an ImportError as before."""
    missing = ["kvstore_hvd.Horovod", "hvd.DistributedTrainer", "hvd.DistributedOptimizer", "hvd.SyncBatchNorm"]
    missing.append("hvd.elastic.ElasticSampler")
    calls = [f"hvd.{name}(np.ones(2))" for name in ("allreduce", "allgather", "alltoall", "reducescatter")]
    program = f"""
import sys
sys.modules["mxnet"] = None
import numpy as np
import kvstore_hvd
import kvstore_hvd.mxnet as hvd
hvd.init()
print(kvstore_hvd.allreduce(np.ones(2), 'x').tolist(), hvd.broadcast_object({{'a': 1}}, 0))
for name in {missing + calls}:
    try:
        eval(name)
    except kvstore_hvd.KVHvdError as error:
        assert "(" in name or isinstance(error, ImportError) and "Fix: pip install" in str(error), name
        assert "Fix: " in str(error), str(error)
        print(name)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables_of(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines() == ["[1.0, 1.0] {'a': 1}", *missing, *calls], done.stderr
