"""Runs many programs in the world of this process; every rank calls it alike."""

import os
import random

import numpy as np

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from fuzz.executor import Executor, Outcome
from fuzz.programs import Program, generate
from kvstore_hvd.errors import HorovodInternalError


class _GiveUp(Exception):
    """A worker's own error, in the middle of a program."""


def run_programs(first: int, count: int, rank: int, size: int, *, leavers: bool = True) -> None:
    """Run the programs of the seeds from `first` on, in a world where process sets may be added. With `leavers` a rank
    may give up in the middle of a program; then the world is lost, and met again. An AssertionError, on every rank and
    with the seed, tells that a result is wrong, or a fault was not reported."""
    executor = Executor(rank, size)
    for seed in range(first, first + count):
        program = generate(seed, size, leavers)
        try:
            if program.leaver is None:
                agree(program, executor.run(program), rank)
            else:
                _lose_and_meet_again(executor, program, rank)
        except Exception as error:
            # What is wrong comes last: a report of many tests shows the end of each.
            hosts = os.environ.get("KVHVD_TEST_HOSTS", "")
            replay = f"KVHVD_TEST_HOSTS={hosts} KVHVD_TEST_FUZZ_SEED={seed} KVHVD_TEST_FUZZ_PROGRAMS=1"
            replay += f" kvhvdrun -np {size}"
            replay += " python -m pytest -m fuzz tests/parallel/test_fuzz.py"
            raise AssertionError(f"{program}\nseed {seed}: {error}\nreplay: {replay}") from error
    executor.close()


def agree(program: Program, outcome: Outcome, rank: int) -> None:
    """Compare the ranks' checksums, and have all of them fail when one has found a problem."""
    table = np.zeros((program.size, 1 + len(program.operations)), np.int64)
    table[rank, 0] = len(outcome.problems)
    for index, checksum in outcome.checksums.items():
        table[rank, 1 + index] = checksum + 1
    kvstore_hvd.allreduce(table, "fuzz/agree", out=table)
    texts = list(outcome.problems)
    for operation, column in zip(program.operations, table[:, 1:].T):
        told = column[column != 0]
        if told.size and (told != told[0]).any():
            texts.append(f"{operation}: the ranks have different results: {column.tolist()}")
    texts += [f"rank {other} has found {table[other, 0]} problems" for other in np.flatnonzero(table[:, 0])]
    assert not texts, "\n".join(texts)


def _lose_and_meet_again(executor: Executor, program: Program, rank: int) -> None:
    """One rank gives up somewhere in the program; the others are told, and all meet again."""
    where = random.Random(program.seed).randint(0, len(program.operations))

    def give_up(step: int) -> None:
        if rank == program.leaver and step >= where:
            raise _GiveUp

    try:
        # Sets that some workers have added or removed when the world is lost, and others have not, are gone for good.
        executor.register(program)
        hvd.barrier()
        problems = executor.run(program, give_up).problems
        assert not problems, problems
        if rank == program.leaver:
            raise _GiveUp
        hvd.barrier()
    except _GiveUp:
        pass
    except HorovodInternalError as error:
        assert "Fix: " in str(error), error
    else:
        raise AssertionError("a rank gave up, and this one was not told")
    kvstore_hvd.reset()
