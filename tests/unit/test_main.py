"""``python -m kvstore_hvd script.py``: a program runs as if Python itself had started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import patient

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = patient(60)

PROGRAM = """
import __main__, atexit, os, sys, threading
value = 'kept'
atexit.register(lambda: print('at exit', value))
print(__name__, __file__ == os.path.abspath(sys.argv[0]) or __spec__ is not None, sys.argv[1:], __main__.value)
print(sys.path[0], 'kvstore_hvd' in sys.modules)
"""


def python(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**variables, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "kvstore_hvd", *arguments, cwd=cwd)


def test_a_script_finds_itself_its_arguments_and_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "neighbour.py").write_text("")
    (tmp_path / "sub" / "train.py").write_text("import neighbour\n" + PROGRAM)
    done = run("sub/train.py", "-v", "--lr", "1", cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "__main__ True ['-v', '--lr', '1'] kept",
        f"{tmp_path / 'sub'} True",
        "at exit kept",
    ]
    assert done.returncode == 0


def test_a_module_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__name__, sys.argv[1:])")
    for arguments, told in ((("-m", "package", "-m", "x"), "['-m', 'x']"), (("package", "y"), "['y']")):
        done = run(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"__main__ {told}\n", "")


@pytest.mark.parametrize("end", ["raise ValueError('bad')", "1 +", "raise SystemExit('no')"])
def test_ends_as_python_would(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(f"x = 1\n{end}\n")
    ours, pythons = run("train.py", cwd=tmp_path), python("train.py", cwd=tmp_path)
    assert ours.returncode == pythons.returncode
    # Python names the script by its full path from 3.9 on in some places and as given in others.
    assert ours.stderr.replace(f"{tmp_path}/", "") == pythons.stderr.replace(f"{tmp_path}/", "")


def test_horovod_is_answered_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import horovod; print(horovod.__version__)")
    done = run("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.28.1\n", "")
    (tmp_path / "horovod.py").write_text("__version__ = 'another'")
    done = run("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "another\n")
    assert f"a module 'horovod' is installed ({tmp_path}/horovod.py)" in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P came with Python 3.11")
def test_a_safe_path_stays_safe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.path)")
    ours = python("-P", "-m", "kvstore_hvd", "train.py", cwd=tmp_path)
    assert ours.stdout == python("-P", "train.py", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "usage: "),
        (("-m", "no_such_module"), "no module named 'no_such_module'"),
        (("absent.py",), "no such file: 'absent.py'"),
        ((".",), "the folder '.' has no __main__.py"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
