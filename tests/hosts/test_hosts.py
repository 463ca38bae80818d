"""Jobs over several hosts, which are namespaces of this machine: trainings, lost ranks and lost hosts."""

import re

import numpy as np
import pytest

from hosts.faults import SILENCE_S, cause
from hosts.network import Network, unavailable
from support.launchers import mpirun

mpi = mpirun()
pytestmark = [
    pytest.mark.skipif(mpi is None, reason="no mpirun beside this Python"),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

TRAINING = """
import sys
import numpy as np
import kvstore_hvd.mxnet as hvd
import mxnet as mx
from support.gluon import array, backward, mlp, samples, weights
if len(sys.argv) > 1:
    rank, size, store = 0, 1, None
else:
    hvd.init()
    rank, size, store = hvd.rank(), hvd.size(), mx.kv.create('horovod')
net = mlp(seed=rank)
if size == 1:
    net = mlp(seed=0)
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {'learning_rate': 0.1, 'momentum': 0.9}, kvstore=store)
if store is not None:
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
for step in range(20):
    data, label = samples(24, seed=step)
    mine = slice(24 * rank // size, 24 * (rank + 1) // size)
    backward(net, [(array(data[mine]), array(label[mine]))])
    trainer.step(24)
np.savez(f'trained{rank if size > 1 else "-alone"}.npz', *weights(net))
if size > 1:
    hosts = hvd.allgather_object((hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()))
    if rank == 0: print(hosts)
"""


@pytest.fixture
def network(tmp_path, request):
    """Two hosts, or as many as the test asks for."""
    with Network(tmp_path, getattr(request, "param", 2)) as network:
        yield network


@pytest.mark.parametrize(("network", "ranks"), [(2, [2, 2]), (3, [2, 1, 1])], indirect=["network"])
def test_training_equals_one_process(network, ranks):
    """The weights are equal on all ranks, bit by bit, and those of one process but for rounding."""
    (network.folder / "train.py").write_text(TRAINING)
    assert network.mpirun(mpi, [1], "train.py", "alone").wait(60) == 0, (network.folder / "err").read_text()
    assert network.mpirun(mpi, ranks, "train.py").wait(60) == 0, (network.folder / "err").read_text()
    size = sum(ranks)
    trained = [list(np.load(network.folder / f"trained{rank}.npz").values()) for rank in range(size)]
    alone = list(np.load(network.folder / "trained-alone.npz").values())
    for rank in range(1, size):
        assert all(one.tobytes() == other.tobytes() for one, other in zip(trained[0], trained[rank]))
    for one, other in zip(trained[0], alone):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    places = [(local, count, host) for host, count in enumerate(ranks) for local in range(count)]
    told = re.findall(r"\((\d+), (\d+), (\d+), \d+\)", (network.folder / "out").read_text())
    assert [tuple(map(int, each)) for each in told] == places


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
    of_workers = [each for each in outcome.left if "program.py" in each or "mpich_shm" in each]
    assert not of_workers


STAYS = """
import time
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
kvstore_hvd.allreduce(np.ones(3), 'x')
if kvstore_hvd.topology().rank == 0:
    time.sleep(9)
    print('evaluated')
"""


def test_one_rank_has_more_to_do(network):
    """The others end in good order long before it, and are not counted as lost: the job ends with code 0."""
    (network.folder / "stays.py").write_text(STAYS)
    job = network.mpirun(mpi, [2, 2], "stays.py", KVHVD_EXIT_TIMEOUT="1", KVHVD_LINK_TIMEOUT="2")
    code, said = job.wait(60), (network.folder / "err").read_text()
    assert (code, "evaluated" in (network.folder / "out").read_text()) == (0, True), said
    assert "warning" not in said
