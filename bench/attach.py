"""How long it takes to continue a context that lies in shared memory, and what the first pass behind it then costs.

    python -m bench.attach [--model PATH.gguf] [--tokens 700,7000] [--quick]

Attach only: to an object that this process has mapped and verified, as a worker has when a context was announced to it. The first
pass is one token; it is compared with the first pass of a session that has the same state in its own memory, after a prefill, or,
where the context is too long to be prefilled in each round, after a flat restore. Mapping and verifying stand apart: they happen
once a process. That all ways lead to the same logits, bit for bit, is checked in every round.
"""

from __future__ import annotations

import sys

from bench.harness import Clock, Turn, run
from bench.restore import Sides, measure, with_lengths


class AttachSides(Sides):
    """Of all ways to a state only those that say what attaching costs."""

    default_tokens = (700, 7000)
    quick_tokens = (700, 7000)

    def turns(self) -> list[Turn]:
        return [self.nothing, *(self.prefills() or [self.restore]), self.attach, self.map_anew]

    def map_anew(self, clock: Clock) -> None:
        self._map_and_attach(clock, self.ref)


def main(argv: list[str] | None = None) -> int:
    parser = with_lengths(__doc__ or "", AttachSides)
    return measure(parser.parse_args(argv), parser, "attach", AttachSides)


if __name__ == "__main__":
    sys.exit(run(main))
