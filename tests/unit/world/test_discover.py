"""Which world a process finds itself in, and what it refuses. Real MPIs are tested in tests/integration."""

import re
import sys
from unittest.mock import Mock

import pytest

from kvstore_hvd.config import environment
from kvstore_hvd.errors import InvalidRequestError, LaunchError
from kvstore_hvd.horovod import variables as horovod_variables
from kvstore_hvd.world import discover as discover_module
from kvstore_hvd.world import topology as topology_module
from kvstore_hvd.world.topology import Host, Place

PREFIXES = ("KVHVD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "HOROVOD_")
SRUN = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
LAUNCHED = {"KVHVD_RANK": "1", "KVHVD_SIZE": "3", "KVHVD_JOB": "job", "KVHVD_SECRET": "5a" * 32}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Start without any launcher's variables or MPI."""
    for name in environment():
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)


@pytest.fixture
def discover(setting):
    def discovered(environ, comm=None):
        setting(**environ)
        return discover_module.discover(comm)

    return discovered


def hosts(*names):
    return [Host(name.rstrip("'"), name) for name in names]


def test_containers_are_hosts_of_their_own(monkeypatch):
    """They share the boot id of their machine, and not always what workers need of each other."""
    here, real = Host.here().identity, topology_module._namespace
    for kind in ("net", "pid", "time"):
        other = lambda asked, kind=kind: "other" if asked == kind else real(asked)  # noqa: E731
        monkeypatch.setattr(topology_module, "_namespace", other)
        assert Host.here().identity != here


def test_places_on_hosts_of_unequal_size():
    all_hosts = hosts("a", "b", "a", "b", "b")
    seen = [Place.of(rank, all_hosts, source="mpi") for rank in range(5)]
    assert [(t.rank, t.size) for t in seen] == [(rank, 5) for rank in range(5)]
    assert [t.local_rank for t in seen] == [0, 0, 1, 1, 2]
    assert [t.local_size for t in seen] == [2, 3, 2, 3, 3]
    assert [t.cross_rank for t in seen] == [0, 1, 0, 1, 0]
    assert [t.cross_size for t in seen] == [2, 2, 2, 2, 1]
    assert (seen[3].local_ranks, seen[3].host, seen[3].host_count) == ([1, 3, 4], "b", 2)
    topology = Place.of(0, hosts("a", "a'", "a", "a''"), source="mpi")  # hosts of one name
    assert (topology.hosts, topology.local_ranks) == (("a", "a#2", "a", "a#3"), [0, 2])
    slots = Place.of(4, all_hosts, source="launcher", local_rank_of=(1, 2, 0, 0, 1))
    assert (slots.local_rank, slots.cross_rank, slots.cross_size, slots.local_ranks) == (1, 1, 2, [3, 4, 1])


PS = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_NUM_WORKER": "2"}
TORCH = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**PS, "DMLC_NUM_WORKER": "1"},
        {**PS, "DMLC_ROLE": "server"},
        {"WORLD_SIZE": "3", "RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
        # srun -n1, with --mpi=pmix, pmi2 and none, in an allocation for more.
        {**SRUN, "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
        {**SRUN, "PMI_RANK": "0", "PMI_SIZE": "1"},
        SRUN,
    ],
)
def test_one_rank_needs_no_mpi(discover, monkeypatch, environ):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # importing it would fail
    topology = discover(environ).topology
    assert (topology.rank, topology.size, topology.source) == (0, 1, "single")


@pytest.mark.parametrize(
    ("environ", "who", "workers"),
    [
        ({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "0"}, "Horovod's launcher", 4),
        (PS, "launch.py", 2),
        ({**PS, "DMLC_NUM_WORKER": "1", "BYTEPS_LOCAL_SIZE": "8"}, "bpslaunch", 8),
        (TORCH, "torchrun", 3),
    ],
)
def test_launchers_whose_workers_cannot_be_found_are_refused(discover, environ, who, workers):
    with pytest.raises(LaunchError, match=rf"{who}.* started {workers} workers(.|\n)*Fix: .*kvhvdrun -np {workers} "):
        discover(environ)
    assert discover({**LAUNCHED, **environ}).topology.source == "launcher"


def test_what_kvhvdrun_has_set_is_no_horovodrun(discover):
    """Whatever a worker starts, with all of its variables, with kvhvdrun's taken away, or only those of its rank."""

    def horovods(rank, size):
        return horovod_variables.of_worker("localhost", horovod_variables.Ranks(rank, size, rank, size))

    assert discover(horovods(1, 4)).topology.source == "single"
    with pytest.raises(LaunchError, match="Horovod's launcher started 4 workers"):
        discover({**horovods(1, 4), "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"})
    assert discover({"KVHVD_JOB": "job", "HOROVOD_SIZE": "4"}).topology.source == "single"
    for others in (horovods(1, 3), horovods(5, 7)):  # another one's do not count
        topology = discover({**LAUNCHED, **others}).topology
        assert (topology.rank, topology.size, topology.source) == (1, 3, "launcher")


def test_kvhvdruns_variables_make_the_world(discover, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    step = {**SRUN, "SLURM_STEP_NUM_TASKS": "3"}  # which has started kvhvdrun
    world = discover({**LAUNCHED, **step, "KVHVD_GENERATION": "4"})
    topology = world.topology
    assert (topology.rank, topology.size, topology.local_rank, topology.local_size) == (1, 3, 1, 3)
    assert (topology.generation, topology.source) == (4, "launcher")
    assert (world.job, world.secret) == ("job", b"\x5a" * 32)
    assert world.next_generation().topology.generation == 5


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({"KVHVD_SECRET": None}, "incomplete: KVHVD_SECRET not set"),
        ({"KVHVD_RANK": None}, "incomplete: KVHVD_RANK not set"),
        ({"KVHVD_RANK": "3"}, "KVHVD_RANK=3 is not below KVHVD_SIZE=3"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "by kvhvdrun and by mpirun"),
    ],
)
def test_variables_that_cannot_be(discover, changed, fact):
    with pytest.raises(LaunchError, match=fact):
        discover({name: value for name, value in {**LAUNCHED, **changed}.items() if value is not None})


def test_ranks_that_are_given(discover):
    """All of them are the whole world; some are a world of their own, in the order given; others are alone."""
    with pytest.raises(InvalidRequestError, match="distinct ranks from 0 to 0"):
        discover({}, [0, 1])
    for ranks, place in (([], (1, 3)), (range(3), (1, 3)), ([2, 1], (1, 2)), ([0, 2], (0, 1))):
        world = discover(LAUNCHED, ranks)
        assert (world.topology.rank, world.topology.size) == place
        assert (world.job == "job") == (place[1] == 3)
    for wrong in ([0, 3], [1, 1], [-1], "01", 2):
        with pytest.raises(InvalidRequestError):
            discover(LAUNCHED, wrong)


def fake_mpi(monkeypatch, vendor="Open MPI", version=(5, 0, 11)):
    answers = {"get_vendor.return_value": (vendor, version), "Is_finalized.return_value": False}
    mpi = Mock(COMM_WORLD=Mock(size=1), Comm=Mock, **answers)
    monkeypatch.setitem(sys.modules, "mpi4py", Mock(MPI=mpi))
    monkeypatch.setattr(discover_module, "finalise_mpi_at_exit", lambda mpi: None)  # this process has no MPI
    return mpi


OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_VERSION": "5.0.11"}


def test_a_world_of_one_under_a_launcher_of_more(discover, monkeypatch):
    fake_mpi(monkeypatch)
    with pytest.raises(LaunchError) as caught:
        discover(OPEN_MPI)
    assert str(caught.value).startswith(
        "MPI world size is 1, but the launcher asked for 4.\n"
        "  mpirun: Open MPI 5.0.11; mpi4py loaded: Open MPI 5.0.11\n"
    )
    fix = r"\n  Fix: run `\S*mpirun -n 4 python train\.py` with the mpirun of the MPI that mpi4py loads\."
    assert re.search(fix, str(caught.value))
    for version in ((4, 1, 4), (5, 0, 11)):  # an old launcher starts both
        fake_mpi(monkeypatch, version=version)
        with pytest.raises(LaunchError, match="MPI world size is 1"):
            discover({"OMPI_VERSION": "", "OMPI_MCA_orte_hnp_uri": "1"})


def test_a_communicator_of_one_under_kvhvdrun(discover, monkeypatch):
    fake_mpi(monkeypatch)
    with pytest.raises(LaunchError, match=r"given to init\(\) has size 1"):
        discover(LAUNCHED, Mock(size=1, **{"Is_inter.return_value": False}))


@pytest.mark.parametrize(
    ("environ", "vendor", "version"),
    [
        (OPEN_MPI, "MPICH", (5, 0, 2)),
        (OPEN_MPI, "Open MPI", (4, 1, 4)),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "Open MPI", (5, 0, 11)),
    ],
)
def test_an_mpi_that_cannot_serve_is_not_started(discover, monkeypatch, environ, vendor, version):
    mpi = fake_mpi(monkeypatch, vendor, version)
    with pytest.raises(LaunchError, match="4 workers were started by the mpirun of another MPI") as caught:
        discover(environ)
    assert f"mpi4py loaded: {vendor} {'.'.join(map(str, version))}" in str(caught.value)
    mpi.configure_mock(**{"get_vendor.return_value": ("Intel MPI", (2021,)), "Is_finalized.return_value": True})
    with pytest.raises(LaunchError, match="MPI was finalised before init" if "PMI_SIZE" in environ else "another MPI"):
        discover(environ)
    mpi.Init_thread.assert_not_called()


def test_an_mpirun_that_survives_deaths_is_refused(discover):
    """MPI would wait for the dead for ever."""
    variables = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_mpi_ft_enable": "1"}
    with pytest.raises(LaunchError, match=r"`--with-ft ulfm`.*\n  Fix: leave it out; `kvhvdrun --min-np"):
        discover(variables)
