"""Jobs of mpirun over several hosts, which are namespaces of this machine: sums, lost ranks and lost hosts."""

import re

import pytest

from hosts.faults import SILENCE_S, cause
from hosts.network import Network, unavailable
from kvstore_hvd.launch import explain
from support.launchers import mpirun

mpi = mpirun()
pytestmark = [
    pytest.mark.skipif(mpi is None, reason="no mpirun beside this Python"),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

SUMS = """
import numpy as np
import kvstore_hvd
mine = kvstore_hvd.init()
def values(rank, step):
    return np.random.default_rng([rank, step]).standard_normal(10 ** (step % 7)).astype(np.float32)
for step in range(21):
    total = kvstore_hvd.allreduce(values(mine.rank, step), 'sum')
    np.testing.assert_allclose(total, sum(values(rank, step) for rank in range(mine.size)), rtol=1e-4, atol=1e-5)
    assert (kvstore_hvd.allreduce(total, 'least', op='min') == total).all(), 'ranks have other bits'
    got = kvstore_hvd.broadcast(values(mine.rank, step), step % mine.size, 'root')
    assert (got == values(step % mine.size, step)).all()
print([mine.rank, mine.local_rank, mine.local_size, mine.cross_rank, mine.cross_size])
"""


@pytest.fixture
def network(tmp_path, request):
    with Network(tmp_path, getattr(request, "param", 2)) as network:
        yield network


@pytest.mark.parametrize("network", [3], indirect=True)
def test_places_and_sums(network):
    """Small and large sums, equal on all ranks, bit by bit."""
    (network.folder / "sums.py").write_text(SUMS)
    assert network.mpirun(mpi, [2, 1, 1], "sums.py").wait(60) == 0, (network.folder / "err").read_text()
    told = sorted(re.findall(r"\[\d, \d, \d, \d, \d\]", (network.folder / "out").read_text()))
    assert told == ["[0, 0, 2, 0, 3]", "[1, 1, 2, 0, 1]", "[2, 0, 1, 1, 3]", "[3, 0, 1, 2, 3]"]


NODE1 = r"host node1 \(ranks 2-3\) has not been heard of for 3 s by host node0 \(ranks 0-1\)"


@pytest.mark.parametrize(
    ("event", "texts"),
    [
        ("a rank is killed", {2: r"rank 3 \(node1, pid \d+\) died \(SIGKILL\)"}),
        ("a link's process is stopped", {0: NODE1, 1: NODE1, 3: r"the link of this host.* rank 2 .* is stopped"}),
        ("a host is cut off", {0: NODE1, 1: NODE1, 2: "host node0", 3: "host node0"}),
    ],
)
def test_lost(network, event, texts):
    """Whoever lives is told who is lost, and ends; mpirun may end them first."""
    outcome = cause(network, mpi, event)
    may_say_nothing = event == "a rank is killed"
    for rank, text in texts.items():
        if rank in outcome.texts or not may_say_nothing:
            assert re.search(text, outcome.texts[rank]), outcome.texts
            assert outcome.seconds[rank] < SILENCE_S + 10
    assert not [each for each in outcome.left if "program.py" in each or "mpich_shm" in each]
    if event == "a host is cut off":  # mpirun may end ranks first after the other events
        told = explain._explain_files([str(network.folder / "lost.host0.json")])
        assert re.search(rf"4 workers on node0, node1 \(told by 1 of 2 hosts\);.*\nPeerLostError: {NODE1}", told), told
        assert re.search(r"rank 2 \(node1, pid \d+\) is on a host that has told nothing", told), told


STAYS = """
import time
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
kvstore_hvd.allreduce(np.ones(3), 'x')
if kvstore_hvd.topology().rank == 0:
    time.sleep(5)
    print('evaluated')
"""


def test_one_rank_has_more_to_do(network):
    """The others end in good order long before it, and are not counted as lost: the job ends with code 0."""
    (network.folder / "stays.py").write_text(STAYS)
    job = network.mpirun(mpi, [2, 2], "stays.py", KVHVD_EXIT_TIMEOUT="1", KVHVD_LINK_TIMEOUT="2")
    code, said = job.wait(60), (network.folder / "err").read_text()
    assert (code, "evaluated" in (network.folder / "out").read_text()) == (0, True), said
    assert "warning" not in said
