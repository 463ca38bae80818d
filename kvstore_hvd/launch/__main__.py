"""``python -m kvstore_hvd.launch``: kvhvdrun."""

import sys

from kvstore_hvd.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
