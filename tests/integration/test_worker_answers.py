"""Several answers from one state, and answers kept as contexts.

Property: sample i of n is, token for token and value for value, the answer of a request of its own with stream base + i, whatever
else the worker does (FINDINGS rows 3 and 9); a context published from an answer is byte for byte the one that a create of the
same tokens makes, ends exactly where the answer's text does, or is not there at all. Tolerance: none. Reason: a game keeps such
contexts for hours, and what is off by one token in the first turn is in every later one.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from worker_kit import drop, expected, generate, ids, mapped_names, published

from geist_pool import protocol as p
from geist_pool.engine import Model
from geist_pool.store import layout, shm

HOT = p.Sampling(temperature=1.5, top_p=0.95, repeat_penalty=1.2, seed=12345, stream=7)


def samples(result: p.GenerateDone) -> list[p.SampleDone]:
    """All answers, the first one included."""
    fields = {name: getattr(result, name) for name in p.SampleDone.__struct_fields__}
    return [p.SampleDone(**fields), *result.more]


def stream_of(i: int) -> p.Sampling:
    return msgspec.structs.replace(HOT, stream=HOT.stream + i)


# ---- n samples


@pytest.mark.parametrize("suffix", [0, 1, 70])
def test_each_sample_is_a_request_of_its_own(paper_broker, model: Model, suffix: int) -> None:
    """Of a context and of a bare prompt; the prompt is taken in once."""
    broker = paper_broker()
    worker, other = broker.start(), broker.start(tier="scalar")
    chain = broker.create(worker, ids(130))
    many = broker.run(worker, generate(ids(suffix, seed=1), 20, n=5, sampling=HOT), chain)
    assert many.usage == p.Usage(reused=130, prefilled=suffix, generated=100)
    alone = [broker.run(other, generate(ids(suffix, seed=1), 20, sampling=stream_of(i)), chain) for i in range(5)]
    assert samples(many.result) == [samples(a.result)[0] for a in alone]
    assert len({s.tokens for s in samples(many.result)}) == 5, "the streams do not differ: this shows nothing"
    prompt = ids(130) + ids(suffix, seed=1)
    bare = broker.run(worker, generate(prompt, 20, n=5, sampling=HOT))
    assert bare.usage == p.Usage(reused=0, prefilled=130 + suffix, generated=100)
    assert samples(bare.result) == samples(many.result)
    assert list(samples(bare.result)[4].tokens) == expected(model, prompt, 20, stream_of(4))
    drop(chain)


def test_samples_end_each_in_its_own_way(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start()
    free = samples(broker.run(worker, generate(ids(20), 30, n=4, sampling=HOT)).result)
    eog, stop = (free[1].tokens[9],), (free[2].data[5:8],)
    many = samples(broker.run(worker, generate(ids(20), 30, n=4, sampling=HOT, eog=eog, stop=stop)).result)
    alone = [broker.run(worker, generate(ids(20), 30, sampling=stream_of(i), eog=eog, stop=stop)).result for i in range(4)]
    assert many == [samples(a)[0] for a in alone]
    assert len({(s.finish_reason, s.stop_index, len(s.tokens)) for s in many}) > 1


def test_a_stream_of_samples_adds_up(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start()
    job = broker.assign(worker, generate(ids(20), 10, n=3, sampling=HOT, stream=True))
    done = samples(broker.last_word(job).result)
    for i, sample in enumerate(done):
        parts = [m for _, m in broker.heard if isinstance(m, p.Tokens) and m.sample == i]
        assert tuple(t for part in parts for t in part.tokens) == sample.tokens
        assert b"".join(part.data for part in parts) == sample.data
        assert [part.index for part in parts] == list(range(10))
        assert tuple(lp for part in parts for lp in part.logprobs) == sample.logprobs


def test_cut_short_all_samples_are_there(paper_broker, model: Model) -> None:
    """Finished ones, the one under way, and those that were never begun."""
    broker = paper_broker()
    worker = broker.start(faults=("slow-decode=10",))
    job = broker.assign(worker, generate(ids(5), 12, n=4, stream=True, sampling=HOT))
    while not any(isinstance(m, p.Tokens) and m.sample == 1 for _, m in broker.heard):
        broker.receive()
    broker.send(worker, p.CancelJob(job, "deadline", finish=True))
    first, second, *rest = samples(broker.last_word(job).result)
    assert (first.finish_reason, list(first.tokens)) == ("length", expected(model, ids(5), 12, HOT))
    assert second.finish_reason == "deadline"
    assert list(second.tokens) == expected(model, ids(5), 12, stream_of(1))[: len(second.tokens)]
    assert 0 < len(second.tokens) < 12
    assert rest == [p.SampleDone((), b"", "deadline", None, ())] * 2
    whole = broker.run(worker, generate(ids(5), 5, n=2, sampling=HOT))
    assert [list(s.tokens) for s in samples(whole.result)] == [expected(model, ids(5), 5, stream_of(i)) for i in (0, 1)]


@pytest.mark.parametrize("slots", [1, 4])
def test_batch_mates_change_nothing(paper_broker, model: Model, slots: int) -> None:
    """Two generates, one of several samples, a long prefill and a score, in one worker at once (FINDINGS rows 3 and 9)."""
    broker = paper_broker()
    worker = broker.start(slots=slots, prefill_chunk=16)
    chain = broker.create(worker, ids(130))
    grant = broker.grant(worker, 430, chain)
    work: list[p.Work] = [
        generate(ids(3, seed=2), 25, sampling=HOT),
        generate((), 10, n=3, sampling=HOT),
        p.CreateWork(ids(300, seed=3), grant),
        p.ScoreWork(ids(40, seed=4), (ids(5, seed=5), ids(2, seed=6))),
    ]
    together = []
    for start in range(0, 4, slots):
        together += [broker.assign(worker, w, chain) for w in work[start : start + slots]]
        for job in together[start:]:
            assert isinstance(broker.last_word(job), p.Done)
    made = published(grant.ref)
    drop((grant.ref,))
    fresh = broker.start()
    alone = [broker.run(fresh, w, chain) for w in work]
    for job, single in zip(together, alone, strict=True):
        assert msgspec.structs.replace(broker.last_word(job).result) == single.result
        assert broker.last_word(job).usage == single.usage
    assert published(grant.ref) == made
    assert list(alone[0].result.tokens) == expected(model, ids(130) + ids(3, seed=2), 25, HOT)
    drop((*chain, grant.ref))


@pytest.mark.parametrize("point", ["attach", "prefill", "decode", "fork", "score", "save", "load"])
def test_a_cancel_is_heard_after_one_pass(paper_broker, model: Model, pool_name: str, tmp_path: Path, point: str) -> None:
    """Wherever a job is; its session, forks and contexts are free at once, and the next job is right (FINDINGS row 18)."""
    broker = paper_broker()
    slow = "slow-decode=100" if point == "fork" else f"slow-{point}={500 if point in ('attach', 'save', 'load') else 100}"
    worker = broker.start(slots=2, prefill_chunk=8, faults=(slow,))
    chain = broker.create(worker, ids(70)) if point != "prefill" else ()
    file, envelope = tmp_path / "a", broker.grant(worker, 70).envelope
    work: p.Work = generate(ids(200, seed=1) if point == "prefill" else (3,), 900, n=64 if point == "fork" else 1)
    if point == "score":
        work = p.ScoreWork((3,), (ids(2),) * 50)
    elif point in ("save", "load"):
        work = p.SaveWork(str(file), envelope)
        if point == "load":
            broker.run(worker, work, chain)
            work = p.LoadWork(str(file), broker.grant(worker, 70))
    job = broker.assign(worker, work, chain if point != "load" else ())
    broker.silent(250)
    broker.send(worker, p.CancelJob(job, "cancelled"))
    word = broker.last_word(job)
    if point not in ("save", "load"):  # these have few passes: the cancel may come too late
        assert isinstance(word, p.Failed)
        assert word.error.code == "cancelled"
    if isinstance(word, p.Done) and point == "load":
        drop((work.grant.ref,))
    for ref in chain:
        assert broker.answer(worker, p.Forget(ref.id)) == p.Forgotten(ref.id)
    assert mapped_names(worker.process.pid) == []
    assert list(broker.run(worker, generate(ids(5), 3)).result.tokens) == expected(model, ids(5), 3)
    drop(chain)


# ---- answers that are kept


def kept(paper, worker, work: p.GenerateWork, chain: p.Chain, n_prompt: int) -> tuple[p.GenerateDone, p.Grant]:
    """A generate under a ceiling of all it may come to."""
    grant = paper.grant(worker, n_prompt + work.max_tokens, chain, ceiling=True)
    return paper.run(worker, msgspec.structs.replace(work, grant=grant), chain).result, grant


def same_as_created(
    paper, worker, result: p.GenerateDone, grant: p.Grant, prompt: tuple[int, ...], chain: p.Chain, k: int
) -> None:
    """The published context is the one of prompt and the first k tokens, in every byte and figure; it is left there."""
    ref = result.published
    assert ref is not None
    n_chain = chain[-1].n_tokens if chain else 0
    (made,) = paper.create(worker, prompt[n_chain:] + result.tokens[:k], chain)[len(chain) :]
    assert published(ref) == published(made)
    assert ref.n_tokens == len(prompt) + k
    same = ("kv_bytes", "first_block", "n_blocks", "n_tokens")
    assert [getattr(ref, f) for f in same] == [getattr(made, f) for f in same]
    assert (ref.id, ref.image) == (grant.ref.id, grant.ref.image)
    with shm.Mapping(ref.image, ref.image_bytes) as mapped:
        envelope = layout.parse(mapped.view, what=ref.image).envelope
    assert envelope == msgspec.structs.replace(grant.envelope, n_tokens=ref.n_tokens, n_blocks=ref.n_blocks)
    drop((made,))


@pytest.mark.parametrize("n_prompt", [1, 54, 60, 64, 120])
@pytest.mark.parametrize("on_context", [False, True])
def test_an_answer_of_full_length_is_kept_whole(paper_broker, model: Model, n_prompt: int, on_context: bool) -> None:
    """Across block boundaries; the last token is taken in; what continues it equals a fresh prefill of everything."""
    broker = paper_broker()
    worker, other = broker.start(), broker.start(tier="scalar")
    chain = broker.create(worker, ids(70, seed=9)) if on_context else ()
    prompt = (ids(70, seed=9) if on_context else ()) + ids(n_prompt)
    result, grant = kept(broker, worker, generate(ids(n_prompt), 10, sampling=HOT), chain, len(prompt))
    assert (result.finish_reason, result.publish_error) == ("length", None)
    same_as_created(broker, worker, result, grant, prompt, chain, 10)
    after = (*chain, result.published)
    assert broker.answer(other, p.Announce(after)) == p.Mapped(grant.ref.id)
    done = broker.run(other, generate(ids(5, seed=3)), after)
    assert list(done.result.tokens) == expected(model, prompt + result.tokens + ids(5, seed=3))
    drop(after)


def test_an_end_token_is_no_part_of_the_context(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start()
    free = broker.run(worker, generate(ids(60), 100)).result
    n = next(i for i in range(5, 90) if free.tokens[i] not in free.tokens[:i])
    result, grant = kept(broker, worker, generate(ids(60), 100, eog=(free.tokens[n],)), (), 60)
    assert (result.finish_reason, len(result.tokens)) == ("stop", n)
    same_as_created(broker, worker, result, grant, ids(60), (), n)
    drop((result.published,))


def test_an_answer_of_nothing_is_the_prompt(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start()
    first = broker.run(worker, generate(ids(60), 1)).result.tokens[0]
    result, grant = kept(broker, worker, generate(ids(60), 100, eog=(first,)), (), 60)
    assert result.tokens == ()
    assert result.published.kv is None, "the ceiling had a block, the answer has none"
    same_as_created(broker, worker, result, grant, ids(60), (), 0)
    drop((result.published,))


def test_a_stop_string_is_no_part_of_the_context(paper_broker, model: Model, pool_name: str) -> None:
    """One that begins at a token: the state from before it, however many tokens it took; one that begins inside of one: none.

    Every cut of one answer is tried, with stop strings of 1 to 9 bytes, so each kind of boundary is among them.
    """
    broker = paper_broker()
    worker = broker.start()
    free = broker.run(worker, generate(ids(20), 14, sampling=HOT)).result
    ends = [0]
    for token in free.tokens:
        ends.append(ends[-1] + len(model.token_bytes(token)))
    seen = {"kept": 0, "kept, several tokens": 0, "inside": 0}
    for start in range(3, len(free.data) - 9, 2):
        for n in (1, 4, 9):
            stop = free.data[start : start + n]
            at = free.data.find(stop)
            work = generate(ids(20), 14, sampling=HOT, stop=(b"\xff\xfe", stop))
            result, grant = kept(broker, worker, work, (), 20)
            assert (result.finish_reason, result.data) == ("stop", free.data[:at])
            if at in ends:
                k = len(ends) - 1 - ends[::-1].index(at)
                same_as_created(broker, worker, result, grant, ids(20), (), k)
                drop((result.published,))
                seen["kept, several tokens" if len(result.tokens) - k > 1 else "kept"] += 1
            else:
                assert (result.published, result.publish_error) == (None, None)
                seen["inside"] += 1
    assert min(seen.values()) > 0, f"not every case came up: {seen}"
    assert shm.list_objects(pool_name) == []


def test_what_only_seemed_to_be_a_stop_string_is_in_the_context(paper_broker) -> None:
    """A stop string that begins again and again and never comes, up to the very end."""
    broker = paper_broker()
    worker = broker.start()
    free = broker.run(worker, generate(ids(20), 30, sampling=HOT)).result
    stops = tuple(bytes((b,)) + b"\xff\xff" for b in sorted(set(free.data)))[:16]
    result, grant = kept(broker, worker, generate(ids(20), 30, sampling=HOT, stop=(*stops, free.data[-1:] + b"\xff")), (), 20)
    assert (result.data, result.finish_reason) == (free.data, "length")
    same_as_created(broker, worker, result, grant, ids(20), (), 30)
    drop((result.published,))


def test_the_text_goes_into_its_place_among_the_messages(paper_broker) -> None:
    """With U+FFFD for what is no UTF-8, so that a new broker can go on with the conversation."""
    broker = paper_broker()
    worker = broker.start()
    grant = broker.grant(worker, 50, ceiling=True)
    said = (p.Message("user", "Hi"), p.Message("assistant", ""))
    envelope = msgspec.structs.replace(grant.envelope, messages=said)
    ref = msgspec.structs.replace(grant.ref, image_bytes=grant.ref.image_bytes + layout.PAGE)
    work = generate(ids(20), 30, sampling=HOT, grant=p.Grant(ref, envelope, True))
    result = broker.run(worker, work).result
    with shm.Mapping(result.published.image, result.published.image_bytes) as mapped:
        stored = layout.parse(mapped.view, what="x").envelope
    text = result.data.decode("utf-8", "replace")
    assert "\ufffd" in text, "every byte is UTF-8: this shows less than it should"
    assert stored.messages == (said[0], p.Message("assistant", text))
    drop((result.published,))


def test_a_full_session_leaves_no_context(paper_broker, pool_name: str) -> None:
    """Its last token has no position: prompt and answer are one more than fits."""
    broker = paper_broker()
    worker = broker.start(n_ctx=64)
    grant = broker.grant(worker, 64, ceiling=True)
    result = broker.run(worker, generate(ids(60), 30, grant=grant)).result
    assert (len(result.tokens), result.finish_reason) == (5, "length")
    assert (result.published, result.publish_error) == (None, None)
    assert shm.list_objects(pool_name) == []


@pytest.mark.parametrize("fault", ["fail-publish", "fail-seal"])
def test_an_answer_is_not_lost_with_its_context(paper_broker, pool_name: str, fault: str) -> None:
    broker = paper_broker()
    worker = broker.start(faults=(fault,))
    free = broker.run(worker, generate(ids(20), 30)).result
    result, _ = kept(broker, worker, generate(ids(20), 30), (), 20)
    assert (result.tokens, result.data, result.published) == (free.tokens, free.data, None)
    assert result.publish_error.code == "internal"
    assert shm.list_objects(pool_name) == []


def test_more_than_was_granted_is_refused(paper_broker, pool_name: str) -> None:
    broker = paper_broker()
    worker = broker.start()
    grant = broker.grant(worker, 25, ceiling=True)
    result = broker.run(worker, generate(ids(20), 30, grant=grant)).result
    assert len(result.tokens) == 30
    assert result.publish_error.code == "internal"
    assert broker.fail(worker, generate(ids(20), 5, n=2, grant=grant)).code == "internal"
    assert shm.list_objects(pool_name) == []


def test_a_cancelled_answer_is_not_kept(paper_broker, pool_name: str) -> None:
    broker = paper_broker()
    worker = broker.start(faults=("slow-decode=10",))
    job = broker.assign(worker, generate(ids(20), 900, stream=True, grant=broker.grant(worker, 920, ceiling=True)))
    broker.receive()
    broker.send(worker, p.CancelJob(job, "cancelled", finish=True))
    result = broker.last_word(job).result
    assert (result.finish_reason, result.published, result.publish_error) == ("cancelled", None, None)
    assert shm.list_objects(pool_name) == []


# ---- going on behind what a dead worker has said


def said_of(sample: p.SampleDone, n: int) -> p.Said:
    return p.Said(sample.tokens[:n], None if sample.logprobs is None else sample.logprobs[:n])


@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_answer_goes_on_where_it_broke_off(paper_broker, logprobs: int | None) -> None:
    """After any number of tokens, the last one included, the rest is the same and only the rest is sent; tokens and bytes count
    as if nothing had happened. What was said costs a prefill: no draw and no pass for each of its tokens."""
    broker = paper_broker()
    worker = broker.start()
    other = broker.start(tier="scalar", prefill_chunk=7)
    free = broker.run(worker, generate(ids(20), 14, sampling=HOT)).result.data
    stops = (free[:2] + b"\xff", free[-3:])
    work = generate(ids(20), 14, sampling=HOT, stop=stops, stream=True, logprobs=logprobs)
    whole = broker.run(worker, work)
    (sample,) = samples(whole.result)
    assert whole.result.finish_reason == "stop"
    for n in range(1, len(sample.tokens) + 1):
        broker.heard.clear()
        again = broker.run(other, msgspec.structs.replace(work, said=(said_of(sample, n),)))
        assert (again.result, again.usage) == (whole.result, whole.usage)
        parts = [m for _, m in broker.heard if isinstance(m, p.Tokens)]
        assert parts[0].index == n - 1, "only the last token of those that were said is gone through again"
        assert tuple(t for part in parts for t in part.tokens) == sample.tokens[n - 1 :]
        assert all(sample.data[part.byte_index :].startswith(part.data) for part in parts)


def test_samples_go_on_where_they_broke_off(paper_broker) -> None:
    """One whole, one begun, two not begun."""
    broker = paper_broker()
    worker, other = broker.start(), broker.start()
    chain = broker.create(worker, ids(70))
    broker.answer(other, p.Announce(chain))
    work = generate(ids(9, seed=2), 10, n=4, sampling=HOT, stream=True)
    whole = broker.run(worker, work, chain)
    first, second, *rest = samples(whole.result)
    said = (said_of(first, 10), said_of(second, 4), *(said_of(r, 0) for r in rest))
    again = broker.run(other, msgspec.structs.replace(work, said=said), chain)
    assert (again.result, again.usage) == (whole.result, whole.usage)
    drop(chain)


def test_what_is_kept_of_an_answer_that_broke_off(paper_broker, model: Model) -> None:
    """The same context, wherever it broke off, also if a stop string had begun before and is complete only afterwards."""
    broker = paper_broker()
    worker = broker.start()
    free = broker.run(worker, generate(ids(20), 14, sampling=HOT)).result
    ends = [0]
    for i in range(14):
        ends.append(ends[-1] + len(model.token_bytes(free.tokens[i])))
    kept_at: set[int | None] = set()
    for start in range(ends[5], ends[9]):
        work = generate(ids(20), 14, sampling=HOT, stop=(b"\xff\xfe", free.data[start : start + 9]), stream=True)
        whole, grant = kept(broker, worker, work, (), 20)
        (sample,) = samples(whole)
        if whole.published is not None:
            drop((whole.published,))
        for n in range(1, len(sample.tokens) + 1):
            again, grant = kept(broker, worker, msgspec.structs.replace(work, said=(said_of(sample, n),)), (), 20)
            assert (again.tokens, again.data, again.finish_reason) == (whole.tokens, whole.data, whole.finish_reason)
            assert (again.published is None) == (whole.published is None), (start, n)
            if again.published is not None:
                k = again.published.n_tokens - 20
                same_as_created(broker, worker, again, grant, ids(20), (), k)
                drop((again.published,))
                kept_at.add(k)
            else:
                kept_at.add(None)
    assert len(kept_at) > 3 and None in kept_at, kept_at


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("ending", ["none", "begun", "complete"])
def test_called_off_before_it_has_caught_up_it_is_what_was_said(paper_broker, model: Model, granted: bool, ending: str) -> None:
    """All that was streamed is in the answer, and no more: neither a byte held back nor one of a stop string is lost or added,
    wherever the cancel comes. Samples that were finished, begun and not begun."""
    broker = paper_broker()
    worker, slow = broker.start(), broker.start(prefill_chunk=4, faults=("slow-prefill=60", "slow-decode=60"))
    n = 1 if granted else 3
    free = broker.run(worker, generate(ids(4), 14, sampling=HOT)).result.data
    stop = {"none": b"\xff\xfe", "begun": free[-6:] + b"\xff", "complete": free[-6:]}[ending]
    work = generate(ids(4), 14, n=n, sampling=HOT, stop=(stop,), stream=True, logprobs=2)
    whole = samples(broker.run(worker, work).result)
    assert (whole[0].finish_reason == "stop") == (ending == "complete")
    said = tuple(said_of(s, k) for s, k in zip(whole, (14, 5, 0), strict=False))
    for wait in (30, 150, 350, 550):
        broker.heard.clear()
        grant = broker.grant(slow, 4 + 14, (), ceiling=True) if granted else None
        job = broker.assign(slow, msgspec.structs.replace(work, said=said, grant=grant))
        time.sleep(wait / 1000)
        broker.send(slow, p.CancelJob(job, "cancelled", finish=True))
        done = broker.last_word(job)
        first, *rest = samples(done.result)
        assert (first.tokens, first.data, first.logprobs) == (whole[0].tokens, whole[0].data, whole[0].logprobs)
        if ending == "complete":
            assert (first.finish_reason, first.stop_index) == ("stop", 0)
        if rest:
            assert rest[0].tokens[:5] == whole[1].tokens[:5] and whole[1].data.startswith(rest[0].data)
            assert rest[0].data == b"".join(map(model.token_bytes, rest[0].tokens)), "what was held back belongs to it"
        if done.result.published is not None:  # the cancel came too late
            drop((done.result.published,))
        assert done.usage.generated == sum(len(s.tokens) for s in samples(done.result))
        parts = [m for _, m in broker.heard if isinstance(m, p.Tokens) and m.sample == 0]
        assert all(whole[0].data[part.byte_index :].startswith(part.data) for part in parts)
