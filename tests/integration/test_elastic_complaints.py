"""What people have reported of Horovod's elastic jobs, by the number of the issue; here it goes on.

Elsewhere: #2484, a host is lost and the survivors abort, in test_elastic_hosts; #2652, a newcomer hangs with an
optimizer that has states, and #3143, samples of dead workers are lost or repeated, in test_elastic_faults (slots come
and go; a worker is killed); #1926, #2483, #3319, hosts that failed once are never used again, in test_elastic_launcher
(a slot comes back); #1724, interfaces need the same name on all hosts, in test_launcher_namespaces.
"""

import time

import pytest

pytestmark = pytest.mark.alike

PROGRAM = """
import mxnet as mx
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from kvstore_hvd.mxnet.process_sets import process_sets
hvd.init(process_sets='dynamic')
def total(name, of=hvd.global_process_set):
    return int(hvd.allreduce(mx.nd.ones(3), op=hvd.Sum, name=name, process_set=of).asnumpy()[0])
resets = []
state = elastic.ObjectState(step=0, epoch=0)
state.register_reset_callbacks([lambda: resets.append(state.epoch)])
@elastic.run
def train(state):
    say(f'begin epoch {state.epoch} size {hvd.size()} resets {resets}\\n')
    if state.step == 0 and hvd.size() == 3:
        hvd.add_process_set([1]), hvd.add_process_set([0, 2])
    while not os.path.exists('stop'):
        assert total('all') == hvd.size()
        mine = [each for each in process_sets()[1:] if max(each.ranks) < hvd.size() and each.included()]
        sums = [total(f'set{each.process_set_id}', each) for each in mine]
        assert sums == [len(each.ranks) for each in mine], sums
        state.step += 1
        if state.step % 10 == 0:
            state.epoch += 1
            say(f'epoch {state.epoch} size {hvd.size()} sets {len(mine)}\\n')
            state.commit()
        time.sleep(0.01)
train(state)
"""


@pytest.fixture
def job(start, tmp_path):
    """A job on so many slots, which `slots` changes."""

    def slots(number):
        (tmp_path / "next").write_text(f"localhost:{number}\n")
        (tmp_path / "next").rename(tmp_path / "hosts")

    def begin(number, options=""):
        slots(number)
        script = f"--host-discovery-script 'cat {tmp_path}/hosts' --blacklist-cooldown-range 1 1"
        return start(f"{script} {options}", PROGRAM), slots

    yield begin


def end_well(job, tmp_path):
    (tmp_path / "stop").touch()
    job.end()


def test_3494_fewer_than_min_np_after_a_slot_has_gone_and_come_back(job, tmp_path):
    """The one that stays would skip the sync, and the newcomer waits in it."""
    job, slots = job(2, "--min-np 2")
    job.until_printed("epoch 2 size 2", 2)
    slots(1)
    job.until_event("updated")
    time.sleep(1)  # they have left the world at a commit, and wait
    slots(2)
    job.until_joined(count=2, after=0)
    epoch = job.out.count("[0] epoch")
    job.until_printed("[0] epoch", epoch + 2)
    end_well(job, tmp_path)


def test_2844_newcomers_begin_in_the_epoch_of_the_others(job, tmp_path):
    """And so do reset callbacks of those that were there before."""
    job, slots = job(2, "--min-np 2")
    job.until_printed("epoch 3 size 2", 2)
    slots(3)
    job.until_printed("size 3 sets", 9)
    (begun,) = (each for each in job.of(2).splitlines() if each.startswith("begin"))
    (again,) = (each for each in job.of(0).splitlines() if each.startswith("begin") and "size 3" in each)
    epoch = int(begun.split()[2])
    assert epoch >= 3
    assert again == f"begin epoch {epoch} size 3 resets [{epoch}]"
    end_well(job, tmp_path)


def test_4021_a_worker_that_is_in_a_process_set_is_killed(job, tmp_path):
    """The others go on, with the sets that still have all their ranks; with the replacement all are there again."""
    job, _ = job(3, "--min-np 2")
    job.until_printed("size 3 sets 1", 3)
    job.kill(1)
    job.until_joined(0, 2)
    job.until_joined(0, 2, 3)
    job.until(lambda: job.of(3).count("size 3 sets 1") > 1, "steps of the replacement in its set")
    end_well(job, tmp_path)
