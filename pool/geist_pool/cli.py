"""The command `geist-pool`: the way in. The commands themselves are in commands.py."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits: 0, 1 for an error of the pool or the model, 2 for a wrong call or setting."""
    if sys.platform != "linux":
        print("geist-pool runs on Linux only: it needs POSIX shared memory and file locks as Linux has them", file=sys.stderr)
        sys.exit(1)
    from geist_pool.commands import run  # imports what only Linux has

    sys.exit(run(sys.argv[1:]))
