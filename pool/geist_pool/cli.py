"""The command `geist-pool`: the way in. The commands themselves are in commands.py."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits with what `commands.ExitCode` says."""
    if sys.platform != "linux":
        print("geist-pool runs on Linux only: it needs POSIX shared memory and file locks as Linux has them", file=sys.stderr)
        sys.exit(1)
    try:
        from geist_pool.commands import run  # imports what only Linux has, and takes a moment
    except KeyboardInterrupt:
        sys.exit(130)

    sys.exit(run(sys.argv[1:]))
