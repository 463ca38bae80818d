"""Events of an elastic job, in words for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore_hvd.launch.jobs import Job

__all__ = ["event_text", "news_text"]


def event_text(event: str, fields: Mapping[str, Any]) -> str:
    """Any event, in short: for the status line, and for who wants to hear of all."""
    words = [event.replace("_", " ")]
    for name, value in fields.items():
        if name == "text":
            words.append(f"({value.splitlines()[0] if value else ''})")
        elif name != "lines" and value is not None:
            words += [name, str(value)]
    return " ".join(words)


def news_text(event: str, fields: Mapping[str, Any], job: Job) -> str:
    """What everybody is told of an event; empty for those that are no news."""
    worker = job.workers.get(fields.get("worker", -1))
    if event == "worker_exited" and worker is not None and worker.code and not worker.leaving:
        return f"worker {worker.id} ({worker.slot}) {worker.ending}."
    if event == "worker_killed" and worker is not None:
        return f"worker {worker.id} ({worker.slot}) is killed: {fields['why']}."
    if event == "slot_blacklisted":
        return f"slot {fields['slot']} gets no worker for {fields['seconds']:.0f} s: they crash there."
    if event == "generation_ready" and fields["generation"] > 0:
        members = fields["workers"]
        return f"generation {fields['generation']}: {len(members)} workers ({', '.join(map(str, members))})."
    if event == "waiting":
        late = [job.workers.get(number) for number in fields["workers"]]
        names = ", ".join(f"{each.id} ({each.slot})" for each in late if each is not None)
        return f"the others wait for worker {names}, and kill what has not come in {fields['seconds']:.0f} s."
    if event == "too_few":
        return f"{fields['text']}, {fields['needed']} are needed: waiting for more, for {fields['seconds']:.0f} s."
    if event == "discovery_failed":
        return f"{fields['text']}."
    return ""
