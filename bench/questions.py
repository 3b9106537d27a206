"""The demo's questions, put to a pool that keeps their context and as whole prompts.

Two sides take turns on each question: continuing the context that the pool keeps, and sending context and question as one whole
prompt in a space of its own, where there is nothing to reuse. Times are the client's, from sending to the last byte. With more
than one worker all questions are then also put at once, by as many clients as there are workers.

That both sides give the same tokens and log-probabilities to the last bit, and that exactly one of them reused the context, is
checked in every round. A part of bench/decision.py, which asks for it with --questions.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench.harness import Book, Check, Clock, Spread, Turn, interleave, show_progress
from bench.work import pass_macs
from geist_pool.client import Client
from geist_pool.demo.world import CONTEXT_TEXT, QUESTIONS, Question, Say
from geist_pool.engine import Engine, Model
from geist_pool.protocol import GenerateResult, ScoreResult
from geist_pool.supervisor import Supervisor

CONTEXT: Final = "bench"
WITH, WITHOUT = "with the snapshot", "whole prompt"
PARTS: Final = ("queue", "attach", "prefill", "decode", "score")  # of the pool's own timings

Result = GenerateResult | ScoreResult


def ask(client: Client, question: Question, context: str | None) -> Result:
    """Puts a question behind the context, or behind the context's text in one whole prompt."""
    prompt = question.suffix if context is not None else CONTEXT_TEXT + question.suffix
    if isinstance(question, Say):
        return client.generate(prompt, context=context, max_tokens=question.max_tokens, stop=question.stop, timeout=None)
    return client.score(prompt, question.labels, context=context, timeout=None)


def essence(result: Result) -> object:
    """What must be equal on both sides: every token and byte, or every label's every log-probability."""
    if isinstance(result, GenerateResult):
        return result.tokens, result.raw, result.finish_reason
    return tuple((label.tokens, label.logprobs) for label in result.labels)


class Asking:
    """One question on both sides, turn by turn, and what came back."""

    def __init__(self, question: Question, kept: Client, bare: Client, n_context: int) -> None:
        self.question = question
        self.results: dict[str, Result] = {}
        self.compared = self.different = self.wrongly_reused = 0
        self.parts: dict[str, list[dict[str, float]]] = {WITH: [], WITHOUT: []}  # seconds of each round, warm-ups too
        self._clients = {WITH: kept, WITHOUT: bare}
        self._n_context = n_context

    def turns(self) -> list[Turn]:
        return [self._turn(WITH, CONTEXT), self._turn(WITHOUT, None)]

    def _turn(self, side: str, context: str | None) -> Turn:
        def turn(clock: Clock) -> None:
            with clock(side):
                result = ask(self._clients[side], self.question, context)
            self._look_at(side, result)

        return turn

    def _look_at(self, side: str, result: Result) -> None:
        first = next(iter(self.results.values()), result)
        self.results[side] = result
        self.parts[side].append({part: getattr(result.timings, part) * 1e-6 for part in PARTS})
        self.compared += 1
        self.different += essence(result) != essence(first)
        n_prompt = first.usage.reused + first.usage.prefilled
        expected = self._n_context if side == WITH else 0
        usage = result.usage
        self.wrongly_reused += usage.reused != expected or usage.reused + usage.prefilled != n_prompt

    def stands_for(self, macs: DecisionMacs) -> dict[str, dict[str, int]]:
        """Tokens and multiply-adds of each side."""
        out: dict[str, dict[str, int]] = {}
        for side in (WITH, WITHOUT):
            usage = self.results[side].usage
            tokens = {"reused": usage.reused, "prefilled": usage.prefilled, "answered": usage.generated}
            out[side] = tokens | {"macs": macs.of(self.results[side])}
        return out


class DecisionMacs:
    """Multiply-adds of prompts and answers, from the model's tables."""

    def __init__(self, path: Path, cache: Path) -> None:
        with Engine() as engine, Model(engine, path, cache_dir=cache) as model:
            self._info = model.info
            self._tensors = model.gguf.tensors()

    def of_prompt(self, prefilled: int, reused: int) -> int:
        """Of a prefill behind what was reused."""
        return pass_macs(self._info, self._tensors, prefilled, before=reused)

    def of(self, result: Result) -> int:
        """Of prefill and answer together. The last token of an answer and of a label is not taken in."""
        usage = result.usage
        at = usage.reused + usage.prefilled
        total = self.of_prompt(usage.prefilled, usage.reused)
        if isinstance(result, ScoreResult):
            labels = [len(label.tokens) for label in result.labels]
            return total + sum(self._steps(n - 1, at) for n in labels)
        ended_by_token = result.finish_reason == "stop" and result.stop is None
        return total + self._steps(usage.generated - (0 if ended_by_token else 1), at)

    def _steps(self, n: int, at: int) -> int:
        return sum(pass_macs(self._info, self._tensors, 1, before=at + i) for i in range(n))


def measure_creation(client: Client, repeats: int, book: Book) -> None:
    """Creates and drops the context again and again: what the snapshot costs once."""

    def create(clock: Clock) -> None:
        with clock("create"):
            made = client.create_context(CONTEXT_TEXT, name="bench-again", timeout=None)
        if not made.created:
            raise RuntimeError("the context was there already")
        usage = made.usage
        stands_for["create"] = {"prefilled": usage.prefilled, "bytes": made.context.bytes}
        client.drop_context(made.context.id)

    stands_for: dict[str, dict[str, int]] = {}
    samples = interleave([create], repeats, progress=show_progress("creating the context"))
    book.add("the context", samples, stands_for)


def add_sums(book: Book, askings: list[Asking], repeats: int) -> None:
    """A group of rows for all questions together: per round and side the sum over the questions, and where the pool spent it."""
    group = f"all {len(askings)} questions, one after the other"
    samples: dict[str, list[float]] = {}
    work: dict[str, dict[str, int]] = {}
    for side in (WITH, WITHOUT):
        rows = [book.row(a.question.character + ": " + kind(a.question), side) for a in askings]
        samples[side] = [sum(times) for times in zip(*(row.samples for row in rows), strict=True)]
        units = rows[0].stands_for
        work[side] = {unit: sum(row.stands_for[unit] for row in rows) for unit in units}
        for part in PARTS:
            name = f"{side}, {part}"
            rounds = zip(*(a.parts[side][-repeats:] for a in askings), strict=True)
            samples[name] = [sum(parts[part] for parts in of_round) for of_round in rounds]
            work[name] = {}
    book.add(group, samples, work)
    book.ratio(group, WITHOUT, WITH)


def kind(question: Question) -> str:
    return "says" if isinstance(question, Say) else "chooses"


def measure_bursts(address: str, workers: int, answers: list[Asking], repeats: int, book: Book) -> int:
    """All questions at once from `workers` clients; how many of the answers were not those of before."""
    wrong = 0
    local = threading.local()
    opened: list[Client] = []

    def client(space: str) -> Client:
        """This thread's own: a client belongs to one thread."""
        if not hasattr(local, space):
            setattr(local, space, Client(address, space=space, timeout=None))
            opened.append(getattr(local, space))
        found: Client = getattr(local, space)
        return found

    def burst(side: str, space: str, context: str | None) -> Turn:
        def one(asking: Asking) -> bool:
            return essence(ask(client(space), asking.question, context)) != essence(asking.results[side])

        def turn(clock: Clock) -> None:
            nonlocal wrong
            with clock(side):
                different = list(threads.map(one, answers))
            wrong += sum(different)

        return turn

    group = f"all {len(answers)} questions, {workers} at a time"
    with ThreadPoolExecutor(workers) as threads:
        try:
            turns = [burst(WITH, "default", CONTEXT), burst(WITHOUT, "whole", None)]
            samples = interleave(turns, repeats, progress=show_progress(group))
        finally:
            for c in opened:
                c.close()
    book.add(group, samples, {side: {"decisions": len(answers)} for side in (WITH, WITHOUT)})
    book.ratio(group, WITHOUT, WITH)
    return wrong


def measure(pool: Supervisor, args: Any, repeats: int, macs: DecisionMacs, book: Book) -> tuple[list[Check], dict[str, Any]]:
    address = pool.config.address
    before = len(book.ratios)
    with Client(address, timeout=None) as kept, Client(address, space="whole", timeout=None) as bare:
        measure_creation(kept, min(repeats, 5), book)
        context = kept.create_context(CONTEXT_TEXT, name=CONTEXT).context
        askings = [Asking(q, kept, bare, context.n_tokens) for q in QUESTIONS]
        for i, asking in enumerate(askings):
            group = f"{asking.question.character}: {kind(asking.question)}"
            samples = interleave(asking.turns(), repeats, progress=show_progress(f"question {i + 1} of {len(askings)}"))
            book.add(group, samples, asking.stands_for(macs))
            book.ratio(group, WITHOUT, WITH)
    add_sums(book, askings, repeats)
    compared, different = sum(a.compared for a in askings), sum(a.different for a in askings)
    checks = [
        Check(what="answers of both sides are identical: every token, every log-probability", n=compared, failed=different),
        Check(
            what=f"{context.n_tokens} tokens were reused with the snapshot and none without, and the prompts were equally long",
            n=compared,
            failed=sum(a.wrongly_reused for a in askings),
        ),
    ]
    if args.workers > 1:
        wrong = measure_bursts(address, args.workers, askings, repeats, book)
        n = len(askings) * 2 * (repeats + 1)
        checks.append(Check(what="answers under load are those of before", n=n, failed=wrong))
    compared_by = book.ratios[before : before + len(askings)]
    saved = [book.row(r.group, WITHOUT).seconds.median - book.row(r.group, WITH).seconds.median for r in compared_by]
    once = book.row("the context", "create").seconds.median
    facts = {
        "questions_context_tokens": context.n_tokens,
        "questions_context_bytes": context.bytes,
        "median_of_question_ratios": Spread.of(r.pairs.median for r in compared_by).median,
        "questions_until_the_context_has_paid": once / Spread.of(saved).median,
    }
    return checks, facts
