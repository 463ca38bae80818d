"""Which hosts an elastic job may use: fixed ones, and what a script says, however it behaves."""

import contextlib
import os
import subprocess

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch import discovery
from kvstore_hvd.launch.discovery import DiscoveryError, HostDiscoveryScript, hosts_of_script
from support.patience import patient

LIMIT_S = patient(30)


def test_what_a_script_may_print():
    for text, hosts in [
        ("", {}),
        ("a:2\nb\n", {"a": 2, "b": 3}),
        ("a slots=4\n[::1]:2", {"a": 4, "::1": 2}),
        ("a:0\nb:1", {"b": 1}),
        ("a:999999999", {"a": 256}),  # as many as a world can have
    ]:
        assert hosts_of_script(text, 3) == hosts
    for text, fact in [("a b", "'a b' is not HOST:N"), ("a:x", "is not HOST:N"), ("a\nA:2", "named twice")]:
        with pytest.raises(LaunchError, match=fact):
            hosts_of_script(text)


class Poller:
    """Polls a script as the launcher does, and runs it as a daemon would."""

    def __init__(self, command):
        self.script = HostDiscoveryScript(command, 1)
        self.script.start, self.script.kill = self._start, lambda task: os.killpg(self.process.pid, 9)
        self.process = None
        self.now = 0.0

    def _start(self, task):
        self.task = task
        self.process = subprocess.Popen(
            self.script.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def next(self):
        """What the next run says."""
        self.now += 1.0
        assert self.script.poll(self.now) is None
        assert self.script.poll(self.now) is None  # it runs, or is killed now
        for fd, data in enumerate(self.process.communicate(timeout=LIMIT_S), 1):
            self.script.heard({"t": "out", "worker": self.task - 1, "fd": fd, "raw": b"of another run"})
            for begin in range(0, len(data), 1 << 16):
                self.script.heard({"t": "out", "worker": self.task, "fd": fd, "raw": data[begin : begin + (1 << 16)]})
        self.script.heard({"t": "exited", "worker": self.task, "code": self.process.returncode})
        return self.script.poll(self.now)

    def close(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)


@pytest.fixture
def script():
    with contextlib.ExitStack() as stack:
        yield lambda command: stack.enter_context(contextlib.closing(Poller(command)))


def test_a_script_is_run_again_and_again(script, tmp_path):
    path = tmp_path / "hosts"
    poller = script(f"cat {path}")
    path.write_text("localhost:2\n")
    assert poller.next() == {"localhost": 2}
    before = poller.process
    assert poller.script.poll(poller.now) is None  # not before a second has passed
    assert poller.process is before
    path.write_text("localhost\nother:3\n")
    assert poller.next() == {"localhost": 1, "other": 3}


@pytest.mark.parametrize(
    ("command", "fact"),
    [
        ("echo one; echo two >&2; echo three >&2; exit 1", "exited with code 1; it says: two / three$"),
        ("echo a b", "printed are no hosts: 'a b' is not HOST:N"),
        ("yes | head -c 100000", "printed more than 65536 bytes$"),
    ],
)
def test_a_script_that_fails(script, command, fact):
    with pytest.raises(DiscoveryError, match=fact):
        script(command).next()


def test_a_script_that_hangs_is_killed(script, monkeypatch, tmp_path):
    path = tmp_path / "hosts"
    poller = script(f"echo localhost; test -e {path} || sleep 1000")
    with monkeypatch.context() as patched:
        patched.setattr(discovery, "_LIMIT_S", 0.0)
        with pytest.raises(DiscoveryError, match="took more than 0 s and was killed"):
            poller.next()
    path.touch()
    assert poller.next() == {"localhost": 1}  # the next run has its own time


def test_a_script_whose_daemon_is_lost():
    script = HostDiscoveryScript("true", 1)
    script.start = lambda task: script.lost("was lost: its daemon was killed")
    assert script.poll(1.0) is None
    with pytest.raises(DiscoveryError, match=r"the host discovery script was lost: its daemon was killed$"):
        script.poll(1.0)
