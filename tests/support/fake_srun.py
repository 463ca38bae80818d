#!/usr/bin/env python3
"""Stands for srun, which runs a command here."""

import os
import subprocess
import sys

LONGEST = 1024  # of what is passed on at once, although its line has no end yet

words, options = sys.argv[1:], {}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name[2:]] = value
assert (options["nodes"], options["ntasks"], options["overlap"]) == ("1", "1", "")
variables = {**os.environ, "SLURM_PROCID": "0", "SLURMD_NODENAME": options["nodelist"]}
# Standard input is passed on as it is; of the output whole lines, as srun does, and the rest at the end.
child = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, start_new_session=True)
assert child.stdout is not None
waits = b""
while data := os.read(child.stdout.fileno(), 1 << 16):
    waits += data
    end = len(waits) - len(waits) % LONGEST if len(waits) >= LONGEST else 0
    end = max(end, waits.rfind(b"\n") + 1)
    os.write(1, waits[:end])
    waits = waits[end:]
os.write(1, waits)
sys.exit(child.wait())
