"""Plants the faults of this folder one by one, and tells which tests notice them: see README.md."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
NATIVE = ROOT / "build/native"
WORK = ROOT / "build/faults"
KEPT, OUTPUT = WORK / "kept", WORK / "last.txt"
BUILD = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
MARKS = "not slow and not timing and not soak and not fuzz and not gpu"  # as in `make test`
PYTEST = ("-m", "pytest", "-q", "-x", "--disable-warnings", "-m", MARKS)
# What pytest says at its end; where a test hangs or crashes, the innermost frame of one; a check of native/test_*.
NAMES = (r"(?:FAILED|ERROR) (\S+::\S+|\S+\.py\b)", r"line \d+,? in (test_\w+)", r"check failed: (.*)")
OURS = {"KVHVD_TIMEOUT": "20", "PYTHONPYCACHEPREFIX": str(WORK / "pyc"), "PYTHONDONTWRITEBYTECODE": ""}
ENVIRONMENT = {**os.environ, **OURS}


def call(*command: object, folder: Path = ROOT) -> tuple[int, str]:
    """Run a command; returns its exit code, 124 if it took too long, and its output."""
    words, code = list(map(str, command)), 124
    with open(OUTPUT, "w") as log:
        process = subprocess.Popen(words, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(240)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, OUTPUT.read_text(errors="replace")


def must(*command: object) -> None:
    """Run a command that has to succeed."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")


def failure_of(test: str) -> str:
    """Run a test; returns what failed in it, or ''; in parentheses where that is no test."""
    tier, _, name = test.partition("/")
    folder, _, count = tier.partition("-")
    if folder == "native":
        if not (NATIVE / "build.ninja").exists():
            objects = next((ROOT / "build").glob("temp.*"))
            options = f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}", f"-DKVHVD_OBJECTS={objects}"
            must(BIN / "cmake", "-S", "native", "-B", NATIVE, "-G", "Ninja", *options)
        must(BIN / "cmake", "--build", NATIVE, "--target", name)
        code, output = call("env", f"KVHVD_TEST_HOSTS={count or 1}", NATIVE / name)
    else:
        launcher = [BIN / "kvhvdrun", "-np", count or "3"] if folder == "parallel" else []
        code, output = call(*launcher, sys.executable, *PYTEST, f"{folder}/{name}", folder=ROOT / "tests")
    found = next(filter(None, (re.search(pattern, output) for pattern in NAMES)), None)
    return "" if code == 0 else found[1] if found else f"(no test, code {code})"


@contextlib.contextmanager
def planted(patch: Path) -> Iterator[None]:
    """Change the sources, and compile them; afterwards both are as before, with their times."""
    kept = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)
    is_native = any(name.startswith("native/") for name in kept)
    for pattern in ("build/temp*", "build/lib*", "build/native", "kvstore_hvd/_native*.so") if is_native else ():
        kept += [str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)]
    KEPT.mkdir()
    try:
        must("cp", "-a", "--parents", *kept, KEPT)
        must("patch", "-p1", "-s", "-F1", "-r-", "--no-backup-if-mismatch", "-i", patch)
        if is_native:
            must(*BUILD)
        yield
    finally:
        must("cp", "-a", f"{KEPT}/.", ROOT)
        shutil.rmtree(KEPT)


def main() -> int:
    """Plant the faults that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults, without .patch [all]")
    patches = [HERE / f"{name}.patch" for name in parser.parse_args().names] or sorted(HERE.glob("*.patch"))
    if unknown := [patch.stem for patch in patches if not patch.exists()]:
        sys.exit(f"no such fault: {' '.join(unknown)}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # jobs in the background ignore some
        signal.signal(number, signal.default_int_handler)
    if KEPT.exists():
        sys.exit(f"another run is under way; or one was killed: `cp -a {KEPT}/. {ROOT}`, and delete {KEPT}")
    WORK.mkdir(parents=True, exist_ok=True)
    must(*BUILD)
    red: dict[str, str] = {}  # by test: what fails without a fault
    caught: Counter[str] = Counter()
    survived = []
    for patch in patches:
        tests = patch.read_text().partition("\n")[0].removeprefix("tests:").split()
        for test in tests:
            if test not in red:
                red[test] = failure_of(test)
                print(f"{test} fails without a fault: {red[test]}\n" if red[test] else "", end="", flush=True)
        began, result = time.monotonic(), ""
        try:
            with planted(patch):
                for test in (each for each in tests if not red[each]):
                    result = failure_of(test)
                    if result and not result.startswith("("):
                        caught[re.split("[-/]", test)[0]] += 1
                        break
                else:
                    raise OSError(result)
        except OSError as error:
            survived.append(patch.stem)
            result = f"SURVIVED {error}"
        print(f"{time.monotonic() - began:4.0f} s  {patch.stem}: {result}", flush=True)
    tiers = ", ".join(f"{tier} {count}" for tier, count in caught.items())
    print(f"caught {sum(caught.values())} of {len(patches)}: {tiers}; survived: {' '.join(survived) or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
