"""Which hosts an elastic job may use: fixed ones, and what a script says, however it behaves."""

import contextlib
import os
import subprocess
from unittest.mock import Mock

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch.daemons import HostDiscoveryScript, hosts_of_script
from kvstore_hvd.launch.state import StartError
from support.patience import patient

pytestmark = pytest.mark.alike

LIMIT_S = patient(30)


def test_what_a_script_may_print():
    for text, hosts in [
        ("", {}),
        ("a:2\nb\n", {"a": 2, "b": 3}),
        ("a slots=4\n[::1]:2", {"a": 4, "::1": 2}),
        ("a:0\nb:1", {"b": 1}),
        ("a: 0\nb slots=0\nc : 00\nd max_slots=0", {"d": 3}),
    ]:
        assert hosts_of_script(text, 3) == hosts
    for text, fact in [("a b", "'a b' is not HOST:N"), ("a:x", "is not HOST:N"), ("a\nA:2", "named twice")]:
        with pytest.raises(LaunchError, match=fact):
            hosts_of_script(text)


class Poller:
    """Polls a script as the launcher does, and runs it as a daemon would."""

    def __init__(self, command):
        self.script = HostDiscoveryScript(command, {}, 1)
        self.script.daemons = self
        self.process = None
        self.now = 0.0

    def start(self, host):
        assert host == "localhost"

    def send(self, host, kind, *, worker, command=(), **fields):
        self.task = worker
        if kind == "start":
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self.process = subprocess.Popen(command, start_new_session=True, **pipes)
        else:
            self.close()

    def next(self, after=0.0):
        """What the next run says, which is looked at again after so many seconds."""
        self.now += 1.0
        assert self.script.poll(self.now) is None
        self.now += after
        assert self.script.poll(self.now) is None  # it runs, or is killed now
        for fd, stream in enumerate((self.process.stdout, self.process.stderr), 1):
            self.script.heard({"t": "out", "worker": self.task - 1, "fd": fd, "raw": b"of another run"})
            while data := stream.read1(1 << 16):
                self.script.heard({"t": "out", "worker": self.task, "fd": fd, "raw": data})
        self.script.heard({"t": "exited", "worker": self.task, "code": self.process.wait(LIMIT_S)})
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
    path.write_text("# none\n")
    assert poller.next() == {}
    assert f"'cat {path}' names no host; it says: # none.\n  Fix: " in poller.script.fault(poller.now)
    path.write_text("localhost\nother:3\n")
    assert poller.next() == {"localhost": 1, "other": 3}
    path.write_text("\ufeffother:3\n")
    assert poller.next() == {"other": 3}
    assert poller.script.fault(poller.now) == ""


@pytest.mark.parametrize(
    ("command", "fact", "code"),
    [
        ("echo one; echo two >&2; echo three >&2; exit 3", r"' exited with code 3; it says: two / three\.", 1),
        ("echo a b", "printed are no hosts: 'a b' is not HOST:N", 1),
        (r"printf 'a\n\377b:2\nc\n'", r"printed are no hosts: '\\xffb:2' is not HOST:N", 1),
        ("yes no | head -c 100000", r"printed more than 65536 bytes and was killed; it says: no / no / no\.", 1),
        ("./there-is-none", r"'./there-is-none' exited with code 127; it says: .*\n  Fix: check the path", 127),
        ("/etc/passwd", r"exited with code 126; it says: .*\n  Fix: chmod", 126),
    ],
)
def test_a_script_that_fails(script, command, fact, code):
    with pytest.raises(StartError, match=fact) as caught:
        script(command).next()
    assert (caught.value.code, "\n  Fix: " in str(caught.value)) == (code, True)


def test_a_script_that_hangs_is_named_and_killed(script, tmp_path):
    path = tmp_path / "hosts"
    poller = script(f"echo localhost; test -e {path} || exec sleep 1000")
    with pytest.raises(StartError, match="sleep 1000' took more than 10 s and was killed") as caught:
        poller.next(after=10.0)
    assert poller.script.fault(poller.now) == str(caught.value)
    path.touch()
    assert poller.next() == {"localhost": 1}  # the next run has its own time
    assert poller.script.fault(poller.now) == ""
    poller.script.poll(poller.now + 1.0)
    assert "' is still running after 7 s.\n  Fix: " in poller.script.fault(poller.now + 8.0)


def test_a_script_whose_daemon_is_lost():
    script = HostDiscoveryScript("true", {}, 1)
    script.daemons = Mock()
    assert script.poll(1.0) is None
    script.lost("was lost: its daemon was killed")
    with pytest.raises(StartError, match="the host discovery script 'true' was lost: its daemon was killed"):
        script.poll(1.0)
