"""What programs import from Horovod beside horovod.mxnet: that it is there, and does what Horovod's does."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore_hvd import errors
from kvstore_hvd.horovod import alias as horovod_alias
from support.patience import patient

UNCHANGED = Path(__file__).resolve().parents[3] / "docs" / "unchanged-scripts.md"
LIMIT_S = patient(10)

# The public names of Horovod 0.28.1's modules, and those that programs import although they are not.
NAMES = {
    "horovod.common.exceptions": [
        "HorovodInternalError",
        "HorovodVersionMismatchError",
        "HostsUpdatedInterrupt",
        "get_version_mismatch_message",
    ],
    "horovod.common.util": [
        "EXTENSIONS",
        "_cache",
        "ccl_built",
        "check_extension",
        "check_installed_version",
        "ddl_built",
        "env",
        "extension_available",
        "get_average_backwards_compatibility_fun",
        "get_ext_suffix",
        "get_extension_full_path",
        "gloo_built",
        "gpu_available",
        "is_iterable",
        "is_version_greater_equal_than",
        "mpi_built",
        "nccl_built",
        "num_rank_is_power_2",
        "split_list",
    ],
    "horovod.common.basics": ["HorovodBasics"],
    "horovod.common.elastic": ["ObjectState", "State", "notification_manager", "run_fn"],
    "horovod.common.process_sets": ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"],
    "horovod.runner": ["run", "run_commandline"],
    "horovod.runner.util.threads": ["execute_function_multithreaded", "in_thread", "on_event"],
    "horovod.mxnet.mpi_ops": ["_basics"],
}


@pytest.fixture(autouse=True)
def _alias() -> Iterator[None]:
    def forget() -> None:
        horovod_alias.uninstall()
        for name in [n for n in sys.modules if n.partition(".")[0] == "horovod"]:
            del sys.modules[name]

    forget()
    horovod_alias.install()
    yield
    forget()


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    module = importlib.import_module(name)
    assert [each for each in NAMES[name] if not hasattr(module, each)] == []


def test_the_page_quotes_the_error_of_what_is_not_there() -> None:
    """Word by word."""
    shown = re.search(r"^>>> import horovod\.torch\n(.*?)^```$", UNCHANGED.read_text(), re.DOTALL | re.MULTILINE)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("horovod.torch")
    assert shown is not None
    assert shown[1] == f"ModuleNotFoundError: {caught.value}\n"


def test_all_that_the_error_offers_is_there() -> None:
    for offer in horovod_alias._OFFERED:
        name, _, within = offer.partition(" (with ")
        importlib.import_module(name)
        for module in filter(None, within.rstrip(")").split(", ")):
            importlib.import_module(f"{name}.{module}")


# -- horovod.common -----------------------------------------------------------------------------------------------


def test_exceptions() -> None:
    from horovod.common import exceptions

    assert exceptions.HorovodInternalError is errors.HorovodInternalError
    assert exceptions.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    error = exceptions.HorovodVersionMismatchError("mxnet", "1.9.1", "1.8.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("mxnet", "1.9.1", "1.8.0")
    assert str(error) == exceptions.get_version_mismatch_message("mxnet", "1.9.1", "1.8.0")
    assert "Framework mxnet installed with version 1.8.0 but found version 1.9.1." in str(error)


def test_env_sets_variables_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """None leaves a variable as it is; what was there comes back, also after an exception, or when it was deleted."""
    from horovod.common.util import env

    monkeypatch.setenv("OF_TEST_KEPT", "before")
    monkeypatch.delenv("OF_TEST_NEW", raising=False)
    with env(OF_TEST_KEPT="now", OF_TEST_NEW="1", OF_TEST_NONE=None):
        assert (os.environ["OF_TEST_KEPT"], os.environ["OF_TEST_NEW"]) == ("now", "1")
        assert "OF_TEST_NONE" not in os.environ
        del os.environ["OF_TEST_NEW"]
    assert os.environ["OF_TEST_KEPT"] == "before"
    assert "OF_TEST_NEW" not in os.environ
    with pytest.raises(KeyError), env(OF_TEST_KEPT="now", OF_TEST_NEW="1"):
        raise KeyError
    assert os.environ["OF_TEST_KEPT"] == "before"
    assert "OF_TEST_NEW" not in os.environ


def test_what_the_build_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    """The same answers as those of horovod.mxnet, and in words if they are asked for."""
    import horovod.mxnet as hvd
    from horovod.common import util

    for name in ("mpi", "gloo", "nccl", "ddl", "ccl"):
        assert getattr(util, f"{name}_built")() == getattr(hvd, f"{name}_built")()
    assert capsys.readouterr().out == ""
    assert not util.gloo_built(verbose=True)
    assert capsys.readouterr().out == "Extension mxnet was NOT built with Gloo.\n"
    assert util.extension_available("mxnet", verbose=True)
    assert capsys.readouterr().out == "Extension mxnet was built.\n"
    assert util.gpu_available("torch") is False


def test_extensions() -> None:
    from horovod.common import util

    assert util.EXTENSIONS == ["mxnet"]
    assert util.get_ext_suffix().endswith(".so")
    path = util.get_extension_full_path("/a/b/__init__.py", "c", "mpi_lib")
    assert path == f"/a/b/c/mpi_lib{util.get_ext_suffix()}"
    with pytest.raises(ValueError, match="name of the extension"):
        util.get_extension_full_path("/a/b/__init__.py")


def test_cache_calls_once_for_each_list_of_arguments() -> None:
    from horovod.common.util import _cache

    calls = []

    @_cache
    def slow(value: int, *, verbose: bool = False) -> int:
        calls.append((value, verbose))
        return -value

    assert [slow(1), slow(1), slow(2), slow(1, verbose=True), slow(1, verbose=True)] == [-1, -1, -2, -1, -1]
    assert calls == [(1, False), (2, False), (1, True)]


def test_installed_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.common import util
    from horovod.common.exceptions import HorovodVersionMismatchError

    monkeypatch.setitem(sys.modules, "some_framework", SimpleNamespace(__version__="1.2.3"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        util.check_installed_version("some_framework", "1.2.3")
        util.check_installed_version("pytest", pytest.__version__)
    with pytest.warns(UserWarning, match=r"installed with version 1\.2\.3 but found version 2\.0\.0"):
        util.check_installed_version("some_framework", "2.0.0")
    cause = ImportError("symbol not found")
    with pytest.raises(HorovodVersionMismatchError, match=r"version None but found version 1\.0") as caught:
        util.check_installed_version("no_such_framework", "1.0", cause)
    assert caught.value.__cause__ is cause


def test_average_and_op() -> None:
    import horovod.mxnet as hvd
    from horovod.common.util import get_average_backwards_compatibility_fun

    choose = get_average_backwards_compatibility_fun(hvd)
    assert choose(None, None) == hvd.Average
    assert choose(hvd.Max, None) == hvd.Max
    for average, op in ((True, hvd.Average), (False, hvd.Sum)):
        with pytest.warns(DeprecationWarning):
            assert choose(None, average) == op
    with pytest.raises(ValueError, match="The op parameter supersedes average"):
        choose(hvd.Sum, True)


def test_numbers() -> None:
    from horovod.common.util import is_version_greater_equal_than, num_rank_is_power_2

    assert [n for n in range(18) if num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]
    assert is_version_greater_equal_than("1.9.1", "1.9.1")
    assert is_version_greater_equal_than("1.10.0", "1.9.1")
    assert is_version_greater_equal_than("2.0.0b1", "2.0.0")
    assert not is_version_greater_equal_than("1.9", "1.9.1")
    for version, target in (("1.9.1", "1.9"), (1.9, "1.9.1"), ("1.9.1", None)):
        with pytest.raises(ValueError, match="version"):
            is_version_greater_equal_than(version, target)


def test_basics() -> None:
    """One object of Horovod's class in horovod.mxnet.mpi_ops, and others that programs make."""
    import horovod.mxnet as hvd
    from horovod.common.basics import HorovodBasics
    from horovod.mxnet.mpi_ops import _basics

    assert isinstance(_basics, HorovodBasics)
    other = HorovodBasics("/a/b.py", "mpi_lib")
    for basics in (_basics, other):
        names = [name for name in vars(HorovodBasics) if not name.startswith("_")]
        assert len(names) == 28
        for name in names:
            assert getattr(basics, name) is getattr(hvd, name), name


def test_notification_manager() -> None:
    """That of this process, which elastic training uses."""
    from horovod.common.elastic import notification_manager

    from kvstore_hvd.elastic import notification

    assert notification_manager is notification.notification_manager
    heard: list[tuple[int, int]] = []
    listener = SimpleNamespace(on_hosts_updated=lambda timestamp, result: heard.append((timestamp, result)))
    notification_manager.register_listener(listener)
    notification_manager.handle_hosts_updated(5, 2)
    notification_manager.remove_listener(listener)
    notification_manager.handle_hosts_updated(6, 1)
    assert heard == [(5, 2)]


# -- horovod.runner.util.threads ----------------------------------------------------------------------------------


def test_functions_in_threads() -> None:
    from horovod.runner.util.threads import execute_function_multithreaded as execute

    arguments = [[number, 2] for number in range(20)]
    running, most = set(), []

    def power(base: int, exponent: int) -> int:
        running.add(threading.get_ident())
        most.append(len(running))
        running.discard(threading.get_ident())
        return base**exponent

    assert execute(power, arguments, max_concurrent_executions=3) == {number: number**2 for number in range(20)}
    assert max(most) <= 3
    assert arguments == [[number, 2] for number in range(20)]
    assert execute(power, []) == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_function_that_raises_in_a_thread() -> None:
    from horovod.runner.util.threads import execute_function_multithreaded as execute

    with pytest.raises(RuntimeError, match="Some threads for func invert did not complete successfully") as caught:
        execute(invert, [[1], [0], [2]])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def invert(value: int) -> float:
    return 1 / value


def test_threads_that_nobody_waits_for() -> None:
    from horovod.runner.util.threads import execute_function_multithreaded as execute

    go, gone = threading.Event(), threading.Semaphore(0)

    def work(_: int) -> None:
        go.wait(LIMIT_S)
        gone.release()

    assert execute(work, [[1], [2]], block_until_all_done=False) is None
    go.set()
    assert all(gone.acquire(timeout=LIMIT_S) for _ in range(2))


def test_in_thread() -> None:
    from horovod.runner.util.threads import in_thread

    seen: list[object] = []
    thread = in_thread(seen.append, (1,), name="of-test", daemon=False)
    thread.join(LIMIT_S)
    assert (seen, thread.name, thread.daemon) == ([1], "of-test", False)
    assert in_thread(seen.append, (2,)).daemon
    quiet = in_thread(invert, (0,), silent=True)
    quiet.join(LIMIT_S)
    assert not quiet.is_alive()
    with pytest.raises(ValueError, match="args must be a tuple"):
        in_thread(seen.append, [1])


def test_on_event() -> None:
    from horovod.runner.util.threads import on_event

    seen: list[object] = []
    event, stop = threading.Event(), threading.Event()
    waiting = [on_event(event, seen.append, (1,)), on_event(event, seen.append, (2,), stop, 0.01, daemon=False)]
    assert all(thread.is_alive() for thread in waiting)
    event.set()
    for thread in waiting:
        thread.join(LIMIT_S)
    assert sorted(seen) == [1, 2]
    stopped = on_event(threading.Event(), seen.append, (3,), stop, 0.01)
    stop.set()
    stopped.join(LIMIT_S)
    assert not stopped.is_alive()
    assert sorted(seen) == [1, 2]
    for wrong in ((None, print), (event, print, [1]), (event, print, (), None, 1.0, False)):
        with pytest.raises(ValueError, match="must"):
            on_event(*wrong)
