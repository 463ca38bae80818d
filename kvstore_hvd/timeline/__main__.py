"""Make the timeline of a job that was killed: ``python -m kvstore_hvd.timeline merge FILE``."""

from __future__ import annotations

import argparse
import glob
import sys
from collections.abc import Sequence

from kvstore_hvd.errors import rank_list
from kvstore_hvd.timeline.parts import part_path, read_header
from kvstore_hvd.timeline.trace import write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (default: ``sys.argv[1:]``)."""
    parser = argparse.ArgumentParser(prog="python -m kvstore_hvd.timeline", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="merge")
    merge = commands.add_parser("merge", help="make FILE of the parts that the workers of a killed job left beside it")
    merge.add_argument("file", metavar="FILE", help="as given to start_timeline() or HOROVOD_TIMELINE")
    return _merge(parser.parse_args(argv).file)


def _merge(target: str) -> int:
    """Merge the parts of the latest session. They stay, in case the job still runs."""
    try:
        found = {path: read_header(path) for path in glob.glob(glob.escape(target) + ".rank-*.part")}
        headers = [header for header in found.values() if header is not None]
        if not headers:
            print(f"there is no part of a timeline: {part_path(target, 0)} and so on.", file=sys.stderr)
            return 1
        latest = max(headers, key=lambda header: header.unix_ns)
        ranks = sorted(header.rank for header in headers if header.session == latest.session)
        summary = write_trace(target, [part_path(target, rank) for rank in ranks])
    except (OSError, ValueError) as error:
        print(f"the timeline cannot be made: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {summary.operations} operations of {rank_list(ranks)}")
    missing = set(range(latest.size)) - set(ranks)
    if missing:
        print(f"missing: {rank_list(missing)} of {latest.size}")
    if summary.unfinished:
        print(f"the last moments are missing, because they did not end in good order: {rank_list(summary.unfinished)}")
    if summary.lost:
        print(f"{summary.lost} operations were not recorded: there were too many at a time")
    others = sorted(path for path, header in found.items() if header is None or header.session != latest.session)
    if others:
        print(f"left out, of another timeline: {', '.join(others)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
