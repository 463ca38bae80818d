"""The test suite: unit tests once, parallel tests at several numbers of ranks under every launcher, integration tests.

    python tests/run.py [--quick] [unit] [parallel] [integration] [-- PYTEST-ARGUMENT...]

The last line is the total, ``N passed, N failed``; a parallel test counts once for each launcher and number of ranks,
and has passed when it passed on all of them. What every rank printed stays in the folder given by ``--out``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from support.launchers import Launcher, environment, kvhvdrun, mpirun
from support.patience import patient
from support.results import Results, read

TESTS = Path(__file__).resolve().parent
STEPS = ("unit", "parallel", "integration")
# As in the table of docs/contract.md (tests/unit/project/test_contract.py compares). Three: what is wrong only with a
# number that is no power of two. Who starts the ranks matters little beyond that.
RANKS = {"kvhvdrun": (1, 2, 4), "mpirun": (3,)}
QUICK_RANKS = {"kvhvdrun": (), "mpirun": (2,)}
# How many processes of pytest share the integration tests, which wait for most of their time. They look only at what
# belongs to their own jobs, and wait in Python, where a signal ends one that hangs and leaves the others to run.
LANES = 2
# An operation that waits this long for another rank fails, so that a test that failed on one rank ends on the others.
OPERATION_TIMEOUT_S = patient(60)
LOG_LINES = 200
# What the kernels of ours, of oneDNN and of OpenBLAS (both within MXNet) take for the processor's instruction set.
ISAS = {
    isa: {
        "KVHVD_SIMD": isa,
        **dict.fromkeys(("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKLDNN_MAX_CPU_ISA"), onednn),
        "OPENBLAS_CORETYPE": openblas,
    }
    for isa, onednn, openblas in (("scalar", "SSE41", "Prescott"), ("avx2", "AVX2", "Haswell"))
}


@dataclass(frozen=True)
class Step:
    """One run of pytest, by one process (no launcher) or by several ranks."""

    folder: str
    ranks: int = 1
    launcher: Launcher | None = None

    @property
    def name(self) -> str:
        """The name of the step, also that of its folder of logs."""
        return f"{self.folder}-{self.launcher.name}-{self.ranks}" if self.launcher else self.folder


class Planned(NamedTuple):
    """One run of pytest, before anybody has looked which launchers there are."""

    folder: str
    launcher: str | None = None
    ranks: int = 1


class Row(NamedTuple):
    """A line of the table."""

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def plan(options: argparse.Namespace) -> Iterator[Planned]:
    """Yield what the options ask for, cheapest first."""
    for folder in options.steps or STEPS:
        if folder != "parallel":
            yield Planned(folder)
            continue
        for name in options.launchers:
            for ranks in options.ranks or (QUICK_RANKS if options.quick else RANKS)[name]:
                yield Planned(folder, name, ranks)


def steps(options: argparse.Namespace) -> Iterator[Step]:
    """Yield the steps to run: those of the plan, with kvhvdrun where there is no mpirun."""
    launchers: dict[str | None, Launcher | None] = {None: None, "kvhvdrun": kvhvdrun()}
    mpi = mpirun()
    if mpi:
        launchers["mpirun"] = mpi
    elif "mpirun" in options.launchers:
        print("mpirun: not beside this interpreter, or there is no mpi4py: kvhvdrun starts its ranks")
    known = (each if each.launcher in launchers else each._replace(launcher="kvhvdrun") for each in plan(options))
    for folder, name, ranks in dict.fromkeys(known):
        yield Step(folder, ranks, launchers[name])


def selection(options: argparse.Namespace) -> str:
    """Return what pytest is to choose, by markers."""
    return "not soak and not fuzz and not gpu" + (" and not slow" if options.quick else "")


def run(step: Step, options: argparse.Namespace) -> tuple[Results, float]:
    """Run one step; returns its results and the seconds it took. Never takes longer than the time limit."""
    folder = options.out / step.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    program = [sys.executable, "-X", "faulthandler", str(TESTS / "support" / "rank_main.py"), str(folder)]
    program += [str(TESTS / step.folder), "-v", "--durations=30", "-m", selection(options)]
    if step.folder == "integration" and options.lanes > 1:
        program += [f"--numprocesses={options.lanes}", "--dist=worksteal", "--timeout-method=signal"]
    program += options.pytest
    command = step.launcher.command(step.ranks, program) if step.launcher else program
    variables = {"KVHVD_TIMEOUT": f"{OPERATION_TIMEOUT_S:g}", "PYTHONUNBUFFERED": "1"} if step.launcher else {}
    chosen = {**ISAS.get(options.isa, {}), **({"OMP_NUM_THREADS": options.threads} if options.threads else {})}
    start = time.monotonic()
    with (folder / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,  # not the root of the sources: the installed package is tested
            env={**variables, **environment(step.launcher), **chosen},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    results = read(folder, step.ranks, may_be_empty=bool(options.pytest))
    if code is None:
        results.problems.insert(0, f"ended after its time limit of {options.timeout:g} s")
    elif code != 0 and not results.problems and not results.failed_tests:
        results.problems.append(f"{command[0]} ended with code {code} although every test passed")
    return results, time.monotonic() - start


def end(process: subprocess.Popen[bytes]) -> None:
    """End ``process`` and all its descendants: politely first, since a launcher then cleans up after itself."""
    if process.poll() is not None:
        return
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    os.killpg(process.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=10)
    for member in alive:
        member.kill()
    process.wait(timeout=30)


def report(step: Step, results: Results, folder: Path) -> None:
    """Print what failed in a step: the tests, and the last lines of the ranks that failed them."""
    for problem in results.problems:
        print(f"  {step.name}: {problem}")
    for test in results.failed_tests:
        print(f"  FAILED {step.name}: {test}")
    logs = [folder / f"rank{rank}.log" for rank in results.failed_ranks]
    for log in [*logs, *([folder / "launcher.log"] if results.problems else [])]:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        print(f"  ---- last lines of {log}")
        print("\n".join(f"  | {line}" for line in lines[-LOG_LINES:]))


def header(options: argparse.Namespace) -> None:
    """Print which package is tested, with what.

    Raises
    ------
    SystemExit
        The package is not installed.
    """
    spec = importlib.util.find_spec("kvstore_hvd")
    if spec is None:
        raise SystemExit("kvstore_hvd is not installed for this interpreter; `make test` does that")
    mpi = mpirun()
    print(f"Python {sys.version.split()[0]}, kvstore_hvd from {spec.origin}, MPI: {mpi.version if mpi else 'none'}")
    print(f"logs: {options.out}", flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _text(ranks: Mapping[str, tuple[int, ...]]) -> str:
    return "; ".join(f"{name} {','.join(map(str, numbers))}" for name, numbers in ranks.items() if numbers)


def _launchers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(RANKS):
        raise argparse.ArgumentTypeError(f"{text!r} is not of {', '.join(RANKS)}")
    return names


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; what follows ``--`` goes to pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    launchers = f"launchers of the parallel tests (default: {','.join(RANKS)})"
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"any of {', '.join(STEPS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"no slow tests, fewer ranks: {_text(QUICK_RANKS)}")
    parser.add_argument("--ranks", type=_numbers, metavar="N,N", help=f"numbers of ranks (default: {_text(RANKS)})")
    parser.add_argument("--launchers", type=_launchers, metavar="NAME,NAME", default=tuple(RANKS), help=launchers)
    parser.add_argument("--isa", choices=ISAS, help="as on a processor that has no more than this (default: this one)")
    parser.add_argument("--threads", help="threads of OpenMP in each process (default: as many as there are cores)")
    text = "integration tests at a time (default: %(default)d)"
    parser.add_argument("--lanes", type=int, metavar="N", default=LANES, help=text)
    text = "seconds for each step (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=patient(1200), help=text)
    parser.add_argument("--out", type=Path, default=Path("build/tests"), help="folder of logs (default: build/tests)")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    unknown = [step for step in options.steps if step not in STEPS]
    if unknown:
        parser.error(f"no such step: {', '.join(unknown)} (choose from {', '.join(STEPS)})")
    options.pytest = arguments[cut + 1 :]
    options.out = options.out.resolve()
    return options


def main(arguments: list[str]) -> int:
    """Run the steps, print the table and the totals; returns the exit code: 0 when everything passed."""
    options = parse(arguments)
    # Where they are ignored (nohup, the background of a script) what is started here would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    header(options)
    rows = []
    for step in steps(options):
        print(f"{step.name} ...", flush=True)
        results, seconds = run(step, options)
        report(step, results, options.out / step.name)
        passed, failed, skipped = (results.count(outcome) for outcome in ("passed", "failed", "skipped"))
        rows.append(Row(step.name, passed, failed, skipped, seconds))
    width = max([len("step"), *(len(row.name) for row in rows)])
    print(f"\n{'step':<{width}}  passed  failed  skipped  seconds")
    for row in rows:
        print(f"{row.name:<{width}}  {row.passed:6}  {row.failed:6}  {row.skipped:7}  {row.seconds:7.1f}")
    passed, failed, skipped = (sum(column) for column in zip(*(row[1:4] for row in rows)))
    print(f"\n{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
