"""Ranks that come late, or are stopped: who says so, and what; real processes, real signals."""

import os
import re
import signal
import time

import pytest

WAITS = r"rank 0 has waited \d+ s for other workers\."
LATE = r"the other workers have waited \d+ s for rank 1\."

STEPS = """
import numpy as np
import kvstore_hvd
def write_a_long_checkpoint():
    wait_for('go')
for step in range(6):
    if step == 2 and rank == 1:
        write_a_long_checkpoint()
    if step == 4 and rank == 1:
        say(f'stopping {os.getpid()}\\n'); os.kill(os.getpid(), signal.SIGSTOP)
    kvstore_hvd.allreduce(np.ones(3), 'weight')
"""


def test_a_late_rank_is_named_and_says_where_it_is(start):
    """Rank 0 says who waits for whom, rank 1 shows its stack, the other is silent; of a stopped one, rank 0 says so."""
    job = start("-np 3", STEPS, HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    job.until(lambda: re.search(WAITS, job.of(0)) and "time.sleep" in job.of(1), "both reports")
    waiting, late = job.of(0), job.of(1)
    job.go().until_printed("the stall is over")
    text = r"allreduce 'weight': \d+ s, submitted by ranks 0, 2, not by rank 1\n"
    assert re.search(rf"{WAITS}\n +{text} +rank 1 \(.*pid \d+\): see its own report\n", waiting), waiting
    assert re.search(rf"{LATE}\n +It has not submitted 'weight'", late), late
    assert re.search(r"\n +main thread, innermost call last:\n", late), late
    assert "in write_a_long_checkpoint\n" in late
    assert not re.search(LATE, waiting)
    assert not re.search(WAITS, late)
    job.until_printed("continues it")
    (pid,) = re.findall(r"stopping (\d+)", job.out)
    text = rf" +rank 1 \(.*pid {pid}\): its process is stopped; `kill -CONT {pid}` continues it"
    assert re.search(text, job.of(0)), job.describe()
    os.kill(int(pid), signal.SIGCONT)
    job.end()
    assert "waited" not in job.of(2)


# Rank 1 comes late.
SUM = """
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
try:
    if rank == 1: wait_for('go')
    kvstore_hvd.allreduce(np.ones(3), 'x')
except kvstore_hvd.HorovodInternalError as error:
    say(f'caught: {type(error).__name__}: {error}\\n', sys.stderr)
    wait_for('go')
    sys.exit(7)
"""


@pytest.mark.alike
def test_the_shutdown_time_ends_the_world_on_all_ranks(start):
    """Every rank gets an error that names the late one, that one too."""
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    job = start("-np 3", SUM, **limits).until_printed("caught: ", 2).go().end(7)
    for rank in range(3):
        who = "rank 0 " if rank else ""  # the head names the rank itself
        text = rf"{who}waited \d+ s, longer than the stall shutdown time, for rank 1"
        assert re.search(rf"caught: TransportError: \[rank {rank}/3\] .*{text}", job.of(rank)), job.describe()


# The deadline that nobody has set, made short, and what the last rank does instead of waiting for the others in `x`.
DEADLINE = """
import numpy as np
import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import config
config.KNOBS['timeout_s'].default = 2.0
if HOW == 'compute_with_a_sum_under_way': import mxnet as mx
hvd.init(process_sets='dynamic')
last = hvd.size() - 1
much = np.ones(1 << 21)  # takes so long that the deadline is looked at meanwhile
pair = hvd.add_process_set([1, last])
def pair_up():
    hvd.barrier(process_set=pair)
def pair_up_among_signals_and_threads():
    import mxnet as mx
    def read():
        while True:
            (2 * mx.nd.ones(3)).asnumpy(); time.sleep(0.05)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    threading.Thread(target=read, daemon=True).start()
    try: hvd.allreduce(mx.nd.ones(3), name='z', process_set=pair).asnumpy()
    finally: signal.setitimer(signal.ITIMER_REAL, 0)
def pair_up_in_a_thread():
    threading.Thread(target=pair_up, daemon=True).start()
    threading.Event().wait()
def compute():
    say(f'computing {os.getpid()}\\n')
    wait_for('go')
    pair_up()
def compute_with_a_sum_under_way():
    total = hvd.allreduce(mx.nd.ones(3), name='late')
    while not os.path.exists('go'): (2 * mx.nd.ones(3)).asnumpy(); time.sleep(0.005)
    pair_up()
    kvstore_hvd.allreduce(much, 'x')
    assert total.asnumpy()[0] == 1
    sys.exit()
def stop():
    time.sleep(1)  # others have seen it run
    say(f'stopping {os.getpid()}\\n'); os.kill(os.getpid(), signal.SIGSTOP)
def wait_in_y():
    kvstore_hvd.allreduce(np.ones(3), 'y')
try:
    if rank == last: globals()[HOW]()
    if rank == 1 and 'compute' in HOW: pair_up()
    if rank == last - 1 and HOW == 'stop': wait_for('go')
    kvstore_hvd.allreduce(much, 'x')
    if 'sum' in HOW: hvd.allreduce(mx.nd.ones(3), name='late').asnumpy()
except kvstore_hvd.HorovodInternalError as error:
    say(f'caught: {type(error).__name__}: {error}\\n', sys.stderr)
    if HOW == 'compute': wait_for('go')  # others see that this rank is late, not that it has left
    sys.exit(7)
"""
PLACES = [("-np 3", {}), ("-np 4", {"KVHVD_TEST_HOSTS": "2"})]
OFTEN = {"KVHVD_STALL_CHECK_TIME_S": "1"}


@pytest.mark.parametrize(
    ("workers", "hosts", "how"),
    [
        (*PLACES[0], "compute"),
        (*PLACES[1], "compute"),
        ("-np 3", {"KVHVD_TEST_HOSTS": "2,1"}, "compute_with_a_sum_under_way"),
    ],
)
def test_a_rank_that_computes_is_waited_for_beyond_the_deadline(start, workers, hosts, how):
    """By those that wait for it in a process set, and by those that wait for these; a report shows its line."""
    job = start(workers, f"HOW = {how!r}\n" + DEADLINE, **OFTEN, **hosts)
    job.until(lambda: re.search(r"rank 0 has waited ([4-9]|\d\d) s", job.of(0)), "twice the deadline")
    assert f"in {how}\n" in job.err
    for pid in [*map(int, re.findall(r"computing (\d+)", job.out))] * 4:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.15)  # a rank looks every 0.1 s, and its host tells the others every 0.5 s
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.23)
    reports = job.of(0).count("rank 0 has waited")
    job.until(lambda: job.of(0).count("rank 0 has waited") > reports + 1, "what a stop for a moment does not end")
    job.go().end()


# Rank 1 has no input, and waits for rank 0 to begin its first step.
SHAPES = """
import mxnet as mx
import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import config
from kvstore_hvd.join import Join
from support.joinables import Counter
config.KNOBS['timeout_s'].default = 1.0
hvd.init()
def attempt(what, how):
    net, counter = mx.gluon.nn.Dense(2), Counter()
    net.initialize()
    trainer = hvd.DistributedTrainer(net.collect_params(), 'sgd')
    try:
        with Join([counter, trainer]):
            if rank == 0:
                counter.count(1)
                how(counter)
                with mx.autograd.record():
                    net((mx.np if mx.__version__.startswith('2') else mx.nd).ones((4, 3))).sum().backward()
                trainer.step(4)
        say(f'{what}: ended\\n')
    except kvstore_hvd.HorovodInternalError as error:
        say(f'{what}: {type(error).__name__}: {error}\\n')
attempt('computes', lambda counter: time.sleep(3))
attempt('waits', lambda counter: counter.sum(1))
kvstore_hvd.reset()
attempt('stopped', lambda counter: os.kill(os.getpid(), signal.SIGSTOP))
sys.exit(7)
"""


def test_the_first_step_of_a_join_is_waited_for_while_others_compute(run):
    """Beyond the deadline, but not where workers wait for each other, or one is stopped."""
    job = run("-np 2", SHAPES, code=7)
    assert [job.of(rank).count("computes: ended") for rank in range(2)] == [1, 1], job.describe()
    for told in job.of(1).partition("waits: ")[2].split("stopped: "):
        assert "no other has broadcast its shape" in told, job.describe()
    assert "stopped: " in job.of(1)


def test_a_deadline_that_was_set_counts_for_ranks_that_compute_too(start):
    """The error shows the lines of both, although stall reports are switched off."""
    variables = {"KVHVD_TIMEOUT": "2.5", "HOROVOD_STALL_CHECK_DISABLE": "1", **OFTEN}
    job = start("-np 3", "HOW = 'compute'\n" + DEADLINE, **variables).until_printed("caught: ", 2).go().end(7)
    assert "has waited" not in job.err
    for text in (r"0 waits in allreduce 'x', at \S*:\d+ in <module>", r"[12] is at \S*:\d+ in (compute|wait_for)"):
        assert re.search(rf"rank {text}\.?\n", job.of(0)), job.describe()


@pytest.mark.parametrize(("workers", "hosts"), PLACES)
def test_a_stopped_rank_is_named_at_the_deadline(start, workers, hosts):
    """On whatever host it is, beside one that computes."""
    job = start(workers, "HOW = 'stop'\n" + DEADLINE, **OFTEN, **hosts).until_printed("stopping ")
    (pid,) = re.findall(r"stopping (\d+)", job.out)
    last = int(workers[-1]) - 1
    job.until_printed("caught: ", last - 1)
    os.kill(int(pid), signal.SIGCONT)
    job.go().end(7)
    waited = rf"waited 2 s (in .* )?for rank {last - 1} \(.*rank {last} \(.*pid {pid}\), which did not submit it\."
    assert re.search(rf"caught: TimeoutError: .*{waited}.*\n(.*\n)* +rank {last} is stopped", job.of(0)), job.describe()


@pytest.mark.parametrize(("workers", "hosts"), PLACES)
def test_ranks_that_wait_for_each_other_end_at_the_deadline(start, workers, hosts):
    """In operations of one world, which the error names with the lines of both, or in those of two."""
    last = int(workers[-1]) - 1
    job = start(workers, "HOW = 'wait_in_y'\n" + DEADLINE, **OFTEN, **hosts).end(7)
    assert all("caught: TimeoutError: " in job.of(rank) for rank in range(last + 1))
    by_last = f"rank {last} waits in allreduce 'y', at \\S*program0\\.py:\\d+ in wait_in_y"
    by_others = f"rank {last} waits for others itself, at \\S*program0\\.py:\\d+ in wait_in_y, in allreduce 'y'"
    assert re.search(f"{by_last}|{by_others}", job.of(0)), job.describe()
    assert "Fix: have all ranks submit the same operations" in job.of(0)
    how = "pair_up_in_a_thread" if hosts else "pair_up_among_signals_and_threads"
    assert "waits for others itself" in start(workers, f"HOW = {how!r}\n" + DEADLINE, **OFTEN, **hosts).end(7).err
