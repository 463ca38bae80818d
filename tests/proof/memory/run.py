#!/usr/bin/env python3
"""Check the words in shared memory under the C11 memory model: run.py [--full] [--only NAME] [--build FOLDER]

Builds the litmus programs of this folder with the engine's sources and the checker, runs them, and then once more for
each order that an access of native/ has: with the next weaker order, one program at least must fail. The accesses for
which none does are in unneeded.txt, each with the reason why its order stays. Without --full: a sample of the orders.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# The engine's sources that the programs need.
CORE = (
    *("base/process", "shm/wait", "shm/world", "shm/liveness", "request/request", "report/report", "report/flight"),
    *("engine/tensor_table", "engine/mismatch", "engine/schedule", "engine/pending", "engine/pipeline"),
    *("engine/device_queue", "engine/algorithms/algorithm", "engine/algorithms/allreduce"),
)
SAME_NAMES = ("engine/algorithms/exchange", "engine/algorithms/link_sum")  # local ones, as in allreduce
CHECKER = ("model", "search", "runtime", "main")
PROGRAMS = sorted(path.stem for path in HERE.glob("*.cpp") if path.stem not in (*CHECKER, "outside"))
FLAGS = ["-std=c++17", "-g1", "-Wall", "-Wextra", f"-I{ROOT / 'native'}", f"-I{HERE}"]
CHECKED = ["-O1", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-builtin", "-Wno-tsan"]
CLOCK = "_ZNSt6chrono3_V212steady_clock3nowEv"
WRAPPED = f"memcpy memmove memset memcmp syscall eventfd {CLOCK}".split()
LINK = ["-no-pie", "-pthread", *(f"-Wl,--wrap={name}" for name in WRAPPED)]


def weaker_than(order: str, kind: str) -> list[str]:
    """The next weaker orders of an access: a read-modify-write has two halves."""
    if order == "seq_cst":
        return ["acquire" if kind == "load" else "release" if kind == "store" else "acq_rel"]
    return {"acq_rel": ["acquire", "release"], "relaxed": []}.get(order, ["relaxed"])


MUTANT_TIMEOUT_S = 120


class Order(NamedTuple):
    """An order in the text of native/: of an access, or of a compare-exchange that fails."""

    place: str  # file:line
    column: int  # which access of the line
    option: str  # --weaken or --weaken-failure
    kind: str
    order: str


def compile_all(build: Path) -> Path:
    """Build what has changed, in few translation units, as most of the time goes into headers."""
    build.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in [*ROOT.glob("native/**/*.?pp"), *HERE.glob("*.?pp"), Path(__file__)])

    def compile_one(names: Sequence[str], *flags: str) -> Path:
        source = build / f"unit-{names[-1].rpartition('/')[2]}.cpp"
        target = source.with_suffix(".o")
        if not target.exists() or target.stat().st_mtime < newest:
            source.write_text("".join(f'#include "{name}.cpp"\n' for name in names))
            subprocess.run(["g++", *FLAGS, *flags, "-c", str(source), "-o", str(target)], check=True)
        return target

    units = (
        ((*CORE, "outside", *PROGRAMS), *CHECKED),
        (CHECKER, "-O2", "-Wno-mismatched-new-delete"),
        (SAME_NAMES, *CHECKED),
    )
    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(lambda unit: compile_one(*unit), units))
    subprocess.run(["g++", *map(str, objects), *LINK, "-o", str(build / "litmus")], check=True)
    return build / "litmus"


def places_of(litmus: Path, addresses: list[str]) -> list[str]:
    """The line of native/ or of the litmus program of each access: the innermost that is not the library's."""
    given = "\n".join(hex(int(address, 16) - 1) for address in addresses)
    command = ["addr2line", "-a", "-i", "-e", str(litmus)]
    told = subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout
    found = []
    for block in re.split(r"^0x[0-9a-f]+\n", told, flags=re.MULTILINE)[1:]:
        lines = [line.partition(" (")[0] for line in block.splitlines()]
        own = [line for line in lines if str(ROOT) in line or not line.startswith("/")]
        found.append(own[0].replace(f"{ROOT}/", "") if own else lines[0])
    return found


def run(litmus: Path, program: str, arguments: list[str], timeout: float) -> tuple[int | None, str]:
    """The exit code (None: out of time) and the output of a program's part of the litmus programs."""
    command = [str(litmus), *arguments, f"{program}: "]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return None, output.decode() if isinstance(output, bytes) else output
    return done.returncode, done.stdout


def orders_of(litmus: Path, outputs: dict[str, str]) -> dict[Order, dict[str, list[str]]]:
    """The orders that the programs have reached, above relaxed: of each, by program, the addresses."""
    found: dict[Order, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, output in outputs.items():
        sites = [line.split()[1:] for line in output.splitlines() if line.startswith("site ")]
        for place, (address, kind, order, fail_order) in zip(
            places_of(litmus, [site[0] for site in sites]), sites, strict=True
        ):
            if not place.startswith("native/"):
                continue
            for option, its_order in (("--weaken", order), ("--weaken-failure", fail_order)):
                if weaker_than(its_order, kind) and (option == "--weaken" or kind == "cas"):
                    its_kind = "load" if option == "--weaken-failure" else kind
                    found[Order(place, 0, option, its_kind, its_order)][name].append(address)
    return found


def resolve(litmus: Path, output: str) -> str:
    """The output with a line of the sources for every address."""
    addresses = re.findall(r"@(0x[0-9a-f]+)", output)
    for address, place in zip(addresses, places_of(litmus, addresses), strict=True):
        output = output.replace(f"@{address}", place, 1)
    return output


def main() -> int:
    """Exit code 0: all as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every order, without a limit on executions")
    parser.add_argument("--only", choices=PROGRAMS, help="this program")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "proof-memory")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    litmus = compile_all(options.build)
    depth = ["--full"] if options.full else []
    failed = 0
    outputs: dict[str, str] = {}
    for name in [options.only] if options.only else PROGRAMS:
        code, output = run(litmus, name, ["--sites", *depth], 1200)
        outputs[name] = output
        print("".join(f"{line}\n" for line in output.splitlines() if not line.startswith("site ")), end="", flush=True)
        if code != 0:
            print(resolve(litmus, output))
            failed += 1
    if failed:
        return 1
    mutants = [
        (order, weaker, by_program)
        for order, by_program in sorted(orders_of(litmus, outputs).items())
        for weaker in weaker_than(order.order, order.kind)
    ]
    chosen = mutants if options.full else mutants[:: max(1, len(mutants) // 8)]

    def find(mutant: tuple[Order, str, dict[str, list[str]]]) -> str:
        order, weaker, by_program = mutant
        for name, addresses in by_program.items():
            arguments = [word for address in addresses for word in (order.option, f"{address}={weaker}")]
            code, output = run(litmus, name, arguments, MUTANT_TIMEOUT_S)
            if code == 1:
                told = next(line for line in output.splitlines() if "FAILED" in line)
                return told.replace(" FAILED:", "")
        return ""

    listed = {}
    for line in (HERE / "unneeded.txt").read_text().splitlines():
        if entry := re.fullmatch(r"(.*: (?:failing )?\w+ to \w+)  (.*)", line):
            listed[entry[1]] = entry[2]
    survived = set()
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        for (order, weaker, _), by in zip(chosen, pool.map(find, chosen), strict=True):
            what = "failing " if order.option == "--weaken-failure" else ""
            file, _, line = order.place.rpartition(":")
            text = (ROOT / file).read_text().splitlines()[int(line) - 1].strip()
            key = f"{file}: {text}: {what}{order.order} to {weaker}"
            told = by or (f"not found, listed: {listed[key]}" if key in listed else "NOT FOUND")
            print(f"{order.place}: {what}{order.kind} {order.order} to {weaker}: {told}", flush=True)
            if not by:
                survived.add(key)
                failed += key not in listed
                if key not in listed:
                    print(f"    {key}")
    for key in set(listed) - survived if options.full and not options.only else ():
        failed += 1
        print(f"listed, but needed: {key}")
    print(f"{len(chosen)} of {len(mutants)} orders in {time.monotonic() - start:.0f} s, {failed} not as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
