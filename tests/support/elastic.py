"""Elastic jobs whose workers train (`support.elastic_trainee`), which a test watches and disturbs while they run."""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from support.jobs import TESTS, Job
from support.launchers import kvhvdrun

__all__ = ["ElasticJob", "Line"]

Line = dict[str, Any]


class ElasticJob(Job):
    """A training under ``kvhvdrun --min-np --max-np``; `slots` is what the discovery script says at first, if any.

    `beside` is what its command begins with. `points` says what happens at which point to which worker: see
    elastic_trainee.py.
    """

    def __init__(
        self,
        folder: Path,
        marker: str,
        *,
        workers: int = 3,
        min_np: int = 1,
        slots: Optional[Sequence[tuple[str, int]]] = None,
        beside: Sequence[str] = (),
        options: Sequence[str] = ("--blacklist-cooldown-range", "1", "2"),
        arguments: Sequence[str] = (),
        points: Sequence[Line] = (),
        **variables: str,
    ) -> None:
        self.folder = folder
        self._write("points.json", json.dumps(list(points)))
        self._positions: dict[Path, int] = defaultdict(int)
        self._found: dict[int, list[Line]] = defaultdict(list)
        command = [*beside, *kvhvdrun().prefix, "--min-np", str(min_np), "--max-np", str(workers)]
        command += ["--event-log", "{log}", *options]
        if slots is not None:
            self.set_slots(slots)
            command += ["--host-discovery-script", f"cat {folder}/hosts"]
        program = [sys.executable, str(TESTS / "support" / "elastic_trainee.py"), str(folder), *arguments]
        super().__init__(folder, marker, [*command, *program], start_new_session=True, **variables)

    def lines(self, what: str = "", worker: Optional[int] = None) -> list[Line]:
        """Return what workers have written so far, each line with its worker, in the order of time."""
        self._read()
        chosen = self._found.values() if worker is None else [self._found[worker]]
        found = (line for lines in chosen for line in lines if what in ("", line["what"]))
        return sorted(found, key=lambda line: line["t"])

    def _read(self) -> None:
        for path in self.folder.glob("worker-*.jsonl"):
            number = int(path.stem.partition("-")[2])
            with path.open("rb") as file:
                file.seek(self._positions[path])
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._positions[path] += len(complete)
            self._found[number] += [{**json.loads(line), "worker": number} for line in complete.splitlines()]

    def done(self, worker: int, generation: int) -> list[Line]:
        """Return the steps that a worker has made in a world."""
        self._read()
        newest = itertools.takewhile(
            lambda line: line.get("generation", generation) >= generation, reversed(self._found[worker])
        )
        return [line for line in newest if line["what"] == "done" and line["generation"] == generation][::-1]

    def machine(self, worker: int) -> str:
        """Where a worker runs; all names of this machine are one."""
        return "here"

    def until_step(self, steps: int = 3, *, size: Optional[int] = None, after: int = -1) -> int:
        """Wait until steps are made in a world after the given one, of that size; returns the number of the world."""

        def made() -> list[int]:
            worlds = [(each["generation"], each["workers"]) for each in self.events("generation_ready")]
            chosen = [world for world in worlds if world[0] > after and size in (None, len(world[1]))]
            return [number + 1 for number, workers in chosen if len(self.done(workers[0], number)) >= steps]

        found: list[int] = self.until(made, f"{steps} steps in a world of {size or 'any'} workers after world {after}")
        return found[-1] - 1

    def set_slots(self, slots: Sequence[tuple[str, int]]) -> None:
        """Change what the discovery script says."""
        self._write("hosts", "".join(f"{host}:{number}\n" for host, number in slots))

    def _write(self, name: str, text: str) -> None:
        """Replace a file as a whole: others may read it at any moment."""
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.rename(self.folder / name)

    def finish(self) -> None:
        """Let the workers end after the generation that they are in."""
        (self.folder / "finish").touch()
