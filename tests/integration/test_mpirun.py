"""Start by the mpirun that belongs to this interpreter's mpi4py; communicators; and mpi4py in workers of kvhvdrun."""

import pytest

from kvstore_hvd.horovod.variables import Ranks, of_worker
from support.launchers import mpirun

OWN = mpirun()
pytestmark = pytest.mark.skipif(OWN is None, reason="no mpirun and mpi4py beside this interpreter")

DISCOVER = """
import dataclasses
from kvstore_hvd.world.discover import discover
from kvstore_hvd.world.meeting import share_segment
world = discover()
told = dataclasses.asdict(world.topology)
"""

FAILURE = """
from kvstore_hvd.world.discover import discover
from kvstore_hvd.errors import KVHvdError
try:
    discover()
except KVHvdError as error:
    report(kind=type(error).__name__, text=str(error))
"""


def test_topology_and_shared_memory(run):
    """What kvhvdrun has set does not count, as where a worker of kvhvdrun starts mpirun."""
    program = """
fds = [share_segment(w, lambda told: os.memfd_create('x')) for w in (world, world.next_generation())]
inodes = [os.fstat(fd).st_ino for fd in fds]
report(rank=told.pop('rank'), job=world.job, secret=world.secret.hex(), inodes=inodes, **told)
"""
    reports = run("-np 4", DISCOVER + program, launcher=OWN, **of_worker("localhost", Ranks(5, 7, 5, 7))).reports()
    assert [r["rank"] for r in reports] == [r["local_rank"] for r in reports] == list(range(4))
    for report in reports:
        assert (report["size"], report["local_size"], report["source"]) == (4, 4, "mpi")
        assert (report["cross_rank"], report["cross_size"], report["generation"]) == (0, 1, 0)
    assert len({(r["job"], r["secret"], tuple(r["inodes"])) for r in reports}) == 1
    assert len(set(reports[0]["inodes"])) == 2


def test_one_rank_does_not_load_mpi_unless_the_program_has(run):
    program = DISCOVER + "report(size=world.topology.size, source=told['source'], mpi='mpi4py.MPI' in sys.modules)"
    (report,) = run("-np 1", program, launcher=OWN).reports()
    assert report == {"size": 1, "source": "single", "mpi": False}
    # Without an mpirun nobody removes the file that Open MPI makes for other processes; one alone has no use for it.
    variables = {**OWN.environment, "OMPI_MCA_btl": "self"} if OWN else {}
    (alone,) = run("", "from mpi4py import MPI\n" + program, launcher=["env"], **variables).reports()
    assert (alone["size"], alone["source"]) == (1, "mpi")


def test_ranks_that_never_come_are_named(run):
    """By all others, after the time to start; then nobody waits for MPI to end."""
    program = """
if int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']) % 2:
    from mpi4py import MPI
    time.sleep(300)
"""
    failure = FAILURE.replace("discover()", "discover([3, 2, 0])")
    reports = run("-np 4", program + failure, launcher=OWN, code=None, KVHVD_START_TIMEOUT="1").reports()
    assert {r["kind"] for r in reports} == {"LaunchError"}
    assert len(reports) == 2
    assert {r["text"].splitlines()[0].partition("] ")[2] for r in reports} == {"rank 3 did not arrive within 1 s."}


ENDS = {
    "sys.exit(3)": 3,
    "sys.exit('no')": 1,
    "exit(3)": 3,
    "raise SystemExit(3)": 3,
    "raise SystemExit": 0,
    "raise SystemExit('no')": 1,
    "pass": 0,
    "1 / 0": 1,
}


LATER = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; comm = MPI.COMM_WORLD"


@pytest.mark.parametrize("starts", ["", "from mpi4py import MPI", LATER])
def test_forked_children_do_not_end_mpi(run, starts):
    """They end with their own codes, and their parents go on. Who has initialised MPI ends it."""
    # Where the program has, by mpi4py, the exit code of `raise SystemExit` is not known.
    ends = {how: code for how, code in ENDS.items() if "SystemExit" not in how or starts in ("", LATER)}
    program = f"comm = None\n{starts}\nends = {list(ends)}"
    program += """
import numpy as np
import kvstore_hvd
kvstore_hvd.init(comm)
total = lambda: float(kvstore_hvd.allreduce(np.ones(1), 'total')[0])
total()
codes = []
for how in ends:
    child = os.fork()
    if not child:
        exec(how)
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
report(codes=codes, total=total())
"""
    for one in run("-np 2", program, launcher=OWN).reports():
        assert (one["codes"], one["total"]) == (list(ends.values()), 2.0)


COMMUNICATORS = """
import numpy as np
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import numpy_ops
from kvstore_hvd.mxnet.process_sets import get_process_set_ids_and_ranks
from mpi4py import MPI
world = MPI.COMM_WORLD
def total():
    return float(numpy_ops.allreduce(np.ones(2) * (world.rank + 1), 'total', op='sum')[0])
def attempt(**more):
    try:
        hvd.init(**more)
    except Exception as error:
        return f'{type(error).__name__} {error}'
def leave():
    hvd.shutdown()
    world.Barrier()
mine = hvd.ProcessSet(world.Split(world.rank % 2, -world.rank))
some = hvd.ProcessSet(world.Split(0 if world.rank % 2 == 0 else MPI.UNDEFINED, world.rank))
before = some.ranks
left_out = hvd.ProcessSet(world.Split(MPI.UNDEFINED if world.rank == 3 else world.rank % 2, world.rank))
told = dict(job=world.rank, null=attempt(comm=MPI.COMM_NULL), error=attempt(process_sets=[left_out]))
hvd.init(world, process_sets=[mine])
told.update(number=mine.process_set_id, ranks=mine.ranks, sets=get_process_set_ids_and_ranks(), inside=mine.rank(),
            text=repr(mine))
leave()
hvd.init(process_sets=[some])
told.update(some=[before, some.ranks, some.included()], all=total())
leave()
hvd.init(comm=world.Split(world.rank % 2, -world.rank))
told.update(half=(hvd.rank(), hvd.size(), total()),
            threads=hvd.mpi_threads_supported() is (MPI.Query_thread() == MPI.THREAD_MULTIPLE) and hvd.mpi_enabled(),
            outside=attempt(process_sets=[hvd.ProcessSet(world.Split(world.rank // 2, world.rank))]))
leave()
hvd.init(comm=[3, 0])
report(**told, listed=(hvd.rank(), hvd.size(), total()))
"""


def test_worlds_and_process_sets_of_communicators(run):
    """Each worker names its own part; all parts are sets, in the order of their ranks, and some may be in none. A world
    has the communicator's order, and others are not needed. A list names ranks; who is not named is alone."""
    reports = run("-np 4", COMMUNICATORS, launcher=OWN).reports()
    for place, report in enumerate(reports):
        half = [place % 2, place % 2 + 2]
        assert report["error"].startswith("MismatchError")
        assert "no ranks: rank 3" in report["error"]
        assert (report["number"], report["ranks"], report["inside"]) == (1 + place % 2, half, place // 2)
        assert report["sets"] == {"0": [0, 1, 2, 3], "1": [0, 2], "2": [1, 3]}
        assert report["text"] == f"ProcessSet(process_set_id={1 + place % 2}, ranks={half})"
        assert (report["some"], report["all"]) == ([None, [0, 2], place % 2 == 0], 10)
        assert report["threads"]
        assert "processes that are none of the 2 workers" in report["outside"]
        assert report["null"].startswith("InvalidRequestError comm must be an intracommunicator.")
    assert [report["half"] for report in reports] == [[1, 2, 4], [1, 2, 6], [0, 2, 4], [0, 2, 6]]
    assert [report["listed"] for report in reports] == [[1, 2, 5], [0, 1, 2], [0, 1, 3], [0, 2, 5]]


def test_mpi4py_is_missing_or_cannot_load_mpi(run, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no such module')")
    missing = f"sys.path.insert(0, {str(tmp_path)!r})\n"
    for before, variables, texts in (
        (missing, {}, ("mpi4py is not installed", "-m pip install mpi4py")),
        ("sys.path.pop(0)\n", {"MPI4PY_LIBMPI": "/no/such/libmpi.so"}, ("mpi4py cannot load an MPI library",)),
    ):
        reports = run("-np 2", before + FAILURE, launcher=OWN, **variables).reports()
        assert [r["kind"] for r in reports] == ["LaunchError"] * 2
        assert all(text in reports[0]["text"] for text in texts)


@pytest.mark.parametrize("options", ["-np 2", "-np 1", pytest.param("--min-np 2", marks=pytest.mark.slow)])
def test_mpi4py_that_knows_nothing_of_the_other_workers_is_told_once(run, options):
    """With both sizes and what to do; nothing is said where there is no other worker, or MPI is not used."""
    program = """
import mpi4py, kvstore_hvd
mpi4py.rc.initialize = {}
kvstore_hvd.init()
assert 'mpi4py.MPI' not in sys.modules
kvstore_hvd.reset()
from mpi4py import MPI
kvstore_hvd.reset()
kvstore_hvd.reset()
"""
    assert OWN is not None
    for initialize, text in (True, "MPI.COMM_WORLD has size 1"), (False, "MPI.Is_initialized() is False"):
        err = run(options, program.format(initialize), **OWN.environment).err
        assert err.count(f"{text} here, while kvhvdrun has started 2 workers") == ("2" in options), err
        assert err.count("mpirun -np 2") == ("2" in options), err


@pytest.mark.parametrize("ends", ["raise ValueError('mine')", "kvstore_hvd.barrier()"])
def test_mpi_does_not_wait_for_a_lost_worker(run, ends):
    """MPI_Finalize on one host would wait for rank 1, which comes to no end."""
    program = f"import kvstore_hvd\nkvstore_hvd.init()\nif rank == 1: time.sleep(1000)\n{ends}"
    job = run("-np 2", program, launcher=OWN, code=None, KVHVD_TIMEOUT="1")
    assert "MPI has not ended within 5 s of a lost world" in job.err
    assert ("ValueError: mine" if "mine" in ends else "waited 1 s for rank 1") in job.err
