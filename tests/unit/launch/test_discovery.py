"""Which hosts an elastic job may use: fixed ones, and what a script says, however it behaves."""

from unittest.mock import Mock

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch import command
from kvstore_hvd.launch.daemons import HostDiscoveryScript, hosts_of_script
from kvstore_hvd.launch.driver import Driver
from kvstore_hvd.launch.state import StartError

pytestmark = pytest.mark.alike


def test_what_a_script_may_print():
    for text, hosts in [
        ("", {}),
        ("a:2\nb\n", {"a": 2, "b": 3}),
        ("a slots=4\n[::1]:2", {"a": 4, "::1": 2}),
        ("a:0\nb slots=0\nc : 00\nd max_slots=0\ne: 0\nf:1", {"d": 3, "f": 1}),
    ]:
        assert hosts_of_script(text, 3) == hosts
    for text, fact in [("a b", "'a b' is not HOST:N"), ("a:x", "is not HOST:N"), ("a\nA:2", "named twice")]:
        with pytest.raises(LaunchError, match=fact):
            hosts_of_script(text)


@pytest.fixture
def script():
    made = HostDiscoveryScript("./listing", {"A": "1"}, 2)
    made.daemons = Mock()
    return made


def end(script, now, code=0, out=b"", errors=b""):
    """Have its daemon say what the present run says, and how it ends; returns the hosts."""
    task = script.daemons.send.call_args.kwargs["worker"]
    for number, fd, data in ((task - 1, 1, b"of another run"), (task, 1, out), (task, 2, errors)):
        script.heard({"t": "out", "worker": number, "fd": fd, "raw": data})
    script.heard({"t": "exited", "worker": task, "code": code})
    return script.poll(now)


def run(script, now, out, errors=b""):
    assert script.poll(now) is None
    return end(script, now, out=out, errors=errors)


def test_a_script_is_run_again_and_again(script):
    assert run(script, 1.0, b"localhost:2\n", b"a warning\n") == {"localhost": 2}
    assert (script.poll(1.9), script.daemons.send.call_count) == (None, 1)  # not before a second has passed
    given = {"command": ["/bin/sh", "-c", "./listing"], "environment": {"A": "1"}, "capture": True, "stdin": False}
    assert script.daemons.send.call_args.kwargs.items() >= given.items()
    assert run(script, 2.0, b"# none\n") == {}
    assert "'./listing' names no host; it says: # none.\n  Fix: " in script.fault(2.0)
    assert run(script, 3.0, b"localhost\nother:3\n") == {"localhost": 2, "other": 3}
    assert (run(script, 4.0, "\ufeffother:3\n".encode()), script.fault(4.0)) == ({"other": 3}, "")
    assert [call[1]["worker"] for call in script.daemons.send.call_args_list] == [-1, -2, -3, -4]


@pytest.mark.parametrize(
    ("code", "out", "errors", "fact"),
    [
        (3, b"", b"1\n2\n3\n" + b"x" * 300, r"' exited with code 3; it says: 2 / 3 / x{200}\.\n"),
        (0, b"a b\n", b"", "printed are no hosts: 'a b' is not HOST:N"),
        (0, b"a\n\377b:2\nc\n", b"", r"printed are no hosts: '\\xffb:2' is not HOST:N"),
        (-9, b"no\n" * 30000, b"", r"printed more than 65536 bytes and was killed; it says: no / no / no\."),
        (127, b"", b"not found", r"'\./listing' exited with code 127; it says: not found\.\n  Fix: check the path"),
        (126, b"", b"denied", r"exited with code 126; it says: denied\.\n  Fix: chmod"),
    ],
)
def test_a_script_that_fails(script, code, out, errors, fact):
    script.poll(1.0)
    with pytest.raises(StartError, match=fact) as caught:
        end(script, 1.0, code, out, errors)
    assert (caught.value.code, "\n  Fix: " in str(caught.value)) == (code if code in (126, 127) else 1, True)


def test_a_script_that_hangs_is_named_and_killed(script):
    script.poll(1.0)
    assert (script.poll(10.9), script.daemons.send.call_count) == (None, 1)
    assert (script.poll(11.0), script.daemons.send.call_args.kwargs["signal"]) == (None, 9)
    with pytest.raises(StartError, match=r"\./listing' took more than 10 s and was killed") as caught:
        end(script, 11.0, -9)
    assert script.fault(11.0) == str(caught.value)
    assert (run(script, 12.0, b"localhost\n"), script.fault(12.0)) == ({"localhost": 2}, "")  # it has its own time
    script.poll(13.0)
    assert "' is still running after 7 s.\n  Fix: " in script.fault(20.0)


def test_a_script_whose_daemon_is_lost(script):
    driver = Driver(command._plan(command._options(["--min-np", "1", "true"]))._replace(script=script))
    script.poll(1.0)
    driver._on_lost_host("another", "its daemon was killed", False)
    assert script.poll(1.0) is None
    driver._on_lost_host("localhost", "its daemon was killed", False)
    with pytest.raises(StartError, match=r"the host discovery script '\./listing' was lost: its daemon was killed"):
        script.poll(1.0)
