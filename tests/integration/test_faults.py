"""Ranks that die, stop, leave or fail while others wait for them: real processes, real signals, real MXNet."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support import jobs
from support.patience import of_the_product, patient
from support.pauses import stopped
from support.runs import Run

WORKER = Path(__file__).resolve().parents[1] / "support" / "fault_worker.py"


@pytest.fixture
def start(tmp_path: Path, marker: str):  # type: ignore[no-untyped-def]
    """Start jobs; `Run` checks that each leaves nothing behind."""
    runs: list[Run] = []

    def start_one(fault: str, ranks: int, **variables: str) -> Run:
        runs.append(Run(WORKER, [fault], ranks, tmp_path, marker, **variables))
        return runs[-1]

    yield start_one
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(timeout=patient(30))


def survivors(output: str, ranks: int) -> list[str]:
    """The errors that the ranks other than the faulty one report, each of them exactly once."""
    errors = []
    for rank in (rank for rank in range(ranks) if rank != 1):
        own = [line.split("] ", 1)[1] for line in output.splitlines() if line.startswith(f"[{rank}] ")]
        caught = [line for line in own if line.startswith("caught: ")]
        assert len(caught) == 1, f"rank {rank} caught {caught}:\n{output}"
        assert own.count("again: PeerLostError") + own.count("again: TimeoutError") == 2, output
        errors.append(caught[0])
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("fault", "how", "code"),
    [
        ("sigkill", r"died \(SIGKILL\)", 128 + signal.SIGKILL),
        ("abort", r"died \(SIGABRT\)", 128 + signal.SIGABRT),
        ("os_exit", "exited with code 3", 3),
        ("exit_code", "left before it submitted", 5),
        ("raise", "ended early: ValueError: the data set is empty", 1),
    ],
)
def test_a_rank_that_ends_is_named_by_all_others(  # type: ignore[no-untyped-def]
    start, fault: str, how: str, code: int, ranks: int
) -> None:
    """The others raise within a second, name rank, host and cause, and the job ends with the culprit's exit code."""
    ended, output = start(fault, ranks).end()
    for error in survivors(output, ranks):
        assert re.search(rf"PeerLostError: \[rank [023]/{ranks}\] .*rank 1 \(.*pid \d+\) {how}", error), output
    fix = "correct the ValueError on rank 1." if fault == "raise" else "restart the job from its last checkpoint"
    assert f"  Fix: {fix}" in output
    assert ended == code, output


# Operations of either rank are pending when rank 1 fails: announced, and not announced because MXNet still computes.
PENDING = """
import kvstore_hvd
import mxnet as mx
store = mx.kv.create('horovod')
x, own = mx.nd.ones(1000), mx.nd.ones(1000)
store.pushpull('met', x, out=x)
x.wait_to_read()
def submit():
    store.pushpull(f'of rank {rank}', own, out=own)
    late = mx.nd.ones((400, 400))
    for _ in range(300):
        late = mx.nd.dot(late, late) * 0
    store.pushpull(f'late of rank {rank}', late, out=late)
submit()
if rank == 1:
    raise ValueError('the data set is empty')
while True:
    store.pushpull('x', x, out=x)
"""


def test_an_error_of_the_program_is_all_that_is_printed(marker: str) -> None:
    """One traceback on each rank, although what was pending has failed as well."""
    ended, _, err = jobs.run(marker, 2, PENDING)
    lines = err.decode().splitlines()
    for rank, last in ((0, "  Fix: correct the ValueError on rank 1."), (1, "ValueError: the data set is empty")):
        own = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
        assert own.count("Traceback (most recent call last):") == 1, err.decode()
        assert own[-1] == last, err.decode()
    assert ended == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_leaves_in_good_order_is_named_by_those_who_need_it(start, ranks: int) -> None:  # type: ignore[no-untyped-def]
    """A rank whose script ends early, with success, leaves the others with an error and not waiting."""
    ended, output = start("return", ranks).end()
    for error in survivors(output, ranks):
        assert re.search(
            r"PeerLostError: .*rank 1 \(.*\) left before it submitted allreduce '\w*(weight|bias)' ", error
        ), output
    assert ended == 7, output


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fault", ["sigstop", "hang"])
def test_a_rank_that_stands_still_is_named_at_the_deadline(start, fault: str, ranks: int) -> None:  # type: ignore[no-untyped-def]
    """A stopped or sleeping rank costs the others no more than the deadline."""
    deadline_s = of_the_product(2)
    run = start(fault, ranks, KVHVD_TIMEOUT=str(deadline_s))
    ended, output = run.end()
    for error in survivors(output, ranks):
        # Who has waited, in what, and for whom: each of them once.
        waited = rf"waited {deadline_s} s (in allreduce .*)?for rank 1 \(.*pid \d+\)"
        fact = rf"TimeoutError: .*{waited}, which did not submit it\."
        assert re.search(fact, error), output
    assert re.search(r"rank 1 \(.*pid \d+\)", output)
    assert ended == 7, output


# Rank 1 is stopped while both sum in rank 0's arena; rank 0 uses its array again, and rank 1 goes on.
SUMS = """
import time
import mxnet as mx
import kvstore_hvd
store = mx.kv.create('horovod')
net = mx.gluon.nn.Dense(2048, in_units=8192, use_bias=False)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', kvstore=store)
module = mx.np if mx.__version__.startswith('2') else mx.nd
for trial in range(5):
    with mx.autograd.record():
        loss = net(module.ones((1, 8192))).mean()
    loss.backward()
    trainer.allreduce_grads()
    grad = net.weight.grad()
    grad[:] = 1
    store.pushpull('sum', grad, out=grad)
    assert (grad.asnumpy() == 2).all()
    say(f'trial {os.getpid()}\\n')
    try:
        while True:
            store.pushpull('sum', grad, out=grad)
            grad.wait_to_read()
    except Exception as error:
        say(f'failed {type(error).__name__}\\n')
    if rank == 0:
        grad[:] = 7
        grad.wait_to_read()
        say('used again\\n')
        sys.stdin.readline()
        say(f'changed {(grad.asnumpy() != 7).sum()}\\n')
    kvstore_hvd.reset()
"""


def test_a_rank_that_was_stopped_past_the_deadline_changes_nothing_later(marker: str) -> None:
    """It may be about to write into an array of the other worker, which has had its error by then."""
    process = jobs.start(marker, 2, SUMS, variables={"KVHVD_TIMEOUT": "1"}, stdin=subprocess.PIPE)
    for trial in range(5):
        pids = {}
        for _ in range(2):
            line = jobs.line_with(process, b"trial")
            pids[line[:3]] = int(line.split()[-1])
        time.sleep(0.1 + trial * 0.0071)  # amid one of many sums
        with stopped(pids[b"[1]"]):
            jobs.line_with(process, b"[0] used again")
        jobs.line_with(process, b"[1] failed")
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert jobs.line_with(process, b"[0] changed").split()[-1] == b"0"
    _, err = process.communicate(timeout=jobs.LIMIT_S)
    assert process.returncode == 0, err.decode()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_that_drifts_apart_is_named_by_all(start, ranks: int) -> None:  # type: ignore[no-untyped-def]
    """Every rank says which parameter, and on which rank, although each of them ends as soon as it knows."""
    ended, output = start("diverge", ranks, KVHVD_VERIFY_EVERY="5").end()
    for rank in range(ranks):
        assert re.search(
            rf"\[{rank}\] caught: DivergedError: \[rank {rank}/{ranks}\] verify '\w*weight' \(key \d\): "
            r"the workers' parameters differ after 5 updates",
            output,
        ), output
        assert re.search(rf"^\[{rank}\]   [0-9a-f]{{16}}: rank 1$", output, re.MULTILINE), output
    assert ended == 7, output


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all_ranks(start, number: int, ranks: int) -> None:  # type: ignore[no-untyped-def]
    """Ctrl-C (and the batch system's SIGTERM) reach all ranks, also one that does not react."""
    run = start("hang", ranks)
    run.until(lambda text: text.count("trained") == ranks and "hanging" in text)
    run.process.send_signal(number)
    ended, output = run.end()
    assert ended == 128 + number, output


def test_killing_the_launcher_ends_all_ranks(start) -> None:  # type: ignore[no-untyped-def]
    """The launcher's death takes the workers with it."""
    run = start("hang", 2)
    run.until(lambda text: "hanging" in text)
    run.belongings.note()
    run.process.kill()
    run.process.wait(timeout=patient(10))
    run.belongings.assert_gone(patient(15))
