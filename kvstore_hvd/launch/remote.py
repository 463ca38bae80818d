"""The program of a daemon on another host than the launcher's. It finds its package by its own place."""

import os
import sys

if __name__ == "__main__":
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # Where the package is installed, it comes behind the standard library.
    sys.path[0:1] = [] if package in sys.path[1:] else [package]
    from kvstore_hvd.launch.daemon import serve

    serve(*sys.argv[1:])
