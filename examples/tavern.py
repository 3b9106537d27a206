"""An evening of twenty characters, all on one world context, through the asynchronous client.

    geist-pool                                              # in one terminal
    python examples/tavern.py                               # in another: the pool named "default"
    python examples/tavern.py --model smollm2 --workers 2   # or with a pool of its own

The world is computed once. Each character is a context on top of it: who they are, then what they did, said and saw. In every
round all decide at the same time (a score among labels), those who speak are written out (a generate with a seed, published as
their new context), and each hears the two who sit next to them. One seed gives one evening: the last line is a hash of the
transcript, the same for any number of workers.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar

from geist_pool.client import AsyncClient, Publish, Sampling
from geist_pool.config import load
from geist_pool.errors import Busy
from geist_pool.supervisor import Supervisor

WORLD = """\
The Second Ferry is an inn on the wrong bank of the river Amble. Tonight the river is over the third step, the ferry does not
cross, and everybody who came for an hour is here until morning. There is one fire, one keg, and one window that does not shut.
The guests sit around it in a ring.
"""
PEOPLE = {
    "Hesper": "keeps the inn and every promise but one",
    "Odo": "runs the ferry and cannot swim",
    "Nip": "is eleven and takes bets",
    "Wilmot": "counts windows for the crown",
    "Ansel": "has taken a vow of silence, with exceptions",
    "Maud": "sells eels and will not eat them",
    "Perrin": "is in love and tells nobody, at length",
    "Ysolde": "writes letters for those who cannot",
    "Garrick": "played a king once and has kept the voice",
    "Tansy": "cures warts and causes some",
    "Corwin": "is looking for his horse",
    "Bett": "has sold a horse today",
    "Lambert": "sleeps badly and says so",
    "Rosamund": "owns the far bank",
    "Fitch": "rents the near bank from her",
    "Agnes": "knits, and hears everything",
    "Dorrick": "is a miller and thinks about flour",
    "Sabra": "came from the sea and misses it",
    "Hob": "mends what others break",
    "Lucan": "breaks things",
}
LABELS = [" speak to the others", " drink in silence", " stare into the fire", " deal the cards again"]
SPEAK = LABELS[0]
T = TypeVar("T")


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks again where the pool's queue is full."""
    while True:
        try:
            return await ask()
        except Busy as busy:
            await asyncio.sleep(busy.retry_after or 0.1)


def number(*parts: object) -> int:
    """A seed of 0 to 2^53 - 1 that follows from the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 11


class Evening:
    def __init__(self, pool: AsyncClient, seed: int, names: list[str]) -> None:
        self._pool = pool
        self._seed = seed
        self._names = names
        self.transcript: list[str] = []

    async def begin(self) -> None:
        world = await self._pool.create_context(WORLD, name="world", pin=True)

        async def enter(name: str) -> int:
            made = await patiently(lambda: self._pool.create_context(f"{name} {PEOPLE[name]}.\n", on="world", name=name))
            return made.context.bytes

        costs = await asyncio.gather(*map(enter, self._names))
        print(
            f"world: {world.context.n_tokens} tokens, {world.context.bytes} bytes; "
            f"{len(costs)} characters on it: {sum(costs) // len(costs)} bytes each\n"
        )

    async def round(self, i: int) -> None:
        """Everybody decides and acts; then everybody hears of their neighbours."""
        deeds = await asyncio.gather(*(self._act(name, i) for name in self._names))
        self.transcript += [f"{i}. {deed}" for deed in deeds]

        async def hear(at: int, name: str) -> None:
            """Those who spoke remember their own words up to the last; the others have to be told what they did."""
            own = '"' if self._spoke(deeds[at]) else deeds[at]
            news = "\n".join([own, deeds[at - 1], deeds[(at + 1) % len(deeds)], ""])
            await patiently(lambda: self._pool.create_context(news, on=name, name=name))

        await asyncio.gather(*(hear(at, name) for at, name in enumerate(self._names)))

    async def _act(self, name: str, i: int) -> str:
        """What somebody does in this round, in one line."""
        choice = await patiently(lambda: self._pool.score(f"It is {name}'s turn to", LABELS, context=name))
        weights = [math.exp(label.mean / 1.5) for label in choice.labels]
        chosen = random.Random(number(self._seed, i, name)).choices(LABELS, weights)[0]
        if chosen != SPEAK:
            return f"{name} chose to{chosen}."
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=number(self._seed, i, name, SPEAK))
        said = await patiently(
            lambda: self._pool.generate(
                f'{name} says: "', context=name, max_tokens=20, stop=['"', "\n"], sampling=sampling, publish=Publish(name=name)
            )
        )
        return f'{name} says: "{said.text}"'

    @staticmethod
    def _spoke(deed: str) -> bool:
        return deed.endswith('"')


async def evening(address: str | None, seed: int, rounds: int, characters: int) -> None:
    async with AsyncClient(address, space="tavern", timeout=600) as pool:
        tonight = Evening(pool, seed, list(PEOPLE)[:characters])
        await tonight.begin()
        for i in range(1, rounds + 1):
            await tonight.round(i)
    text = "\n".join(tonight.transcript)
    print(text)
    print(f"\nsha256 {hashlib.sha256(text.encode()).hexdigest()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="An evening of twenty characters on one world context.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--characters", type=int, default=len(PEOPLE))
    parser.add_argument("--address", help="of a running pool")
    parser.add_argument("--model", help="starts a pool of its own: a GGUF, or a name that `geist-pool pull` knows")
    parser.add_argument("--workers", type=int, help="of that pool")
    args = parser.parse_args()
    with ExitStack() as stack:
        address = args.address
        if args.model is not None:
            flags = {"name": f"tavern-{os.getpid()}", "model": args.model, "workers": args.workers, "log_level": "error"}
            address = stack.enter_context(Supervisor(load(flags))).config.address
        asyncio.run(evening(address, args.seed, args.rounds, args.characters))


if __name__ == "__main__":
    main()
