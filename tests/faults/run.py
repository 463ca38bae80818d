"""Plants the faults of this folder, each in a copy of the package, and tells which tests notice them: see README.md.

One process imports MXNet and pytest once. It forks a process for each fault, which makes a copy of the package, changes
it, and forks the ranks of the tests. The checkout is not changed.
"""

import argparse
import gc
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
NATIVE = ROOT / "build/native"
WORK = ROOT / "build/faults"
BUILD = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
MARKS = "not slow and not soak and not fuzz and not gpu"  # as in `make test`
# The last words of pytest; the innermost frame of a test that hangs or crashes; a check of native/test_*.
NAMES = (r"(?:FAILED|ERROR) (\S+::\S+)", r"line \d+,? in (test_\w+)", r"check failed: (.*)", r"Sanitizer: (.*) \(")
LIMIT_S = 300.0  # of one run of a test
COPIED = ("kvstore_hvd", "native", "build")  # the other entries of a copy of the checkout are symbolic links


class Job(NamedTuple):
    """Tests to run in a copy of the package where, in each of these files, a text is replaced by another one."""

    name: str
    tests: list[str]
    changes: Sequence[tuple[str, str, str]] = ()  # none: to see that the tests pass


class Outcome(NamedTuple):
    """What failed in which test, '' if nothing did; in parentheses where that is no test."""

    job: Job
    test: str
    failure: str
    seconds: float


def must(*command: object, folder: Path = ROOT) -> str:
    """Run a command that has to succeed; returns its output."""
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout


def faults() -> dict[str, Job]:
    jobs = {}
    for text in "\n\n".join(file.read_text().rstrip() for file in sorted(HERE.glob("*.txt"))).split("\n\n"):
        head, _, changed = text.split("\n", 2)
        name, tests = head.removeprefix("== ").split(": ")
        changes = []
        for path, lines in re.findall(r"^([^ +-].*)\n((?:[ +-].*\n)+)", f"{changed}\n", re.MULTILINE):
            changes.append((path, re.sub(r"(?m)^[ -]|^\+.*\n", "", lines), re.sub(r"(?m)^[ +]|^-.*\n", "", lines)))
        jobs[name] = Job(name, tests.split(), changes)
    return jobs


def copy_of_checkout(job: Job) -> Path:
    """Make a copy of the checkout, with the fault in it, compiled."""
    copy = WORK / job.name
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for entry in ROOT.iterdir():
        if entry.name not in COPIED:
            (copy / entry.name).symlink_to(entry)
    must("cp", "-al", ROOT / "kvstore_hvd", ROOT / "native", copy)
    for name, old, new in job.changes:
        text = "\n" + (copy / name).read_text()
        if (times := text.count(f"\n{old}")) != 1:
            raise OSError(f"{name} has the lines to change {times} times")
        (copy / name).unlink()  # a hard link
        (copy / name).write_text(text.replace(f"\n{old}", f"\n{new}")[1:])
    if any(name.startswith("native/") for name, _, _ in job.changes):
        (copy / "build").mkdir()
        must("cp", "-a", *ROOT.glob("build/temp*"), ROOT / "build/units", copy / "build")
        for library in copy.glob("kvstore_hvd/_native*.so"):
            library.unlink()
        must("env", "KVHVD_OPTIMIZATION=-O1", *BUILD, folder=copy)
    return copy


def start_native(copy: Path, target: str, hosts: str, log: Path, flag: str) -> list[int]:
    """Link a C++ test with the objects of the copy, and start it; returns its process."""
    folder = copy / "cmake"
    if not (copy / "build").exists():
        (copy / "build").symlink_to(ROOT / "build")
    (folder / "CMakeFiles").mkdir(parents=True, exist_ok=True)
    for name in (f"{target}.dir", "testing_main.dir"):
        if not (folder / "CMakeFiles" / name).exists():
            must("cp", "-a", NATIVE / "CMakeFiles" / name, folder / "CMakeFiles")
    headers = max(path.stat().st_mtime for path in (copy / "native").rglob("*.[ch][pu]*"))
    for command in must(BIN / "ninja", "-C", NATIVE, "-t", "commands", target).splitlines():
        made = re.search(r" -o (\S+\.o) -c ", command)
        if made is None or headers > (folder / made[1]).stat().st_mtime:
            ours = re.sub(f"{ROOT}/(native|build/temp)", rf"{copy}/\1", command.replace("++ ", f"++ {flag}", 1))
            must("sh", "-c", ours, folder=folder)
    pid = fork(log, {"KVHVD_TEST_HOSTS": hosts or "1", "KVHVD_TEST_FIRST": "40", "TSAN_OPTIONS": "halt_on_error=1"})
    if pid == 0:
        os.execv(folder / target, [target])
    return [pid]


def start_pytest(copy: Path, tests: list[str], ranks: int, hosts: str, log: Path, *arguments: str) -> list[int]:
    """Start pytest as one process, or as the ranks of a job; over virtual hosts by kvhvdrun. Returns the processes."""
    words = ["-q", "--disable-warnings", "-m", MARKS, *arguments, *tests]
    # A test that hangs is ended by pytest, which names it, before LIMIT_S.
    path = {"PYTHONPATH": f"{copy}:{ROOT / 'tests'}", "KVHVD_TEST_PATIENCE": "2"}
    if not tests[0].startswith("integration"):  # whose jobs have deadlines of their own
        path["KVHVD_TIMEOUT"] = "20"
    if hosts:
        pid = fork(log, {**path, "KVHVD_TEST_HOSTS": hosts})
        if pid == 0:
            os.chdir(ROOT / "tests")
            launcher = str(BIN / "kvhvdrun")
            os.execv(launcher, [launcher, "-np", str(ranks), sys.executable, "-m", "pytest", *words])
        return [pid]
    job = {"KVHVD_JOB": secrets.token_hex(8), "KVHVD_SECRET": secrets.token_hex(32)}
    pids = []
    for rank in range(max(1, ranks)):
        places = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks}
        variables = {**job, **{f"KVHVD_{name}": str(number) for name, number in places.items()}} if ranks else {}
        pid = fork(log.with_suffix(f".{rank}"), {**variables, **path})
        if pid == 0:
            code = 99
            try:
                import pytest

                sys.path[:0] = [str(copy)]
                os.chdir(ROOT / "tests")
                code = int(pytest.main(words))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def fork(log: Path, variables: dict[str, str]) -> int:
    """Fork; the child (0 is returned there) has a session of its own, writes to the log, and handles signals anew."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        os.environ.update(variables)
    return pid


def codes_of(pids: list[int]) -> list[int]:
    """Wait for processes, and end those that are late with their descendants."""
    import psutil

    codes: dict[int, int] = {}
    end = time.monotonic() + LIMIT_S
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    family = psutil.Process(pid)
                    for each in [*family.children(recursive=True), family]:
                        each.kill()
        time.sleep(0.05)
    return [codes[pid] for pid in pids]


def failure_of(copy: Path, tests: list[str], *arguments: str) -> str:
    """Run tests of one tier; returns what failed, or ''; in parentheses where that is no test."""
    tier, _, name = tests[0].partition("/")
    folder, count, hosts = re.fullmatch(r"(\w+)-?(\d*)@?([\d,]*)", tier).groups()
    log = copy / "log"
    for old in copy.glob("log*"):
        old.unlink()
    if folder in ("native", "tsan"):
        pids = start_native(copy, name, hosts, log, "-fsanitize=thread " if folder == "tsan" else "")
    else:
        ranks = int(count or (4 if hosts else 3)) if folder == "parallel" else 0
        paths = [f"{folder}/{test.partition('/')[2]}" for test in tests]
        pids = start_pytest(copy, paths, ranks, hosts, log, *arguments)
    if not any(codes := codes_of(pids)):
        return ""
    output = "".join(each.read_text(errors="replace") for each in sorted(copy.glob("log*")))
    found = next(filter(None, (re.search(pattern, output) for pattern in NAMES)), None)
    if not found and folder == "native" and codes[0] < 0 and codes[0] != -signal.SIGKILL:
        return f"{name} was ended by {signal.Signals(-codes[0]).name}"
    return (found[1] or found[0]) if found else f"(no test, codes {codes})"


def run(job: Job) -> Outcome:
    began, failure, test = time.monotonic(), "", ""
    try:
        copy = copy_of_checkout(job)
        if not job.changes:
            failure, test = failure_of(copy, job.tests), job.name
        else:
            for test in job.tests:
                failure = failure_of(copy, [test], "-x")
                if failure and not failure.startswith("("):
                    break
    except OSError as error:
        failure = f"({error})"
    if not failure or failure.startswith("("):
        return Outcome(job, test, failure, time.monotonic() - began)  # its folder stays
    shutil.rmtree(WORK / job.name, ignore_errors=True)
    return Outcome(job, test, failure, time.monotonic() - began)


def without(outcomes: list[Outcome]) -> list[Job]:
    """The tests that noticed the faults, to be run without one: a job for each tier."""
    tiers: dict[str, set[str]] = {}
    for _, test, failure, _ in outcomes:
        tier = test.partition("/")[0]
        if tier.startswith(("native", "tsan")):
            tiers[test] = {test}
        else:
            path, colons, name = failure.partition("[")[0].partition("::")
            noticed = f"{tier}/{path.partition('/')[2]}::{name}" if colons and "[" not in test else test
            tiers.setdefault(tier, set()).add(noticed)
    return [Job(f"without-{tier.replace('/', '-')}", sorted(tests)) for tier, tests in tiers.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults [all]")
    parser.add_argument("--tenth", metavar="SEED", help="a random tenth of all, the same for the same SEED")
    parser.add_argument("--of", nargs="+", metavar="FILE", help="the faults in these files of the sources")
    parser.add_argument("--lanes", type=int, default=(os.cpu_count() or 1) + 2, help="faults at a time [%(default)d]")
    options = parser.parse_args()
    known = faults()
    if unknown := [name for name in options.names if name not in known]:
        sys.exit(f"no such fault: {' '.join(unknown)}")
    jobs = [known[name] for name in options.names or known]
    if options.of:
        jobs = [job for job in jobs if {name for name, _, _ in job.changes} & set(options.of)]
    if options.tenth:
        jobs = random.Random(options.tenth).sample(jobs, -(-len(jobs) // 10))
    if not jobs:
        return 0
    jobs.sort(key=lambda job: job.tests[0].startswith(("unit", "parallel")))  # the slow ones begin first
    os.environ.update(OMP_NUM_THREADS="1", KVHVD_BUILD_JOBS="1")
    must(*BUILD)
    targets = {test.partition("/")[2] for job in jobs for test in job.tests if test.startswith(("native", "tsan"))}
    if targets:
        objects = next((ROOT / "build").glob("temp.*"))
        generator = "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}", f"-DKVHVD_OBJECTS={objects}"
        must(BIN / "cmake", "-S", "native", "-B", NATIVE, *generator)
        must(BIN / "cmake", "--build", NATIVE, "--target", *targets)
    import mxnet  # noqa: F401 - in the forked processes it is there at once
    import pytest  # noqa: F401

    gc.freeze()
    caught: list[Outcome] = []
    survived, red = [], []
    with ProcessPoolExecutor(options.lanes, get_context("fork")) as pool:
        for done in as_completed([pool.submit(run, job) for job in jobs]):
            outcome = done.result()
            is_test = bool(outcome.failure) and not outcome.failure.startswith("(")
            (caught if is_test else survived).append(outcome)
            text = outcome.failure if is_test else f"SURVIVED {outcome.failure}"
            print(f"{outcome.seconds:4.0f} s  {outcome.job.name}: {text}", flush=True)
        for done in as_completed([pool.submit(run, job) for job in without(caught)]):
            job, _, failure, seconds = done.result()
            red += [f"{job.name}: {failure}"] if failure else []
            text = f"FAILS WITHOUT A FAULT: {failure}" if failure else "passed"
            print(f"{seconds:4.0f} s  {job.name}: {text}", flush=True)
    counts = Counter(re.split("[-/@]", outcome.test)[0] for outcome in caught)
    tiers = ", ".join(f"{tier} {count}" for tier, count in counts.items())
    names = " ".join(outcome.job.name for outcome in survived)
    print(f"caught {len(caught)} of {len(jobs)}: {tiers}; survived: {names or 'none'}")
    print(*red, sep="\n")
    return 1 if survived or red else 0


if __name__ == "__main__":
    sys.exit(main())
