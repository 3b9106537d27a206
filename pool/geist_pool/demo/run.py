"""`geist-pool demo`: one context of an inn and its people, ten questions, with and without the snapshot.

Every question is put twice: behind the context that the pool keeps, and as one whole prompt in a space where nothing is kept.
Both must give the same tokens, or the same log-probabilities, to the last bit. At the end nothing may be left: no process, no
object in shared memory.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.markup import escape

from geist_pool import models, observe, terminal
from geist_pool.client import Client
from geist_pool.config import PoolConfig, store_key
from geist_pool.cores import find_cores
from geist_pool.demo.world import CONTEXT_NAME, CONTEXT_TEXT, QUESTIONS, Question, Say
from geist_pool.protocol import GenerateResult, Sampling, ScoreResult
from geist_pool.signals import signals_interrupt
from geist_pool.store import shm
from geist_pool.supervisor import Supervisor

WITHOUT: Final = "without-snapshot"  # the space of the whole prompts: nothing is kept there
MOST_WORKERS: Final = 4


class Answer(Struct, frozen=True):
    """What came back for one question, generated or scored."""

    question: Question
    result: GenerateResult | ScoreResult

    @property
    def words(self) -> str:
        """The answer for a reader."""
        if isinstance(self.result, GenerateResult):
            return self.result.text.strip()
        assert not isinstance(self.question, Say)
        return self.question.labels[self.result.best].strip()

    @property
    def essence(self) -> object:
        """What must be equal with and without the snapshot: every token, or every label's every log-probability."""
        if isinstance(self.result, GenerateResult):
            return self.result.tokens, self.result.raw, self.result.finish_reason
        return tuple((label.tokens, label.logprobs) for label in self.result.labels)

    @property
    def work_us(self) -> int:
        """Microseconds of a worker's time."""
        t = self.result.timings
        return t.attach + t.prefill + t.decode + t.score


def run_demo(config: PoolConfig, out: Console) -> bool:
    """Runs the whole demo; True if every pair of answers is identical and nothing is left behind.

    config: the model, and the number of workers (0: one a core, at most four), are taken from it.
    """
    observe.set_up("demo", log_level="warning")
    with signals_interrupt():
        if models.is_fetched(config.model):
            terminal.pull(config.model, Path(config.cache_dir))
        workers = config.workers or min(MOST_WORKERS, find_cores().usable)
        own = msgspec.structs.replace(
            config, name=f"demo-{os.getpid()}", address="", workers=workers, log_level="warning", keep_contexts=False
        )
        with Supervisor(own) as pool:
            pids = dict(pool.pids)
            same = _show(pool, out)
            pids |= pool.pids
    left = _left_behind(own.name, pids)
    out.print(f"left behind: {', '.join(left) if left else 'no process, no shared memory'}", style="red" if left else "green")
    return same and not left


def _show(pool: Supervisor, out: Console) -> bool:
    address = pool.config.address
    with Client(address) as client:
        info = client.info()
        out.print(
            f"{escape(info.model)} ({info.architecture}), {info.workers} workers of {pool.config.threads} thread(s), "
            f"tier {pool.config.tier}, weights shared",
            soft_wrap=True,
        )
        made = client.create_context(CONTEXT_TEXT, name=CONTEXT_NAME, timeout=None)
    c, t = made.context, made.timings
    out.print(
        f"context [bold]{CONTEXT_NAME}[/bold] ({c.id}): {c.n_tokens} tokens, computed once by {made.worker} "
        f"in {_ms(t.prefill)} ms, kept as {c.bytes / 1e6:.1f} MB of shared memory in {_ms(t.publish)} ms\n",
        soft_wrap=True,
    )
    out.print("[bold]From the snapshot[/bold], by whichever worker is free:")
    fast = _ask_all(pool, lambda client, q: _ask(client, q, CONTEXT_NAME), "default", lambda _, a: _print_answer(out, a))
    out.print("\n[bold]The same as whole prompts[/bold], nothing reused:")
    slow = _ask_all(pool, lambda client, q: _ask(client, q, None), WITHOUT, lambda i, a: _print_repeat(out, a, fast[i]))

    different = [f for f, s in zip(fast, slow, strict=True) if f.essence != s.essence]
    reused = [a.question for a in slow if a.result.usage.reused]
    before, after = (statistics.median(a.work_us for a in answers) for answers in (slow, fast))
    out.print()
    for answer in different:
        out.print(f"{answer.question.character}: the two answers differ", style="red")
    for question in reused:
        out.print(f"{question.character}: the whole prompt reused tokens, so it proves nothing", style="red")
    if not different and not reused:
        out.print(f"all {len(fast)} pairs of answers are identical: every token, every log-probability", style="green")
    before, after = (statistics.median(a.work_us for a in answers) for answers in (slow, fast))
    out.print(
        f"a worker's time per question (median): {_ms(before)} ms without the snapshot, {_ms(after)} ms with it: "
        f"{before / max(1.0, after):.1f} times faster",
        soft_wrap=True,
    )
    return not different and not reused


def _ask_all(
    pool: Supervisor, ask: Callable[[Client, Question], Answer], space: str, show: Callable[[int, Answer], None]
) -> list[Answer]:
    """All questions at once, as many in flight as there are workers; shown and returned in the order of the questions."""

    def one(question: Question) -> Answer:
        with Client(pool.config.address, space=space, timeout=None) as client:  # a client belongs to one thread
            return ask(client, question)

    answers: list[Answer] = []
    with ThreadPoolExecutor(pool.config.workers) as threads:
        waiting = [threads.submit(one, q) for q in QUESTIONS]
        try:
            for i, future in enumerate(waiting):
                answers.append(future.result())
                show(i, answers[-1])
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return answers


def _ask(client: Client, question: Question, context: str | None) -> Answer:
    """Puts a question behind the context, or behind the context's text in one prompt."""
    prompt = question.suffix if context is not None else CONTEXT_TEXT + question.suffix
    if isinstance(question, Say):
        said = client.generate(
            prompt, context=context, max_tokens=question.max_tokens, stop=question.stop, sampling=Sampling(), timeout=None
        )
        return Answer(question, said)
    return Answer(question, client.score(prompt, question.labels, context=context, timeout=None))


def _print_answer(out: Console, answer: Answer) -> None:
    """The figures of one question and, below, its answer."""
    r, q = answer.result, answer.question
    out.print(_figures(answer, CONTEXT_NAME), soft_wrap=True)
    ending = f"      {escape(q.suffix.strip())} [bold]{escape(answer.words)}[/bold]"
    if isinstance(r, ScoreResult) and not isinstance(q, Say):
        others = ", ".join(f"{label.strip()} {s.sum:.2f}" for label, s in zip(q.labels, r.labels, strict=True))
        ending += f"  [dim]({escape(others)})[/dim]"
    out.print(ending, soft_wrap=True)


def _print_repeat(out: Console, answer: Answer, first: Answer) -> None:
    """The figures of the same question asked without the snapshot, and whether the answer is the same."""
    same = "[green]identical[/green]" if answer.essence == first.essence else "[red]different[/red]"
    out.print(f"{_figures(answer, '(none)')}  {same}", soft_wrap=True)


def _figures(answer: Answer, context: str) -> str:
    r, said = answer.result, isinstance(answer.question, Say)
    u, t = r.usage, r.timings
    tokens = f"reused {u.reused:3}  prefilled {u.prefilled:3}  {'generated' if said else '   scored'} {u.generated:2}"
    last = f"decode {_ms(t.decode):>4}" if said else f"score {_ms(t.score):>5}"
    times = f"queue {_ms(t.queue):>4}  attach {_ms(t.attach):>4}  prefill {_ms(t.prefill):>4}  {last} ms"
    who = f"{answer.question.character:14} {'says' if said else 'chooses':7}"
    return f"  [cyan]{who}[/cyan]  {r.worker or '?':5} {context:12}  {tokens}  |  {times}"


def _ms(us: float) -> str:
    """Milliseconds, short."""
    return f"{us / 1000:.2f}" if us < 10_000 else f"{us / 1000:.0f}"


def _left_behind(name: str, pids: dict[str, int]) -> list[str]:
    """What of the pool is still there: names of processes and of shared-memory objects."""
    alive = [f"process {pid} ({child})" for child, pid in pids.items() if _is_our_child(pid)]
    return alive + [f"/dev/shm{found.name}" for found in shm.list_objects(store_key(name))]


def _is_our_child(pid: int) -> bool:
    """Whether the id still belongs to a child of this process, and not to nobody or, used again, to somebody else."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return f"\nPPid:\t{os.getpid()}\n" in status
