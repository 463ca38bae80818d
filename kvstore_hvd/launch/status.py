"""The status line of an elastic job on a terminal: generation, workers, last event."""

from __future__ import annotations

import os

from kvstore_hvd.launcher.relay import Relay

__all__ = ["StatusLine"]

_ERASE = b"\r\x1b[K"
_DIM, _PLAIN = b"\x1b[2m", b"\x1b[0m"


class StatusLine:
    """Keeps a line below all output on standard error, if that is a terminal."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._terminal = os.isatty(2)
        self._shown = b""

    def update(self, text: str) -> None:
        """Before each wait: give way to what is to be written, or show `text` when there is nothing."""
        if not self._terminal:
            return
        if self._relay.pending:
            if self._shown:
                self._relay.insert(2, _ERASE)
                self._shown = b""
            return
        if self._relay.within_line(1) or self._relay.within_line(2):
            return
        # Bytes of other processes are in it, which are not to command the terminal.
        shown = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)
        line = shown[: _columns() - 1].encode()
        if line != self._shown:
            self._relay.insert(2, _ERASE + _DIM + line + _PLAIN)
            self._relay.push(2)  # what workers write next must not come behind it unerased
            self._shown = line

    def erase(self) -> None:
        """Erase the line, at the end or before the launcher stops."""
        if self._shown:
            self._relay.insert(2, _ERASE)
            self._shown = b""


def _columns() -> int:
    try:
        return max(2, os.get_terminal_size(2).columns or 80)
    except OSError:
        return 80
