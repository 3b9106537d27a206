"""One answer of a generate job as it grows: its tokens, what of its bytes is certain, and which state it will have left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from geist_pool.engine import Model, Session
from geist_pool.protocol import GenerateWork, Said, SampleDone, TokenLogprob, Tokens
from geist_pool.text.stream import StopMatcher

FinishReason = Literal["stop", "length", "cancelled", "deadline"]
Say = Callable[[Tokens], None]
NOTHING_SAID: Final = Said(())


class Answer:
    """What sample `sample` of a job has said so far. `say` sends a part of a stream."""

    def __init__(self, work: GenerateWork, model: Model, job: str, attempt: int, sample: int, say: Say) -> None:
        self.tokens: list[int] = []
        self.result: SampleDone | None = None  # once it is finished
        self.ends = [0]  # ends[k]: bytes of the first k tokens
        self._work = work
        self._model = model
        self._address = (job, attempt)
        self._sample = sample
        self._said = work.said[sample] if work.said else NOTHING_SAID
        self._say = say
        self._logprobs: list[TokenLogprob] = []
        self._matcher = StopMatcher(work.stop)
        self._data = bytearray()
        self._stop_index: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stop_index is not None

    @property
    def n_certain(self) -> int:
        """Bytes that belong to the answer whatever comes."""
        return len(self._data)

    @property
    def holding(self) -> bool:
        """Whether a stop string may have begun."""
        return bool(self._matcher.held)

    def add(self, token: int, session: Session) -> None:
        """The session's next token, before it is taken in: its log-probability is among the pending ones."""
        logprob = self._logprob(token, session) if self._work.logprobs is not None else None
        data = self._take(token, logprob)
        self._emit((token,), data, None if logprob is None else (logprob,))

    def recall(self, n_tokens: int) -> None:
        """The answer up to its first `n_tokens`, as an earlier attempt has streamed them: they are not sent again."""
        said = self._said
        new = slice(len(self.tokens), n_tokens)
        logprobs: tuple[TokenLogprob | None, ...] = said.logprobs or (None,) * len(said.tokens)
        for token, logprob in zip(said.tokens[new], logprobs[new], strict=True):
            self._data += self._take(token, logprob)

    def _take(self, token: int, logprob: TokenLogprob | None) -> bytes:
        """One token more; the bytes that have become certain by it."""
        said = self._model.token_bytes(token)
        data, self._stop_index = self._matcher.feed(said)
        self.tokens.append(token)
        self.ends.append(self.ends[-1] + len(said))
        if logprob is not None:
            self._logprobs.append(logprob)
        return data

    def finish(self, reason: FinishReason) -> SampleDone:
        """The whole answer; bytes held back for a stop string that did not come belong to it. A later call gives the same.

        What an earlier attempt has streamed is part of it, also if this one was called off before it had gone through that.
        """
        if self.result is None:
            if len(self.tokens) < len(self._said.tokens):
                self.recall(len(self._said.tokens))
                if self.stopped:
                    reason = "stop"
            held = self._matcher.finish()
            if held:
                self._emit((), held, None)
            self.result = SampleDone(
                tokens=tuple(self.tokens),
                data=bytes(self._data),
                finish_reason=reason,
                stop_index=self._stop_index,
                logprobs=tuple(self._logprobs) if self._work.logprobs is not None else None,
            )
        return self.result

    def _emit(self, tokens: tuple[int, ...], data: bytes, logprobs: tuple[TokenLogprob, ...] | None) -> None:
        at = len(self._data)
        self._data += data
        if self._work.stream:
            index = len(self.tokens) - len(tokens)
            self._say(Tokens(*self._address, index, tokens, data, logprobs, at, self._sample))

    def _logprob(self, token: int, session: Session) -> TokenLogprob:
        k = self._work.logprobs
        value = float(session.logprobs((token,))[0])
        if not k:
            return TokenLogprob(token, value)
        ids, values = session.top(min(k, self._model.info.n_vocab))
        return TokenLogprob(token, value, tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def n_recalled(said: Said, work: GenerateWork, model: Model) -> int:
    """How many of the tokens that were streamed before may be prefilled in one go; the others are gone through one by one.

    The last one always is, since it may have been the answer's end. Where the answer is to be kept, so are those whose bytes may
    begin a stop string: the state before them may be the one that is kept (see Ending).
    """
    n = len(said.tokens) - 1
    if work.grant is None:
        return n
    matcher = StopMatcher(work.stop)
    ends, certain = [0], 0
    for token in said.tokens:
        piece = model.token_bytes(token)
        ends.append(ends[-1] + len(piece))
        certain += len(matcher.feed(piece)[0])
    while n > 0 and ends[n] > certain:
        n -= 1
    return n


class Ending:
    """Watches for the state that ends exactly where the answer's text does.

    Without a stop string that is the session's own, once it has taken in the last token. A stop string may have begun some tokens
    back, and a recurrent state cannot be cut back: so while one may have begun exactly at a token, a fork from before that token
    is kept. One that begins inside a token leaves no such state.
    """

    def __init__(self, session: Session, answer: Answer, *, watch: bool) -> None:
        """Without `watch` nobody will ask."""
        self._session = session
        self._answer = answer
        self._watch = watch
        self._start = session.position
        self._fork: Session | None = None

    def added(self) -> None:
        """The answer has one token more, which the session has not taken in."""
        answer = self._answer
        if not self._watch or answer.stopped:
            return
        if self._fork is not None and not (answer.holding and self._ends(self._fork)):
            self.close()
        if answer.holding and self._ends(self._session):
            self.close()
            self._fork = self._session.fork()

    def state(self) -> Session | None:
        """The session that is there, once the answer is finished; the last token is taken in if just that is missing.

        None where there is no such state: the text ends inside a token, or the session is full.
        """
        session, answer = self._session, self._answer
        if answer.stopped:
            return next((s for s in (session, self._fork) if s is not None and self._ends(s)), None)
        if session.position - self._start < len(answer.tokens):
            if session.position == session.n_ctx:
                return None
            session.decode(answer.tokens[-1])
        return session

    def close(self) -> None:
        """Lets go of the fork. Allowed twice."""
        if self._fork is not None:
            self._fork.close()
            self._fork = None

    def _ends(self, session: Session) -> bool:
        return self._answer.ends[session.position - self._start] == self._answer.n_certain
