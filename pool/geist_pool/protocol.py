"""Every message of the pool, in one place.

Clients and broker: multipart ``[b"GP1", request id, body]``; the body is MessagePack, or JSON when its first byte is ``{``, and a
reply comes back in the coding of its request. Behind ``GP1`` the request id is 1 to 64 bytes of the client's choice, unique among
its requests in flight. A request is a map with the key ``op``; a reply is a map with ``ok``.

Broker and workers: the same structs' manner over their own socket, MessagePack only, one frame, tagged ``kind``.

All structs are frozen and refuse unknown fields; sizes are checked against `LIMITS` before anything is decoded or done.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from geist_pool.errors import GeistPoolError

MAGIC: Final = b"GP1"
PROTOCOL_VERSION: Final = 1


class Limits(Struct, frozen=True):
    """The one table of limits. Counts are items, *_bytes are bytes; beyond one of them is `bad_request` that names the field."""

    body_bytes: int = 8 << 20
    envelope_frames: int = 8
    request_id_bytes: int = 64
    name_bytes: int = 128
    space_bytes: int = 64
    text_bytes: int = 4 << 20
    messages: int = 1024
    tokens: int = 1 << 20
    labels: int = 255
    label_tokens: int = 64
    stops: int = 16
    stop_bytes: int = 256
    top_logprobs: int = 20
    samples: int = 64
    max_tokens: int = 1 << 20
    deadline_ms: int = 24 * 3600 * 1000
    ttl_s: int = 10 * 365 * 24 * 3600


LIMITS: Final = Limits()

Name = Annotated[str, Meta(min_length=1, max_length=LIMITS.name_bytes)]
Space = Annotated[str, Meta(min_length=1, max_length=LIMITS.space_bytes)]
Text = Annotated[str, Meta(max_length=LIMITS.text_bytes)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=LIMITS.tokens)]


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Text


Messages = Annotated[tuple[Message, ...], Meta(min_length=1, max_length=LIMITS.messages)]


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """How the next token is drawn. The default is greedy; ties go to the lower id. Draws depend on (seed, stream, position)."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: off
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # 0: off
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0  # 1: off
    repeat_last_n: Annotated[int, Meta(ge=-1, le=1 << 20)] = 64  # -1: all
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None  # None: the broker draws one and returns it
    stream: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0


# ---- client -> broker ------------------------------------------------------------------------------------------------


class _Request(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", kw_only=True):
    space: Space = "default"
    deadline_ms: Annotated[int, Meta(gt=0, le=LIMITS.deadline_ms)] | None = None  # from arrival at the broker


class Info(_Request, frozen=True, tag="info"):
    """What model and pool this is. -> InfoResult"""


class Stats(_Request, frozen=True, tag="stats"):
    """Counters and gauges. -> StatsResult"""


class Tokenize(_Request, frozen=True, kw_only=True, tag="tokenize"):
    """Token ids of a text on its own, without BOS. -> TokenizeResult"""

    text: Text
    special: bool = False  # texts of control tokens become those tokens


class _Prompted(_Request, frozen=True, kw_only=True):
    """Exactly one of text, messages, tokens; none means an empty suffix where a context is given."""

    text: Text | None = None
    messages: Messages | None = None
    tokens: TokenIds | None = None
    special: bool = False
    template_args: dict[str, bool | int | float | str | None] = {}


class ContextCreate(_Prompted, frozen=True, kw_only=True, tag="context.create"):
    """Compute a context and keep it. -> ContextResult"""

    on: Name | None = None  # id or name of a context that this one continues
    name: Name | None = None
    ttl_s: Annotated[int, Meta(gt=0, le=LIMITS.ttl_s)] | None = None
    pin: bool = False  # never evicted


class ContextList(_Request, frozen=True, tag="context.list"):
    """All contexts of the space. -> ContextListResult"""


class ContextGet(_Request, frozen=True, kw_only=True, tag="context.get"):
    """One context by id or name. -> ContextResult"""

    context: Name


class ContextDrop(_Request, frozen=True, kw_only=True, tag="context.drop"):
    """Forget a context; requests that hold it finish. -> ContextDropResult"""

    context: Name


class Publish(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to keep the context that a generate leaves: everything up to the end of its text, exactly."""

    name: Name | None = None
    ttl_s: Annotated[int, Meta(gt=0, le=LIMITS.ttl_s)] | None = None
    pin: bool = False


class ContextSave(_Request, frozen=True, kw_only=True, tag="context.save"):
    """Write a context to the pool's own directory, under a name there (its own by default). -> SavedResult"""

    context: Name
    saved: Name | None = None


class ContextLoad(_Request, frozen=True, kw_only=True, tag="context.load"):
    """Bring a saved context back into shared memory; checked like any image. -> ContextResult"""

    saved: Name
    name: Name | None = None  # instead of the one it had
    ttl_s: Annotated[int, Meta(gt=0, le=LIMITS.ttl_s)] | None = None
    pin: bool = False


class ContextSaved(_Request, frozen=True, tag="context.saved"):
    """What the space has saved. -> SavedListResult"""


class Story(_Request, frozen=True, kw_only=True, tag="story"):
    """What happened to a request, job, context or worker, as far as it is remembered; counts and ids only. -> StoryResult"""

    id: Name


class Generate(_Prompted, frozen=True, kw_only=True, tag="generate"):
    """Continue a context by a suffix, or a whole prompt where `context` is None, and generate. -> GenerateResult, before it
    GenerateChunks where `stream` is set. With `n` > 1, sample i draws from stream sampling.stream + i; all continue one state."""

    context: Name | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=LIMITS.max_tokens)] = 64
    sampling: Sampling = Sampling()
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=LIMITS.stops)] = ()
    stream: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=LIMITS.top_logprobs)] | None = None  # None: none; k: each token's and the top k
    ignore_eog: bool = False  # go on past end-of-generation tokens
    n: Annotated[int, Meta(ge=1, le=LIMITS.samples)] = 1
    publish: Publish | None = None  # keep prompt and answer as a context; only with n = 1


class Score(_Prompted, frozen=True, kw_only=True, tag="score"):
    """Log-probabilities of whole labels as continuations of context and suffix. -> ScoreResult"""

    context: Name | None = None
    labels: Annotated[tuple[Text | TokenIds, ...], Meta(min_length=1, max_length=LIMITS.labels)]


class Cancel(_Request, frozen=True, kw_only=True, tag="cancel"):
    """End a request of the same client. -> CancelResult"""

    id: str  # its request id: as text if it is UTF-8, else in hexadecimal with "hex:" in front


Request = (
    Info
    | Stats
    | Tokenize
    | ContextCreate
    | ContextList
    | ContextGet
    | ContextDrop
    | ContextSave
    | ContextLoad
    | ContextSaved
    | Generate
    | Score
    | Cancel
    | Story
)

# ---- broker -> client ------------------------------------------------------------------------------------------------


class Usage(Struct, frozen=True):
    """Tokens: taken from a snapshot, computed for this request's prompt, generated (or scored)."""

    reused: int = 0
    prefilled: int = 0
    generated: int = 0


class Timings(Struct, frozen=True):
    """Microseconds, measured where the work was done; total is the broker's, from arrival to reply."""

    queue: int = 0
    attach: int = 0
    prefill: int = 0
    decode: int = 0
    score: int = 0
    publish: int = 0
    total: int = 0


class Mismatch(Struct, frozen=True):
    """Why nothing more was reused: the first position at which the nearest context of the space differs from the prompt."""

    context: str
    position: int


class ContextInfo(Struct, frozen=True):
    """A context as clients see it. Times are Unix seconds."""

    id: str
    name: str | None  # the last of `names`
    space: str
    n_tokens: int
    parent: str | None
    bytes: int  # of shared memory that is this context's own
    created: float
    last_used: float
    expires: float | None
    pinned: bool
    leases: int
    names: tuple[str, ...] = ()  # all that lead to it, in the order in which they were given


class TokenLogprob(Struct, frozen=True):
    """A token's log-probability under the model's own distribution (before temperature and penalties), <= 0."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class _Served(Struct, frozen=True, kw_only=True):
    usage: Usage
    timings: Timings
    worker: str | None = None
    attempts: int = 1
    context: str | None = None  # id of the context that was continued
    join: Literal["clean", "split"] | None = None
    mismatch: Mismatch | None = None


class InfoResult(Struct, frozen=True, tag_field="type", tag="info"):
    protocol: int
    version: str
    pool: str
    model: str
    architecture: str
    fingerprint: str
    n_vocab: int
    n_ctx: int
    kv_type: str
    has_template: bool
    workers: int
    slots: int


class TokenizeResult(Struct, frozen=True, tag_field="type", tag="tokenize"):
    tokens: tuple[int, ...]


class ContextResult(Struct, frozen=True, tag_field="type", tag="context", kw_only=True):
    context: ContextInfo
    created: bool  # False: it existed, or another request was already making it
    usage: Usage = Usage()
    timings: Timings = Timings()
    worker: str | None = None
    base: str | None = None  # the context it was computed on top of
    join: Literal["clean", "split"] | None = None
    mismatch: Mismatch | None = None


class ContextListResult(Struct, frozen=True, tag_field="type", tag="contexts"):
    contexts: tuple[ContextInfo, ...]


class ContextDropResult(Struct, frozen=True, tag_field="type", tag="dropped"):
    id: str


class GenerateChunk(Struct, frozen=True, tag_field="type", tag="chunk"):
    """New tokens of a stream, and the text that became certain with them (it may lag behind the tokens)."""

    index: int  # of the first token in the whole answer
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    sample: int = 0


class Sample(Struct, frozen=True, kw_only=True):
    """One of several answers; fields as in GenerateResult."""

    text: str
    raw: bytes = msgspec.field(name="bytes")
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length", "cancelled", "deadline"]
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


class GenerateResult(_Served, frozen=True, kw_only=True, tag_field="type", tag="generate"):
    """The whole answer. `text` has U+FFFD where bytes are no UTF-8; `raw` ("bytes" on the wire; base64 in JSON) is exact. Neither
    holds the stop string; an end-of-generation token is not among `tokens`."""

    text: str
    raw: bytes = msgspec.field(name="bytes")
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length", "cancelled", "deadline"]
    stop: str | None = None  # the stop string that ended it; None with "stop" is an end-of-generation token
    seed: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    samples: tuple[Sample, ...] = ()  # all n of them where n > 1; the fields above are those of the first
    published: ContextInfo | None = None
    publish_error: ErrorBody | None = None  # the answer is there, but it could not be kept


class LabelScore(Struct, frozen=True):
    """Log-probabilities of a label's tokens, each given everything before it; sum and mean of them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    sum: float
    mean: float
    join: Literal["clean", "split"] | None = None


class ScoreResult(_Served, frozen=True, kw_only=True, tag_field="type", tag="score"):
    labels: tuple[LabelScore, ...]  # in the request's order
    best: int  # index of the largest sum; ties go to the lower index
    best_mean: int  # of the largest mean


class SavedInfo(Struct, frozen=True):
    """A context in a file of the pool's directory."""

    saved: str
    space: str
    n_tokens: int
    bytes: int  # of the file
    written: float  # Unix seconds
    fingerprint: str  # of the model it belongs to


class SavedResult(Struct, frozen=True, tag_field="type", tag="saved"):
    info: SavedInfo


class SavedListResult(Struct, frozen=True, tag_field="type", tag="saved_list"):
    contexts: tuple[SavedInfo, ...]


class StoryEvent(Struct, frozen=True):
    at: float  # Unix seconds
    what: str
    fields: dict[str, str | int | float | bool | None] = {}


class StoryResult(Struct, frozen=True, tag_field="type", tag="story"):
    id: str
    events: tuple[StoryEvent, ...]  # oldest first


class CancelResult(Struct, frozen=True, tag_field="type", tag="cancel"):
    found: bool


class SpaceStats(Struct, frozen=True):
    """One space's share."""

    requests: int = 0
    queue: int = 0
    contexts: int = 0
    bytes: int = 0
    tokens_reused: int = 0
    tokens_prefilled: int = 0
    tokens_generated: int = 0


class WorkerStats(Struct, frozen=True):
    """One live worker, as of its last word."""

    worker: str
    pid: int
    busy: int  # jobs it holds
    slots: int
    jobs_done: int
    passes: int
    tokens_prefilled: int
    tokens_generated: int
    contexts_mapped: int
    rss_bytes: int  # resident, shared mappings included
    private_bytes: int  # of these, private to the process


class StatsResult(Struct, frozen=True, tag_field="type", tag="stats"):
    """Counters since the broker's start, and gauges. Bytes are bytes of shared memory."""

    uptime_s: float
    workers: int
    workers_busy: int
    queue: int
    requests: dict[str, int]  # by op
    errors: dict[str, int]  # by code
    tokens_reused: int
    tokens_prefilled: int
    tokens_generated: int
    contexts: int
    store_bytes: int
    store_limit: int
    store_orphaned_bytes: int
    store_unmapping_bytes: int
    evictions: int
    jobs_retried: int
    workers_lost: int
    chunks_dropped: int
    # since the last addition; all have defaults so that an older broker's answer can still be read
    store_bytes_by_kind: dict[str, int] = {}  # image, kv, orphaned, unmapping, reserved: what store_bytes is made of
    evictions_by_cause: dict[str, int] = {}  # room, ttl, dropped, damaged
    spaces: dict[str, SpaceStats] = {}
    fleet: tuple[WorkerStats, ...] = ()
    passes: int = 0  # forward passes of all workers that are or were
    attach_count: int = 0
    attach_us: int = 0  # sum; the mean is attach_us / attach_count
    queue_us: int = 0  # sum over requests that reached a worker
    worker_restarts: int = 0
    replies_replayed: int = 0  # answers given again to a repeated request id
    messages_dropped: int = 0  # unreadable, from nobody known, or stale
    requests_active: int = 0


Result = (
    InfoResult
    | TokenizeResult
    | ContextResult
    | ContextListResult
    | ContextDropResult
    | SavedResult
    | SavedListResult
    | StoryResult
    | GenerateChunk
    | GenerateResult
    | ScoreResult
    | CancelResult
    | StatsResult
)


class ErrorBody(Struct, frozen=True, omit_defaults=True):
    code: str
    message: str
    path: str | None = None
    retry_after: float | None = None
    data: dict[str, object] = {}


class Reply(Struct, frozen=True, omit_defaults=True):
    """`final` False marks a chunk; every request gets exactly one final reply."""

    ok: bool
    result: Result | None = None
    error: ErrorBody | None = None
    final: bool = True


def error_body(error: GeistPoolError) -> ErrorBody:
    return ErrorBody(code=error.code, message=error.message, path=error.path, retry_after=error.retry_after, data=error.data)


# ---- broker <-> worker -----------------------------------------------------------------------------------------------


class Geometry(Struct, frozen=True):
    """What an image's size follows from (geist_image_geometry of geist.h), in bytes; blocks are 64 positions."""

    header_bytes: int
    n_vocab: int
    recurrent_bytes: int
    kv_bytes_per_token: int
    kv_block_bytes: int


class ContextRef(Struct, frozen=True):
    """A sealed context's objects. Its own blocks are [first_block, first_block + n_blocks); those before are its ancestors'."""

    id: str
    image: str  # name of the shared-memory object that holds envelope and thin image
    image_bytes: int  # of the whole object
    kv: str | None  # name of the object with its own whole KV blocks; None if it has none
    kv_bytes: int
    first_block: int
    n_blocks: int
    n_tokens: int


Chain = tuple[ContextRef, ...]  # root first; the last one is the context itself


class Envelope(Struct, frozen=True):
    """What the store keeps in front of an image; enough to find the context again after a crash."""

    id: str
    name: str | None
    space: str
    parent: str | None
    created: float  # Unix seconds
    ttl_s: int | None
    pin: bool
    n_tokens: int
    first_block: int
    n_blocks: int
    messages: tuple[Message, ...] | None = None
    template_args: dict[str, bool | int | float | str | None] = {}
    chain: Chain = ()  # the ancestors' objects, root first: their KV is needed even when their own images are gone


class Grant(Struct, frozen=True):
    """Permission to create exactly these objects, exclusively. `ref` is what they will be once sealed.

    With `ceiling`, the length is not known yet (a generate's answer): sizes and counts in `ref` and `envelope` are upper bounds,
    the worker creates what the true length needs under the same names and tells it in its Done. The last of the envelope's
    messages, if it has any, is then the assistant's with empty content: a place for the answer's text (U+FFFD for what is no
    UTF-8)."""

    ref: ContextRef
    envelope: Envelope
    ceiling: bool = False


class CreateWork(Struct, frozen=True, tag_field="work", tag="create"):
    """Take in `tokens` behind the chain, then publish under the grant."""

    tokens: tuple[int, ...]
    grant: Grant


class Said(Struct, frozen=True):
    """What the client has already been sent of one sample, by a worker that has died since."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each token, where the request wants them


class GenerateWork(Struct, frozen=True, tag_field="work", tag="generate"):
    tokens: tuple[int, ...]  # suffix, or the whole prompt where the chain is empty
    max_tokens: int
    sampling: Sampling  # with its seed
    stop: tuple[bytes, ...]
    eog: tuple[int, ...]  # tokens that end it; empty: none
    stream: bool
    logprobs: int | None
    n: int = 1
    grant: Grant | None = None  # publish what it leaves; only with n = 1
    said: tuple[Said, ...] = ()  # by sample, or nothing: prefilled instead of being drawn again


class SaveWork(Struct, frozen=True, tag_field="work", tag="save"):
    """Write the chain's context as a flat image with its envelope to a file: a temporary name first, then renamed."""

    path: str
    envelope: Envelope


class LoadWork(Struct, frozen=True, tag_field="work", tag="load"):
    """Read such a file, verify it, publish it under the grant."""

    path: str
    grant: Grant


class ScoreWork(Struct, frozen=True, tag_field="work", tag="score"):
    tokens: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]


Work = CreateWork | GenerateWork | ScoreWork | SaveWork | LoadWork


class _ToWorker(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Assign(_ToWorker, frozen=True, tag="assign"):
    job: str
    attempt: int
    chain: Chain
    work: Work


class CancelJob(_ToWorker, frozen=True, tag="cancel"):
    """Drop the job between passes; answered by Failed(code "cancelled" | "deadline") or a Done that was already under way.
    With `finish` a generate ends with what it has (Done, finish_reason as given) instead."""

    job: str
    reason: Literal["cancelled", "deadline"]
    finish: bool = False


class Announce(_ToWorker, frozen=True, tag="announce"):
    """A new context: map and verify it now, between passes. Answered by Mapped."""

    chain: Chain


class Forget(_ToWorker, frozen=True, tag="forget"):
    """Unmap between passes once no session needs it. Answered by Forgotten (also when it was not mapped)."""

    context: str


class Ping(_ToWorker, frozen=True, tag="ping"):
    n: int


class Shutdown(_ToWorker, frozen=True, tag="shutdown"):
    pass


ToWorker = Assign | CancelJob | Announce | Forget | Ping | Shutdown


class _FromWorker(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Hello(_FromWorker, frozen=True, tag="hello"):
    """First word of a worker, when its model is loaded."""

    worker: str
    pid: int
    protocol: int
    fingerprint: str  # hexadecimal
    numerics: int
    image_format: int
    geometry: Geometry
    architecture: str
    n_vocab: int
    n_ctx: int
    kv_type: str
    tier: str
    threads: int
    slots: int


class Tokens(_FromWorker, frozen=True, tag="tokens"):
    """Stream of a generate job; `index` counts its tokens from 0, so that a second attempt's repeats can be told."""

    job: str
    attempt: int
    index: int
    tokens: tuple[int, ...]
    data: bytes  # newly certain bytes (stop strings held back)
    logprobs: tuple[TokenLogprob, ...] | None = None
    byte_index: int = 0  # offset of `data` in the whole answer
    sample: int = 0


class CreateDone(Struct, frozen=True, tag_field="work", tag="create"):
    image_id: int


class SampleDone(Struct, frozen=True):
    """Fields as in GenerateDone."""

    tokens: tuple[int, ...]
    data: bytes
    finish_reason: Literal["stop", "length", "cancelled", "deadline"]
    stop_index: int | None
    logprobs: tuple[TokenLogprob, ...] | None


class GenerateDone(Struct, frozen=True, tag_field="work", tag="generate"):
    tokens: tuple[int, ...]  # without the end-of-generation token
    data: bytes  # up to the stop string
    finish_reason: Literal["stop", "length", "cancelled", "deadline"]
    stop_index: int | None
    logprobs: tuple[TokenLogprob, ...] | None
    more: tuple[SampleDone, ...] = ()  # samples 1 .. n-1
    published: ContextRef | None = None  # under the grant, with its true sizes
    image_id: int = 0  # of what was published
    publish_error: ErrorBody | None = None  # publishing was tried and failed; the answer is whole
    # With a grant, nothing published and no error: the text ends inside a token (a stop string) or the session is full, so that
    # no state is the context's and the broker has it computed from the text; or the answer was cut short (cancelled, deadline).


class SaveDone(Struct, frozen=True, tag_field="work", tag="save"):
    bytes: int  # of the file


class LoadDone(Struct, frozen=True, tag_field="work", tag="load"):
    image_id: int
    tokens: tuple[int, ...]


class ScoreDone(Struct, frozen=True, tag_field="work", tag="score"):
    logprobs: tuple[tuple[float, ...], ...]


class Done(_FromWorker, frozen=True, tag="done"):
    job: str
    attempt: int
    result: CreateDone | GenerateDone | ScoreDone | SaveDone | LoadDone
    usage: Usage
    timings: Timings  # attach, prefill, decode, score, publish


class Failed(_FromWorker, frozen=True, tag="failed"):
    job: str
    attempt: int
    error: ErrorBody


class Mapped(_FromWorker, frozen=True, tag="mapped"):
    context: str
    error: ErrorBody | None = None  # it could not be mapped or did not verify


class Forgotten(_FromWorker, frozen=True, tag="forgotten"):
    context: str


class Pong(_FromWorker, frozen=True, tag="pong"):
    n: int
    passes: int = 0  # since the worker's start, as the rest
    tokens_prefilled: int = 0
    tokens_generated: int = 0
    contexts_mapped: int = 0
    rss_bytes: int = 0
    private_bytes: int = 0


FromWorker = Hello | Tokens | Done | Failed | Mapped | Forgotten | Pong

to_worker_decoder: Final = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder: Final = msgspec.msgpack.Decoder(FromWorker)
encode: Final = msgspec.msgpack.Encoder().encode
