import importlib
import io
import logging
import os
import re
import sys

import pytest

from kvstore_hvd import log
from kvstore_hvd.config import Config, MPILaunch
from kvstore_hvd.errors import ConfigError
from kvstore_hvd.horovod import variables as horovod_variables

# The package's attribute of this name may be the function.
module = importlib.import_module("kvstore_hvd.config")
REPLACED = {"KVHVD_DAEMON": "x", "KVHVD_WORKER": "0"}


@pytest.fixture(autouse=True)
def _restore():
    yield
    with pytest.MonkeyPatch.context() as patch:
        for name in list(module.environment()):
            if name.startswith("HOROVOD_"):
                patch.delenv(name)
        module.reload()


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("KVHVD_LOG_LEVEL", "TRACE", "log_level", "debug"),
        ("HOROVOD_LOG_LEVEL", "fatal", "log_level", "critical"),
        ("KVHVD_SIMD", " AVX2 ", "simd", "avx2"),
        ("KVHVD_STALL_CHECK_TIME_S", "0", "stall_check_s", 0.0),
        ("KVHVD_NUMPY_SHIM", "off", "numpy_shim", False),
        ("HOROVOD_THREAD_AFFINITY", "0, 3,1", "thread_affinity", (0, 3, 1)),
        ("KVHVD_SECRET", "ab" * 16, "secret", b"\xab" * 16),
        ("KVHVD_TIMEOUT", "", "timeout_s", 600.0),
        ("KVHVD_METRICS_FILE", "some/file", "metrics_file", os.path.abspath("some/file")),
        ("KVHVD_FAILURE_FILE", "some/file", "failure_file", os.path.abspath("some/file")),
        ("KVHVD_FAILURE_FILE", "0", "failure_file", ""),
    ],
)
def test_a_variable_sets_its_field(variable, text, field, value):
    assert getattr(Config.from_environ({variable: text}), field) == value
    both = {"KVHVD_LOG_LEVEL": "info", "HOROVOD_LOG_LEVEL": "error"}  # our name comes before Horovod's
    assert Config.from_environ(both).log_level == "info"


@pytest.mark.parametrize(
    ("variables", "waits"),
    [({}, (True, True)), ({"KVHVD_EXIT_TIMEOUT": "30"}, (False, True)), ({"KVHVD_TIMEOUT": "600"}, (True, False)),
     (REPLACED, (False, False)), ({**REPLACED, "KVHVD_STALL_SHUTDOWN_TIME_S": "0"}, (False, True)),
     ({**REPLACED, "KVHVD_STALL_SHUTDOWN_TIME_S": "9"}, (False, False))],
)  # fmt: skip
def test_an_exit_waits_for_late_workers_and_operations_for_busy_ones_unless_limited_or_replaced(variables, waits):
    cfg = Config.from_environ(variables)
    assert (cfg.waits_at_exit, cfg.waits_for_busy) == waits


WRONG = """KVHVD_TIMEOUT=0 KVHVD_TIMEOUT=nan KVHVD_SIMD=sse KVHVD_NUMPY_SHIM=maybe HOROVOD_THREAD_AFFINITY=0,-1
    KVHVD_RANK=-1 KVHVD_TEST_HOSTS=x KVHVD_TEST_HOSTS=2, KVHVD_TEST_HOSTS=0/1,2
    KVHVD_TIMEOUT=inf KVHVD_LEASE=1 KVHVD_STALL_CHECK_TIME_S=-1 KVHVD_GPU_STAGING_MIB=1 KVHVD_GPU_STAGING_MIB=4097"""


@pytest.mark.parametrize("given", WRONG.split())
def test_a_value_that_is_not_allowed_raises(given):
    variable, _, text = given.partition("=")
    with pytest.raises(ConfigError, match=f"{variable}: '{text}' is not "):
        Config.from_environ({variable: text})


def test_names():
    with pytest.raises(ConfigError, match=r"KVHVD_TIMOUT does not exist; did you mean KVHVD_TIMEOUT\?"):
        Config.from_environ({"KVHVD_TIMOUT": "3"})
    with pytest.raises(
        ConfigError, match=r"KVHVD_ZZZZZZZZZZZZ does not exist\.\n.*SIMD: 'x' .*\n.*RANK: 'y' .*\n  Fix: "
    ):
        Config.from_environ({"KVHVD_ZZZZZZZZZZZZ": "3", "KVHVD_SIMD": "x", "KVHVD_RANK": "y"})
    for prefix in module.RESERVED_PREFIXES:  # those of the build and the tests are left alone
        assert vars(Config.from_environ({f"{prefix}ANYTHING": "x"})) == vars(Config.from_environ({}))


def test_the_secret_is_never_shown():
    secret = "0123456789abcdef" * 2
    assert secret not in repr(Config.from_environ({"KVHVD_SECRET": secret}))
    for wrong in ("topsecret", "ab" * 15):
        with pytest.raises(ConfigError) as caught:
            Config.from_environ({"KVHVD_SECRET": wrong})
        assert wrong not in str(caught.value)


def test_horovods_other_variables_are_named_once_with_the_reason(monkeypatch, caplog, fresh_log):
    for name, value in {"CYCLE_TIME": "5", "AUTOTUNE_LOG": "x", "MISSPELT": "1", "LOG_LEVEL": "warning"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    with caplog.at_level(logging.WARNING, "kvstore_hvd"):
        module.reload()
        assert not caplog.records  # the launcher and all workers read them; the worker of rank 0 tells
        module.tell_unused()
        module.tell_unused()
    (record,) = caplog.records
    assert record.getMessage().splitlines() == [
        "these variables of Horovod have no effect here:",
        "  HOROVOD_AUTOTUNE_LOG: nothing is tuned while training; benchmarks/tune.py finds sizes for KVHVD_THRESHOLDS",
        "  HOROVOD_CYCLE_TIME: operations are carried out as soon as all workers have submitted them; there are no "
        "cycles",
        "  HOROVOD_MISSPELT: kvstore_hvd does not know it",
    ]
    for name in ("FUSION_THRESHOLD", "NUM_NCCL_STREAMS", "AUTOTUNE_WARMUP_SAMPLES", "SIZE"):
        assert Config.from_environ({f"HOROVOD_{name}": "1"}).unused == (f"HOROVOD_{name}",)
        assert "does not know" not in horovod_variables.reason(f"HOROVOD_{name}")


def test_nobody_is_told_of_what_kvhvdrun_has_set():
    own = horovod_variables.of_worker("localhost", horovod_variables.Ranks(1, 2, 1, 2))
    assert Config.from_environ({**own, "KVHVD_JOB": "j", "HOROVOD_CYCLE_TIME": "5"}).unused == ("HOROVOD_CYCLE_TIME",)
    assert Config.from_environ(own).unused == ()
    assert Config.from_environ({"HOROVOD_CONTROLLER": "gloo"}).unused == ("HOROVOD_CONTROLLER",)
    of_horovodrun = {**own, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "a"}
    assert Config.from_environ(of_horovodrun).unused == tuple(sorted(of_horovodrun))


def test_lines_may_begin_with_the_time(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("HOROVOD_LOG_HIDE_TIME", "0")
    monkeypatch.setattr(log, "_rank_text", "")
    module.reload()
    log.set_rank(1, 2)
    log.logger.warning("now")
    log.set_rank(0, 1)  # one worker has no need of a rank
    monkeypatch.delenv("HOROVOD_LOG_HIDE_TIME")
    module.reload()
    log.logger.warning("then")
    (closed := io.StringIO()).close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", closed)
        log.logger.warning("to nobody")
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    log.logger.warning("to the handlers of the program")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[rank 1/2\] kvstore_hvd warning: now", first)
    assert second == "kvstore_hvd warning: then"


def test_a_level_that_the_program_has_set_stays(monkeypatch):
    """Unless the environment says another one than before."""
    module.reload()
    monkeypatch.setattr(log.logger, "level", logging.ERROR)
    module.reload()
    assert log.logger.level == logging.ERROR
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "debug")
    module.reload()
    assert log.logger.level == logging.DEBUG


OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, ("Slurm", 1, 2, "SLURM_STEP_NUM_TASKS")),
        ({**OMPI, "OMPI_VERSION": "5.0.1", "PMIX_RANK": "1"}, ("Open MPI", 1, 2, "OMPI_COMM_WORLD_SIZE", "5.0.1")),
        ({**OMPI, "OMPI_MCA_orte_hnp_uri": "x"}, ("Open MPI", 1, 2, "OMPI_COMM_WORLD_SIZE", "4 or older")),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, ("MPICH", 0, 3, "PMI_SIZE")),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "3", "PMI_SIZE": "3", "PMI_RANK": "2"}, ("Slurm", 2, 3, "PMI_SIZE")),
        ({"PMIX_RANK": "0"}, ("PMIx", 0, None, "PMIX_RANK")),
    ],
)
def test_mpi_launchers_are_recognised(environ, expected):
    assert Config.from_environ(environ).mpi_launch == (expected and MPILaunch(*expected))
