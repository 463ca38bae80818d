"""The test suite, as `make test` runs it: python tests/run.py [--quick | --all] [STEP...] [-- ARGUMENT...]

Steps: unit (pytest), parallel (3 workers; tests marked `sizes` also alone, and over virtual hosts, by TCP and by MPI),
integration and hosts (pytest; the tests start jobs of their own, and mostly wait), proof (pytest: exhaustive searches).
Steps run side by side. The last line is the total, ``N passed, N failed``. A parallel test counts once for each number
of workers, and has failed when it failed, or was not run, on any. What every rank printed stays in the folder given by
``--out``.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from support.launchers import environment, kvhvdrun, mpirun
from support.results import Results, read

TESTS = Path(__file__).resolve().parent
USUAL = "not soak and not fuzz and not gpu"
# An operation that waits this long for another rank fails, so that a test that failed on one rank ends on the others.
OPERATION_TIMEOUT_S = 120
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
    """One run of pytest: by a launcher's ranks, or by one process with some lanes."""

    folder: str
    marks: str = "not slow"
    launcher: str = ""
    ranks: int = 1
    lanes: int = 1
    hosts: str = ""  # KVHVD_TEST_HOSTS: the ranks are split into virtual hosts
    tests: tuple[str, ...] = ()  # those of the folder that are chosen; empty: all

    @property
    def name(self) -> str:
        hosts = f"-hosts-{self.hosts}" if self.hosts else ""
        return f"{self.folder}-{self.launcher}-{self.ranks}{hosts}" if self.launcher else self.folder


# Chains of steps run at the same time; tests of hosts mostly wait.
UNIT, INTEGRATION, HOSTS = Step("unit", lanes=2), Step("integration", lanes=6), Step("hosts")
PROOF = Step("proof", lanes=2)
SUITE = [
    [
        # With 2 workers, some sums over all ranks equal those over this one's neighbour.
        Step("parallel", UNIT.marks, "kvhvdrun", 3),
        Step("parallel", f"sizes and {UNIT.marks}", "kvhvdrun", 1),
        Step("parallel", f"sizes and {UNIT.marks}", "kvhvdrun", 4, hosts="2,1,1"),
        Step("parallel", f"sizes and {UNIT.marks}", "mpirun", 4, hosts="2"),
    ],
    [UNIT, INTEGRATION],
    [HOSTS, PROOF],
]
# In the environment of the other MXNet and the other MPI.
QUICK_MARKS = f"not alike and {UNIT.marks}"
QUICK = [
    [
        Step("parallel", UNIT.marks, "kvhvdrun", 2),
        Step("parallel", f"sizes and {QUICK_MARKS}", "mpirun", 3, hosts="2,1"),
    ],
    [Step("unit", QUICK_MARKS, lanes=2), Step("integration", QUICK_MARKS, lanes=3)],
    [HOSTS],
]
ALL = [
    [
        Step("unit", "", lanes=2),
        *(Step("parallel", "", "kvhvdrun", ranks) for ranks in (1, 2, 4)),
        Step("parallel", "", "mpirun", 3),
        *(step for step in SUITE[0] if step.hosts),
        Step("integration", "", lanes=2),
        HOSTS,
        PROOF,
    ]
]


def run(step: Step, options: argparse.Namespace) -> Results:
    """Run one step; never takes longer than the time limit."""
    folder = options.out / step.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marks = f"{USUAL} and {step.marks}" if step.marks else USUAL
    program = [sys.executable, "-X", "faulthandler", str(TESTS / "support" / "results.py"), str(folder)]
    program += [*(step.tests or [str(TESTS / step.folder)]), "-v", "--durations=30", "-m", marks]
    if step.lanes > 1:
        program += [f"--numprocesses={step.lanes}", "--dist=worksteal", "--timeout-method=signal"]
    program += options.pytest
    launcher = mpirun() if step.launcher == "mpirun" else kvhvdrun() if step.launcher else None
    variables = {"PYTHONPYCACHEPREFIX": str(TESTS.parent / "build" / "pycache"), **environment(launcher)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the same files
    if launcher:
        program = launcher.command(step.ranks, program)
        variables |= {"KVHVD_TIMEOUT": str(OPERATION_TIMEOUT_S), "PYTHONUNBUFFERED": "1"}
        variables |= {"KVHVD_TEST_HOSTS": step.hosts}
    with (folder / "launcher.log").open("wb") as log:
        given = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "cwd": folder}
        variables.update(ISAS.get(options.isa, {}))
        process = subprocess.Popen(program, env=variables, start_new_session=True, **given)
        try:
            code = process.wait(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    results = read(folder, step.ranks, may_be_empty=bool(options.pytest or step.tests))
    if code is None:
        results.problems.insert(0, f"ended after its time limit of {options.timeout:g} s")
    elif code != 0 and not results.count("failed"):
        results.problems.append(f"{program[0]} ended with code {code} although every test passed")
    return results


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


def report(step: Step, results: Results, folder: Path) -> list[str]:
    """Print what failed, each test once, with its ranks; returns at most 16 lines on why, as a log may be cut."""
    why = results.problems[:2] + [f"{test}: {text[-200:]}" for test, (text, _) in [*results.texts.items()][:2]]
    for problem in results.problems:
        print(f"  {step.name}: {problem}")
    for test, (text, ranks) in results.texts.items():
        which = f" on rank {', '.join(map(str, ranks))}" if step.launcher else ""
        print(f"---- FAILED {step.name}: {test}{which}\n{text}")
    for log in (folder / "launcher.log", *(folder / f"rank{rank}.log" for rank in results.failed_ranks)):
        lines = log.read_text(errors="replace").splitlines() if log.exists() and why else []
        if results.problems:
            print("\n".join((f"---- last lines of {log}", *lines[-60:])))
        marks = [number for number, line in enumerate(lines) if "Fatal Python error" in line]
        why += lines[marks[0] : marks[0] + 8] if marks else lines[-2:] if log.stem == "launcher" else []
    return [f"  {step.name}: {line}" for line in why[:16]]


def run_all(chains: list[list[Step]], options: argparse.Namespace) -> int:
    rows: list[list[int]] = []
    why: list[str] = []
    lock = threading.Lock()

    def run_chain(chain: list[Step]) -> None:
        for chosen in chain:
            step = chosen if mpirun() or chosen.launcher != "mpirun" else replace(chosen, launcher="kvhvdrun")
            start = time.monotonic()
            try:
                results = run(step, options)
            except Exception as error:
                results = Results(problems=[f"{type(error).__name__}: {error}"])
            seconds = time.monotonic() - start
            with lock:
                why.extend(report(step, results, options.out / step.name))
                counts = [results.count(outcome) for outcome in ("passed", "failed", "skipped")]
                rows.append(counts)
                told = "{:6} passed{:5} failed{:5} skipped".format(*counts)
                print(f"{step.name:32}{told}{seconds:8.1f} s", flush=True)

    threads = [threading.Thread(target=run_chain, args=(chain,)) for chain in chains if chain]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("\n".join(["", *why]))
    passed, failed, skipped = (sum(row[column] for row in rows) for column in range(3))
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    is_complete = len(rows) == sum(map(len, chains))
    return 0 if passed and not failed and is_complete else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="one of unit, parallel, integration, hosts, proof")
    kind = parser.add_mutually_exclusive_group()
    quick = QUICK, "what differs with the version of MXNet and the MPI"
    suites = {"quick": quick, "all": (ALL, "also what takes minutes")}
    for name, (suite, text) in suites.items():
        kind.add_argument(f"--{name}", dest="suite", action="store_const", const=suite, default=SUITE, help=text)
    parser.add_argument("--isa", choices=ISAS, help="as on a processor that has no more than this")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each step (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=Path("build/tests"), help="folder of logs (default: build/tests)")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    if unknown := set(options.steps) - {"unit", "parallel", "integration", "hosts", "proof"}:
        parser.error(f"no such step: {', '.join(unknown)}")
    options.pytest, options.out = arguments[cut + 1 :], options.out.resolve()
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    # Where they are ignored (nohup, the background of a script) what is started here would inherit that.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    mpi = mpirun()
    print(f"Python {sys.version.split()[0]}, MPI: {mpi.version if mpi else 'none'}; logs: {options.out}", flush=True)
    chains = [[step for step in chain if not options.steps or step.folder in options.steps] for chain in options.suite]
    return run_all(chains, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
