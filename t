#!/usr/bin/env python3
"""Run the tests of what has changed, or those that are named: ./t [--ranks N] [NAME...] [-- PYTEST-ARGUMENT...]

NAME is a file, file::test, a folder, a part of a file's name (`sparse`, `parallel/join`), a folder of the package
(`store`: all that concerns it), or a C++ test (`test_engine`; `test_engine@2`: over two hosts). Without names,
`git status` chooses. Native sources that have changed are compiled first. Each failure is shown once, with its ranks;
logs stay in build/t. Slow tests run only where their file is named. Without names, the planted faults of the
changed sources follow.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENVS = sorted(each for each in ROOT.glob(".venv-py*-mx*/.installed") if not each.parent.name.endswith("-demo"))
KINDS = ("unit", "parallel", "integration", "hosts", "proof")
# Folder of the package or of native/ -> parts of the names of its tests, beside tests/unit/FOLDER.
TESTS = {
    "__main__": "unit/test_main",
    "elastic": "parallel/elastic integration/elastic_training",
    "gluon": "parallel/metrics parallel/estimator parallel/training_helpers",
    "gpu": "parallel/gpu_ops test_gpu_kernels test_gpu_order",
    "horovod": "parallel/hvd_basics integration/unchanged_scripts",
    "join": "parallel/join parallel/hvd_join",
    "launch": "integration/launcher integration/elastic_launcher integration/daemon integration/run_function "
    "integration/mpirun proof/launcher",
    "log": "unit/test_config",
    "mxnet": "parallel/hvd parallel/fuzz",
    "mxnet_compat": "parallel/trainer parallel/zero_copy parallel/self_reducing parallel/trainings parallel/devices "
    "parallel/hvd_autograd",
    "numpy_ops": "parallel/numpy_ops parallel/gpu_ops parallel/fuzz",
    "timeline": "unit/world/test_recorder parallel/timeline parallel/report integration/timeline",
    "store": "parallel/kvstore parallel/sparse parallel/two_bit parallel/verify parallel/fuzz",
    "world": "unit/adapter parallel/resets parallel/hvd_basics parallel/fuzz parallel/timeline integration/lifecycle "
    "integration/stalls integration/faults hosts",
    "native/base": "parallel/fuzz test_units",
    "native/bindings": "parallel/fuzz unit/adapter",
    "native/engine": "parallel/fuzz test_devices test_engine test_engine_errors test_programs test_report "
    "test_schedule test_stall",
    "native/link": "parallel/link_compression test_link test_tcp test_records test_programs test_engine_errors@2 "
    "test_stall@2",
    "native/mxnet": "parallel/fuzz unit/adapter test_units",
    "native/reduce": "parallel/fuzz test_reduce",
    "native/report": "parallel/report test_report test_stall",
    "native/request": "parallel/fuzz test_engine_errors",
    "native/shm": "unit/native integration/stopped parallel/fuzz test_arena test_processes test_engine_errors "
    "test_engine@2",
    "native/cuda": "test_gpu_kernels test_gpu_order",
}


def part_of(path: str) -> str:
    """The name for `found` of a file or folder of the package, or of native/."""
    parts = Path(path).parts
    return "/".join(parts[:2]) if parts[0] == "native" else Path(parts[1]).stem


def found(name: str) -> list[str]:
    """The test files, tests and C++ tests that a name stands for."""
    name = name.rstrip("/")
    if name.startswith(("kvstore_hvd/", "native/")) and name not in TESTS and (ROOT / name).exists():
        name = part_of(name)
    if name in TESTS or (ROOT / "tests" / "unit" / name).is_dir():
        unit = [str(ROOT / "tests" / "unit" / name)] if (ROOT / "tests" / "unit" / name).is_dir() else []
        return unit + [test for part in TESTS.get(name, "").split() for test in found(part)]
    path, _, test = name.partition("::")
    path = path.removeprefix("tests/")
    if path.partition("/")[0] in KINDS and (ROOT / "tests" / path).exists():
        return [f"{ROOT / 'tests' / path}{'::' + test if test else ''}"]
    folder, _, part = path.rpartition("/")
    part = part.removesuffix(".cpp")
    if folder in ("", "native", "native/cuda") and list(
        (ROOT / "tests" / "native").glob(f"**/{part.partition('@')[0]}.cpp")
    ):
        return [part]
    part = part.removeprefix("test_").removesuffix(".py")
    for pattern in (f"test_{part}*.py", f"test_*{part}*.py"):
        files = sorted((ROOT / "tests").glob(f"{folder or '*'}/**/{pattern}"))
        if files := [file for file in files if file.relative_to(ROOT / "tests").parts[0] in KINDS]:
            return [f"{file}{'::' + test if test else ''}" for file in files]
    return []


def changed(sources: bool = False) -> list[str]:
    """The names of tests that concern the uncommitted changes of this checkout; or the changed sources themselves."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "-uall", "--no-renames"]
    names: list[str] = []
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line[3:].startswith(("native/", "kvstore_hvd/")):
            names.append(line[3:] if sources else part_of(line[3:]))
        elif not sources and line[3:].startswith("tests/") and (ROOT / line[3:]).exists():
            names.append(line[3:])
    return list(dict.fromkeys(names))


def cpp(tests: list[str], venv: Path) -> int:
    """Build and run C++ tests; returns how many failed."""
    make = ["make", "--silent", "--no-print-directory", f"{venv.name}/.native"]
    subprocess.run(make, cwd=ROOT, check=True)
    build = ROOT / "build" / "native"
    tools = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    (objects,) = list((ROOT / "build").glob("temp.*"))[:1]
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(build), "-G", "Ninja", f"-DKVHVD_OBJECTS={objects}"]
    compile_them = ["cmake", "--build", str(build), "--target", *{test.partition("@")[0] for test in tests}]
    for command in [compile_them] if (build / "build.ninja").exists() else [configure, compile_them]:
        subprocess.run(command, env=tools, check=True, stdout=subprocess.DEVNULL)
    failed = 0
    for test in tests:
        start = time.monotonic()
        target, _, hosts = test.partition("@")
        over = {**os.environ, "KVHVD_TEST_HOSTS": hosts or "1"}
        done = subprocess.run([str(build / target)], env=over, capture_output=True, text=True)
        failed += done.returncode != 0
        told = f"FAILED\n{done.stdout[-3000:]}{done.stderr[-3000:]}" if done.returncode else "passed"
        print(f"{test:32}{told}{time.monotonic() - start:27.1f} s", flush=True)
    return failed


def main(venv: Path) -> int:
    """Run them; 0: all passed."""
    given, start = sys.argv[1:], time.monotonic()
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, help="workers of parallel tests (default: %(default)d)")
    parser.add_argument("--hosts", default="", help="virtual hosts of parallel tests, under mpirun: 2, or 2,1")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(given[:cut])
    names = options.names or changed()
    tests = list(dict.fromkeys(test for name in names for test in found(name)))
    unknown = [name for name in names if not found(name)] or ([] if tests else ["what has changed"])
    if unknown:
        print(f"no tests for {', '.join(unknown)}", flush=True)
    if not tests or (options.names and unknown):
        return 1
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "KVHVD_BUILD_JOBS": str(os.cpu_count())}, check=True)

    sys.path.insert(0, str(ROOT / "tests"))
    import run

    concern = [name for name in options.names if name in TESTS or name.startswith(("kvstore_hvd/", "native/"))]
    are_files = all(Path(test.partition("::")[0]).suffix or "/" not in test for test in tests)
    marks = "" if options.names and are_files and not concern else "not slow"
    steps = []
    for kind in KINDS:
        if mine := [test for test in tests if test.startswith(str(ROOT / "tests" / kind))]:
            launcher = "mpirun" if options.hosts else "kvhvdrun"
            ranks = {"launcher": launcher, "ranks": options.ranks, "hosts": options.hosts} if kind == "parallel" else {}
            steps.append(run.Step(kind, marks, tests=tuple(mine), **ranks))
    chosen = argparse.Namespace(out=ROOT / "build" / "t", pytest=given[cut + 1 :], isa=None, timeout=1800)
    failed = run.run_all([steps[:1], steps[1:]], chosen) if steps else 0
    if of_cpp := [test for test in tests if "/" not in test]:
        failed += cpp(of_cpp, venv)
    if not (options.names or failed):
        command = [sys.executable, "tests/faults/run.py", "--of", *changed(sources=True)]
        failed = subprocess.run(command, cwd=ROOT).returncode
    print(f"{'FAILED' if failed else 'passed'} in {time.monotonic() - start:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    if not VENVS:
        sys.exit("no environment yet: make dev")
    if Path(sys.prefix) != VENVS[0].parent:
        os.execv(VENVS[0].parent / "bin" / "python", [str(VENVS[0].parent / "bin" / "python"), __file__, *sys.argv[1:]])
    sys.exit(main(VENVS[0].parent))
