"""``python -m kvstore_hvd.launch``: kvhvdrun. By its path: a daemon on another host, which finds its package there."""

import os
import sys

if __name__ == "__main__":
    if __package__:
        from kvstore_hvd.launch.command import main

        sys.exit(main())
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # An installed package comes behind the standard library.
    sys.path[0:1] = [] if package in sys.path[1:] else [package]
    from kvstore_hvd.launch.daemon import serve

    serve(*sys.argv[1:])
