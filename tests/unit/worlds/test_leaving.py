"""How an exit handler sees whether the program ends early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_hvd.worlds import leaving
from kvstore_hvd.worlds.leaving import early_end


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says why, in a process with such a ``sys``."""

    def end(interactive: int = 0, **attributes: object) -> str:
        flags = SimpleNamespace(interactive=interactive)
        with monkeypatch.context() as patched:
            patched.setattr(leaving, "sys", SimpleNamespace(flags=flags, **attributes))
            return early_end()

    return end


def test_an_unhandled_exception_is_the_reason(ended: Any) -> None:
    assert ended() == ""
    assert ended(last_value=ValueError(" one line\nanother")) == "ValueError: one line"
    assert ended(last_exc=KeyboardInterrupt(), last_value=None) == "KeyboardInterrupt"
    assert len(ended(last_value=ValueError("x" * 100_000))) == leaving._MAX_REASON


def test_an_interactive_session_has_gone_on(ended: Any) -> None:
    assert ended(last_value=ValueError("before"), ps1=">>> ") == ""
    assert ended(last_value=ValueError("in the script of python -i"), interactive=1) == ""
