#!/usr/bin/env python3
"""Stands for ssh, as a program: ``remote_shell.py HOST COMMAND...``; what it does depends on the name of the host.

It runs the command here, in a session of its own and behind pipes, and passes bytes on, as ssh does. With
``KVHVD_TEST_SHELL_PORT`` it connects to this port of the host, where ``remote_shell.py --serve PORT`` runs commands.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ANOTHER_VERSION = """
import sys, kvstore_hvd
kvstore_hvd.__version__ = '99'
from kvstore_hvd.launch.daemon import serve
serve(*sys.argv[1:])
"""


def run(command: str, stdin: Any, stdout: Any) -> subprocess.Popen[bytes]:
    given: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "start_new_session": True, "cwd": "/"}
    noisy = f"echo Last login: never; {command}"
    return subprocess.Popen(["/bin/sh", "-c", noisy], env={**os.environ, "HOME": "/there"}, **given)


def pass_on(to: int, back: int, end: Callable[[], object]) -> None:
    """Pass bytes on from standard input and to standard output, until no more come back; `end` says that input ends."""
    ways = {0: to, back: 1}
    while back in ways:
        for source in select.select(list(ways), [], [])[0]:
            data = os.read(source, 1 << 16)
            if not data and ways.pop(source) == to:
                end()
            with contextlib.suppress(BrokenPipeError):
                while data:
                    data = data[os.write(ways[source], data) :]


def main() -> None:
    is_ssh = os.path.basename(sys.argv[0]) == "ssh"  # which gets options of its own
    host, *words = sys.argv[sys.argv.index("--") + 1 if is_ssh else 1 :]
    if host == "--serve":
        with socket.create_server(("", int(words[0]))) as server:
            print("ready", flush=True)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while True:
                connection, _ = server.accept()
                with connection, connection.makefile("rb", buffering=0) as lines:
                    run(lines.readline().decode(), connection, connection)
    if host == "refused":
        sys.exit("ssh: connect to host refused port 22: Connection refused")
    if host == "late" and not os.path.exists("late"):
        sys.stderr.write("ssh: Could not resolve hostname late: Name or service not known\n")
        sys.exit(255)
    if host == "silent":
        sys.stderr.write("Password: ")
        sys.stderr.flush()
        time.sleep(1000)
    if host == "babbling":
        os.execvp("yes", ["yes", "no daemon at all"])
    if host == "old":
        os.execv(words[0], [words[0], "-c", ANOTHER_VERSION, *words[2:]])
    if host == "bare":
        words[0] = "/nowhere/python"
    if host == "homeless":
        words[-1] = "/nowhere"
    command = " ".join(words)
    if port := os.environ.get("KVHVD_TEST_SHELL_PORT"):
        line = socket.create_connection((host, int(port)))
        line.sendall(command.encode() + b"\n")
        pass_on(line.fileno(), line.fileno(), lambda: line.shutdown(socket.SHUT_WR))
        sys.exit(0)
    child = run(command, subprocess.PIPE, subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    pass_on(child.stdin.fileno(), child.stdout.fileno(), child.stdin.close)
    sys.exit(child.wait())


if __name__ == "__main__":
    main()
