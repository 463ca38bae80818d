"""When a daemon counts as lost."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from kvstore_hvd.driver.daemons import _Daemon, _fate


@pytest.mark.parametrize(
    ("state", "within_s", "fate"),
    [
        ({"line": Mock()}, 5.0, "its daemon has said nothing for 5 s (KVHVD_LEASE)"),  # a second more than the lease
        ({}, 60.0, "its daemon did not come within 60 s"),
        ({"fault": "reset"}, 0.5, "the line to its daemon was lost: reset"),
        ({"fault": "reset", "ending": True}, 1e9, ""),
        ({"line": Mock(), "code": 3}, 0.5, "its daemon (pid 7) exited with code 3"),  # it may have said something yet
    ],
)
def test_how_long_a_daemon_may_be_silent(state: dict[str, Any], within_s: float, fate: str) -> None:
    daemon = _Daemon("host", 7, heard_at=100.0, **state)
    assert _fate(daemon, 100.0 + within_s - 0.01, lease_s=4.0) == ""
    assert _fate(daemon, 100.0 + within_s, lease_s=4.0) == fate
