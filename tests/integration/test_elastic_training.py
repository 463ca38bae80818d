"""Elastic trainings: workers and hosts that die, stop, come and go, and jobs that are lost as a whole.

What concerns the launcher alone is in test_elastic_launcher, where workers train nothing and start fast; its decisions
are in unit/launch, random faults in test_fuzz. After each Gluon training that ends with success, its workers have equal
parameters, those of one process that has done the same steps, to the last bit; each sample was counted once in each
epoch; and nothing is left behind.
"""

import os
import signal
from pathlib import Path

import pytest

from hosts.network import HostsJob, Network, unavailable
from support.elastic import ElasticJob, assert_all_right
from support.jobs import status_of
from support.launchers import kvhvdrun, mpirun

pytestmark = pytest.mark.timeout(400)
LAUNCHERS = {launcher.name: launcher for launcher in (kvhvdrun(), mpirun()) if launcher is not None}


@pytest.fixture
def train(marker, tmp_path):
    started = []

    def start(*network, **settings):
        started.append((HostsJob if network else ElasticJob)(tmp_path, marker, *network, **settings))
        return started[-1]

    yield start
    for job in started:
        job.close()


def end_well(job):
    job.finish()
    job.end()
    assert_all_right(job)


def test_a_preempted_host_leaves_at_a_commit_and_a_killed_worker_costs_itself_only(train):
    """SIGTERM to its daemon costs no step, and after its cooldown the host is used again. Both have rank 0."""
    options = ["-H", "localhost:1,127.0.0.2:1", "--blacklist-cooldown-range", "1", "2"]
    job = train(workers=2, options=options, arguments=["--pause", "0.1"], KVHVD_KILL_GRACE="60")
    world = job.until_step(size=2)
    daemon = int(status_of(job.pid(0))[1])
    assert Path(f"/proc/{daemon}/cmdline").read_bytes().startswith(b"job-daemon ")  # by which docs/elastic.md finds it
    os.kill(daemon, signal.SIGTERM)
    world = job.until_step(size=1, after=world)
    assert job.until_event("worker_exited", worker=0)["code"] == 0
    world = job.until_step(size=2, after=world)
    assert not job.events("generation_void")
    steps = [line["step"] for line in job.lines("done", worker=1)]
    assert steps == list(range(len(steps))), "a step was made twice"
    first, second = job.members()
    job.kill(first)
    world = job.until_step(size=2, after=world)
    assert job.members()[0] == second
    assert [second] in [each["workers"] for each in job.events("generation_ready")], "it has not gone on at once"
    assert job.until_event("worker_exited", worker=first)["code"] == -signal.SIGKILL
    end_well(job)
    text = f"the daemon on localhost (pid {daemon}) was ended by SIGTERM"
    assert f"host localhost leaves: {text}." in job.err
    assert f"host localhost is lost: {text}. It gets no worker for " in job.err


@pytest.fixture
def network(tmp_path):
    if unavailable():
        pytest.skip(unavailable())
    with Network(tmp_path, 3) as made:
        yield made


@pytest.mark.alike
def test_a_host_is_cut_off_and_comes_back_and_a_link_is_killed(train, network):
    job = train(network, workers=6, options=["--hosts", "node0:2,node1:2,node2:2"])
    world = job.until_step(size=6)
    network.cut("node1")
    world = job.until_step(size=4, after=world)
    network.heal("node1")
    world = job.until_step(size=6, after=world)
    os.kill(job.pid(job.of_host("node0")[0]), signal.SIGKILL)
    world = job.until_step(size=5, after=world)
    job.until_step(size=6, after=world)
    end_well(job)
    assert [each["host"] for each in job.events("host_lost")] == ["node1"]


@pytest.mark.alike
def test_two_hosts_do_not_reach_each_other(train, network):
    """The launcher reaches both: one of them is left out, and comes back when they do."""
    hosts = ["--hosts", "node0:1,node1:1,node2:1"]
    job = train(network, options=hosts, KVHVD_START_TIMEOUT="4", KVHVD_LINK_TIMEOUT="2")
    world = job.until_step(size=3)
    network.part("node1", "node2")
    world = job.until_step(size=2, after=world)
    network.rejoin("node1", "node2")
    job.until_step(size=3, after=world)
    end_well(job)
    note = job.events("host_left_out")[0]
    assert (note["host"], note["unreached"]) == ("node2", ["node1"])
    assert "host node2 is left out for " in job.err
    assert job.events("host_lost") == []


CHANGES = """
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from kvstore_hvd.mxnet.process_sets import process_sets
hvd.init(process_sets='dynamic')
def workers(of=hvd.global_process_set):
    return hvd.allgather_object(hvd.rank(), process_set=of)
resets = []
state = elastic.ObjectState(step=0, epoch=0)
state.register_reset_callbacks([lambda: resets.append(state.epoch)])
@elastic.run
def train(state):
    say(f'begin epoch {state.epoch} size {hvd.size()} resets {resets}\\n')
    if state.step == 0:
        hvd.add_process_set([1]), hvd.add_process_set([0, 2])
    while not os.path.exists('stop'):
        assert workers() == list(range(hvd.size()))
        mine = [each for each in process_sets()[1:] if max(each.ranks) < hvd.size() and each.included()]
        assert [workers(each) for each in mine] == [list(each.ranks) for each in mine]
        state.step += 1
        if state.step % 10 == 0:
            state.epoch += 1
            say(f'epoch {state.epoch} size {hvd.size()} sets {len(mine)}\\n')
            try: state.commit()
            except elastic.HostsUpdatedInterrupt: say('left the world\\n'); raise
        time.sleep(0.01)
train(state)
"""


@pytest.mark.alike
def test_what_people_have_reported_of_horovods_elastic_jobs(start, tmp_path):
    """By the numbers of the issues; here the job goes on. Others are elsewhere in this file and in unit/launch."""

    def slots(number):
        (tmp_path / "next").write_text(f"localhost:{number}\n")
        (tmp_path / "next").rename(tmp_path / "hosts")

    def begun(worker):
        return [line.split(" ", 6) for line in job.of(worker).splitlines() if line.startswith("begin")][-1]

    slots(3)
    script = f"--host-discovery-script 'cat {tmp_path}/hosts' --blacklist-cooldown-range 1 1"
    job = start(f"{script} --min-np 2", CHANGES).until_printed("size 3 sets 1", 3)
    # 4021, a member of a process set is killed: the others go on; with its replacement all sets are there again.
    job.kill(1)
    job.until_joined(0, 2)
    job.until_joined(0, 2, 3)
    job.until(lambda: job.of(3).count("size 3 sets 1") > 1, "steps of the replacement in its set")
    # 2844: it begins in the epoch of the others, as do reset callbacks of those that were there before.
    epoch, resets = begun(0)[2], begun(0)[6]
    assert int(epoch) >= 1
    assert begun(3)[2:5] == [epoch, "size", "3"]
    assert resets.endswith(f"{epoch}]")
    # 3494, fewer than --min-np after a slot has gone and come back: who stays would skip the sync of the newcomer.
    slots(1)
    job.until_printed("left the world", 2 + 3)  # two for the replacement
    slots(2)
    job.until_joined(count=2, after=2)
    job.until_printed("[0] epoch", job.out.count("[0] epoch") + 2)
    job.go("stop").end()


COUNT = """
import numpy as np
import kvstore_hvd
from kvstore_hvd import elastic
kvstore_hvd.init()
before, begun = kvstore_hvd.topology().rank, []
@elastic.run
def train(state):
    begun.append(state.step)
    while state.step < 20:
        if state.step == 13 and before == 1 and len(begun) == 1:
            FAULT
        state.total += float(kvstore_hvd.allreduce(np.full(2, state.step + 1.0), 'values', op='average')[0])
        state.step += 1
        if state.step % 5 == 0:
            state.commit()
state = elastic.ObjectState(step=0, total=0.0)
train(state)
now = kvstore_hvd.topology()
report(before=before, rank=now.rank, size=now.size, generation=now.generation, begun=begun, total=state.total)
"""


def test_the_next_job_goes_on_from_the_checkpoint_of_the_last_commit(start, run, tmp_path):
    """The launcher is killed at step 13, so steps 11 to 13 are repeated; a third job finds nothing more to do."""
    options = "--min-np 2 --max-np 2 --checkpoint kept --checkpoint-every 1e-6"
    lost = start(options, COUNT.replace("FAULT", "say('last\\n'); forever()")).until_printed("last")
    assert lost.err.count("there is no checkpoint") == 1
    lost.end(-signal.SIGKILL, signal.SIGKILL)
    assert "The workers on localhost are being ended." in lost.err
    for first in (10, 20):
        job = run(options, COUNT.replace("FAULT", "pass"))
        assert job.err.count("training goes on from the checkpoint") == 1
        assert [(report["begun"], report["total"]) for report in job.reports()] == [([first], 210.0)] * 2
    (tmp_path / "kept").write_text("another file")
    assert "is no checkpoint" in run(options, COUNT, code=1).err


@pytest.mark.alike
@pytest.mark.parametrize("name", LAUNCHERS)
def test_workers_of_a_static_job_that_all_live_meet_again(run, name):
    """One sleeps for longer than an operation may wait; the others wait for it in the next world."""
    limits = {"KVHVD_TIMEOUT": "1", "KVHVD_START_TIMEOUT": "60", "KVHVD_LOG_LEVEL": "info"}
    job = run("-np 3", COUNT.replace("FAULT", "time.sleep(4)"), launcher=LAUNCHERS[name], **limits)
    assert "the world is lost, back to the last commit" in job.err
    told = [tuple(report.values()) for report in job.reports()]
    assert told == [(rank, rank, 3, 1, [0, 10], 210.0) for rank in range(3)], job.describe()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_worker_of_a_static_job_that_dies_is_not_replaced_and_the_job_says_so(run, name):
    """First in the log, once; under kvhvdrun, which lets the others speak, in the error too."""
    program = COUNT.replace("FAULT", "os.kill(os.getpid(), 9)")
    job = run("-np 3", program, code=137 if name == "kvhvdrun" else None, launcher=LAUNCHERS[name])
    assert job.process.returncode != 0
    assert job.err.count("this job cannot replace workers that die: start with `kvhvdrun --min-np 1") == 1
    if name == "kvhvdrun":
        said = "PeerLostError: training cannot recover: a worker has died, and this job cannot go on without it."
        assert said in job.err
        assert "died (SIGKILL)" in job.err
        assert "Fix: start with `kvhvdrun --min-np 1 --max-np N python train.py`, which replaces workers." in job.err
