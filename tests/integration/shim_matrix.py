"""Runs shim_workload.py on every pair of Python and NumPy that the shim promises, with both MXNet versions.

By hand, not in CI: it makes one virtual environment for each Python and MXNet (250 MB each) and needs pip's index.

    python tests/integration/shim_matrix.py [--folder build/shim] [--only 3.12] [--python 3.9=/path/to/python3.9]

A Python that is not found is reported and counts as failed, unless ``--only`` leaves it out. In every environment the
start-up files of this checkout are installed, so plain ``import mxnet`` has to work; where NumPy or Python is too new
for MXNet, it also has to *fail* with KVHVD_NUMPY_SHIM=0, which shows that it is the shim that helps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = Path(__file__).with_name("shim_workload.py")
MXNETS = ("1.9.1", "2.0.0b1")
# Python: versions of NumPy, as pip takes them.
ROWS = {
    "3.9": ("==1.23.5", "==1.26.4", "==2.0.2"),
    "3.10": ("==2.2.6",),
    "3.11": ("==1.26.4", "==2.4.*"),
    "3.12": ("==1.26.4", ">=2.5"),
    "3.13": ("==2.1.3", ">=2.5"),
}
TIMEOUT_S = 600
OPTIONS = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": TIMEOUT_S}


def find_python(minor: str, given: dict[str, str]) -> str | None:
    """Return the interpreter for a version such as 3.9: the given one, one on the path, or one of pyenv's."""
    if minor in given:
        return given[minor]
    on_path = shutil.which(f"python{minor}")
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin/python"))
    for candidate in [*map(str, pyenv), *([on_path] if on_path else [])]:
        asked = subprocess.run([candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], **OPTIONS)
        if asked.returncode == 0 and asked.stdout.strip() == minor:
            return candidate
    return None


def pip(python: Path, *arguments: str) -> None:
    """Install with pip, or fail with what it said."""
    done = subprocess.run([str(python), "-m", "pip", "install", "-q", *arguments], **OPTIONS)
    if done.returncode:
        raise RuntimeError(f"pip install {' '.join(arguments)}:\n{done.stdout}")


def environment(folder: Path, interpreter: str, mxnet: str) -> Path:
    """Return the Python of an environment with this MXNet and the start-up files; make it when it is missing."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True, timeout=TIMEOUT_S)
        # Without dependencies: MXNet declares numpy<2, which is what the shim is about.
        pip(python, "--no-deps", f"mxnet=={mxnet}")
        pip(python, "graphviz<0.9", "requests")
        (folder / "complete").touch()
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "checkout.pth").write_text(f"{ROOT}\n")
    return python


def run(python: Path, folder: Path, **variables: str) -> tuple[int, str]:
    """Run the workload outside the checkout; return its status and its last lines."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVHVD_"))}
    try:
        done = subprocess.run([str(python), str(WORKLOAD)], cwd=folder, env={**clean, **variables}, **OPTIONS)
    except subprocess.TimeoutExpired:
        return 124, f"did not end within {TIMEOUT_S} s"
    return done.returncode, done.stdout.strip()


def main() -> int:
    """Run the matrix; return 1 when anything in it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "shim", help="where the environments go")
    parser.add_argument("--only", action="append", metavar="3.x", help="only this Python; may be repeated")
    parser.add_argument("--python", action="append", default=[], metavar="3.x=PATH", help="which interpreter to use")
    arguments = parser.parse_args()
    given = dict(text.split("=", 1) for text in arguments.python)
    failed = 0
    for minor, numpys in ROWS.items():
        if arguments.only and minor not in arguments.only:
            continue
        interpreter = find_python(minor, given)
        if interpreter is None:
            print(f"Python {minor}: no interpreter found; name one with --python {minor}=PATH", flush=True)
            failed += 1
            continue
        for mxnet in MXNETS:
            folder = arguments.folder.resolve() / f"{minor}-{mxnet}"
            python = environment(folder, interpreter, mxnet)
            for numpy in numpys:
                pip(python, "--no-deps", f"numpy{numpy}")
                status, output = run(python, folder)
                failed += status != 0
                told = [line for line in output.splitlines() if line.startswith(("Python ", "  "))]
                print("\n".join(told) if told else f"Python {minor} NumPy {numpy} MXNet {mxnet}:\n{output}", flush=True)
                if numpy != "==1.23.5" and run(python, folder, KVHVD_NUMPY_SHIM="0")[0] == 0:
                    print("  but MXNet works without the shim too", flush=True)
                    failed += 1
    print("FAILED" if failed else "everything passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
