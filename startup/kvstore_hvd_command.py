"""The command kvhvdrun: the launcher of kvstore_hvd, or why the environment does not let it be imported.

Beside the package, not in it: the package reads its settings when it is imported, and a misspelt one raises.
"""

import os
import signal
import sys


def main():
    """Run the launcher and return its exit code; 2 for settings that cannot be used, 130 after Ctrl-C."""
    # Until the launcher has handlers of its own there are no workers, and Ctrl-C ends it without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        from kvstore_hvd.launch import main as launch
    except ValueError as error:
        if type(error).__name__ != "ConfigError":
            raise
        print("kvhvdrun:", error, file=sys.stderr)
        return 2
    return launch()
