#!/usr/bin/env python3
"""Stands for srun, which runs a command here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

LONGEST = 1024  # of what comes at once, although its line has no end yet


def pass_in(source: int, sink: int) -> None:
    """Pass standard input on, until it ends."""
    while data := os.read(source, 1 << 16):
        os.write(sink, data)
    os.close(sink)


def pass_out(source: int) -> None:
    """Pass on whole lines, as srun does, and the rest at the end."""
    waits = b""
    while data := os.read(source, 1 << 16):
        waits += data
        end = len(waits) - len(waits) % LONGEST if len(waits) >= LONGEST else 0
        end = max(end, waits.rfind(b"\n") + 1)
        os.write(1, waits[:end])
        waits = waits[end:]
    os.write(1, waits)


def main() -> None:
    """Be srun."""
    words = sys.argv[1:]
    options = {}
    while words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        options[name] = value
    assert (options["--nodes"], options["--ntasks"]) == ("1", "1")
    given: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    variables = {**os.environ, "SLURM_PROCID": "0", "SLURMD_NODENAME": options["--nodelist"]}
    child = subprocess.Popen(words, env=variables, **given)
    assert child.stdin is not None
    assert child.stdout is not None
    threading.Thread(target=pass_in, args=(0, os.dup(child.stdin.fileno())), daemon=True).start()
    child.stdin.close()
    pass_out(child.stdout.fileno())
    sys.exit(child.wait())


if __name__ == "__main__":
    main()
