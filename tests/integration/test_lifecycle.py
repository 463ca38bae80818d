"""Worlds that are left and met again, processes that are not part of them, and what happens at exit."""

import os

import pytest

from kvstore_hvd.base.cores import describe, suffice

# Two operations fail; the error of one is read.
CAUGHT = """
import mxnet as mx
import kvstore_hvd
store = mx.kv.create('horovod')
x, y = mx.nd.ones((2 + rank,)), mx.nd.ones((2 + rank,))
store.pushpull(['read', 'unread'], [x, y])
try: x.asnumpy()
except kvstore_hvd.MismatchError: print('caught')
"""


@pytest.mark.alike
def test_workers_meet_again_however_often_some_of_them_failed_to(run):
    """A reset that timed out on some workers does not keep them from meeting."""
    program = """
import numpy as np
import kvstore_hvd
from kvstore_hvd import config
size = kvstore_hvd.init().size
os.environ['KVHVD_START_TIMEOUT'] = '1'  # not of the start itself, which takes its time on a busy machine
config.reload()
while rank == 0 and not all(os.path.exists(f'failed{other}') for other in range(1, size)):
    time.sleep(0.02)
for failures in range(100):
    try:
        generation = kvstore_hvd.reset().generation
        break
    except kvstore_hvd.LaunchError:
        open(f'failed{rank}', 'w')
total = float(kvstore_hvd.allreduce(np.ones(1), 'after')[0])
report(rank=rank, generation=generation, total=total, failed=bool(failures))
"""
    reports = run("-np 3", program).reports()
    assert [(told["generation"], told["total"]) for told in reports] == [(1, 3)] * 3
    assert all(told["failed"] for told in reports[1:])


def test_a_worker_that_got_an_error_ends_with_its_own_code(run):
    """It has caught one error of two; the other one, which may follow from the first, is logged."""
    job = run("-np 2", CAUGHT)
    assert job.out.count("caught") == 2
    assert "its result was never read" in job.err


def test_a_worker_whose_last_operation_failed_does_not_end_in_good_order(run):
    """The error that nobody has read is logged at exit, and the exit code tells of it unless the program's own does."""
    later = """
try: y.asnumpy()
except kvstore_hvd.MismatchError: store.pushpull('later', mx.nd.ones((2 + rank,)))
print('submitted')  # not flushed: that is for the end of the process
if rank == 0: sys.exit(7)
"""
    job = run("-np 2 -v", CAUGHT + later, code=None, KVHVD_SURVIVOR_TIME="30")
    for rank, code in ((0, 7), (1, 1)):
        assert "submitted" in job.of(rank)
        assert "its result was never read" in job.of(rank)
        assert f"worker {rank} (localhost:{rank}) exited with code {code}" in job.err


# Both workers end long before MXNet has computed what they submit.
QUEUED = """
import mxnet as mx
class Slow(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        time.sleep(1)
        self.assign(out_data[0], req[0], in_data[0])
@mx.operator.register('slow')
class Property(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Slow()
store = mx.kv.create('horovod')
x = mx.nd.ones((3,))
for step in range(5):
    x = mx.nd.Custom(x, op_type='slow')
    store.pushpull(f'w{step}', x, out=x)
say('queued\\n')
"""


def test_the_limit_at_exit_begins_anew_with_each_operation(run):
    """A program that reads no results has minutes of work left; the world is lost only when nothing moves any more."""
    assert run("-np 2", QUEUED, KVHVD_EXIT_TIMEOUT="3").out.count("queued") == 2


@pytest.mark.slow
def test_a_worker_whose_operations_never_complete_speaks_for_its_present_rank(run):
    """Within the limit that counts when it ends, in a world that is not its first."""
    program = """
import mxnet as mx
import kvstore_hvd.mxnet as hvd
hvd.init()
hvd.shutdown()
os.environ['KVHVD_EXIT_TIMEOUT'] = '2'
hvd.init(comm=[1, 2])
store = mx.kv.create('horovod')
if hvd.size() == 2:
    store.barrier()
    if hvd.rank() == 0: store.pushpull('alone', mx.nd.ones((3,)))
    else:
        try: store.pushpull('other', mx.nd.ones((3,))); mx.nd.waitall()
        except Exception as error: say(f'heard: {error}\\n')
"""
    job = run("-np 3", program, code=None)
    assert "rank 0 left: none of its operations completed within 2 s" in job.of(2), job.describe()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_mxnets_list_of_errors_stays_whole(run):
    """Hundreds of operations fail at once, on threads of MXNet that extend that list: native/mxnet/errors.hpp."""
    program = """
import mxnet as mx
import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import HorovodInternalError
hvd.init()
for number in range(12):
    assert hvd.allreduce(mx.nd.ones(2), name='before', op=hvd.Sum).asnumpy().tolist() == [2, 2]
    if rank == 0:  # operations that wait for one computation; while it runs, rank 1 leaves the world
        computed = weights = mx.nd.ones((1000, 1000))
        for _ in range(10):
            computed = mx.nd.dot(computed, weights) / 1000
        rows = computed.reshape((-1,))[:4000].reshape((1000, 4))
        parts = enumerate(mx.nd.split(rows, 1000, axis=0, squeeze_axis=True))
        sums = [hvd.allreduce(part, name=f'part {place}') for place, part in parts]
        open(f'lost{number}', 'w')
        try:
            sums[-1].wait_to_read()
        except HorovodInternalError:
            pass
        else:
            raise AssertionError('nobody was told')
    else:
        wait_for(f'lost{number}')
    kvstore_hvd.reset()
say('all rounds\\n')
"""
    assert run("-np 2", program, MXNET_CPU_PRIORITY_NTHREADS="8").out.count("all rounds") == 2


@pytest.mark.alike
def test_who_waits_spins_only_if_there_is_a_core_for_each(run):
    """Those that the workers may use count, not those of the machine; pinned to one each they have one each."""
    first, *others = sorted(os.sched_getaffinity(0))
    program = """
import kvstore_hvd
os.sched_setaffinity(0, {CORES[rank]})
kvstore_hvd.init()
kvstore_hvd.barrier()
"""
    for cores in ([first, first], [first, *others[:1]])[: 1 + bool(others)]:
        err = run("-np 2", f"CORES = {cores}" + program, KVHVD_LOG_LEVEL="info").err
        # A control group may allow less than that, too.
        does_not_spin = cores[0] == cores[1] or not suffice([describe()] * 2)
        assert err.count("a worker that waits does not spin") == 2 * does_not_spin, err
