"""The hosts of an allocation of Slurm, and the way to them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvstore_hvd.errors import LaunchError, message

__all__ = ["SRUN", "hosts_of_allocation"]

#: Runs a daemon on a host beside other steps, with all cores and all memory of the job, and without variables of MPI.
SRUN = "srun --nodes=1 --ntasks=1 --overlap --mem=0 --cpu-bind=none --mpi=none --nodelist={host}"


def hosts_of_allocation(variables: Mapping[str, str]) -> dict[str, int] | None:
    """The hosts with their numbers of tasks; None outside of an allocation, or where it has one host only."""
    nodes, tasks = variables.get("SLURM_JOB_NODELIST", ""), variables.get("SLURM_TASKS_PER_NODE", "")
    if not nodes or variables.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # srun has started several launchers
        return None
    hosts = [host for part in re.findall(r"(?:[^,\[]|\[[^]]*])+", nodes) for host in _each(part)]
    if len(hosts) == 1:
        return None
    counts = [count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))]
    if len(hosts) != len(counts):
        fact = f"SLURM_TASKS_PER_NODE={tasks} does not tell the tasks of each host in SLURM_JOB_NODELIST={nodes}."
        raise LaunchError(message(fact, fix="name the hosts: kvhvdrun -H node1:2,node2:2 ..."))
    return dict(zip(hosts, map(int, counts)))


def _each(part: str) -> list[str]:
    """The hosts of one part of a list, such as ``node[1,08-10]``."""
    before, _, rest = part.partition("[")
    inside, bracket, after = rest.partition("]")
    if not bracket:
        return [part]
    found = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", inside):
        found += [before + str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return [host + end for host in found for end in _each(after)]
