"""One tree of exceptions, and the codes under which they travel.

An error says where: a stable code, a sentence, and (if a request is to blame) the path of the field. `code` is what a client in
another language matches on; the class is what a Python caller catches. `data` holds figures a program may want, such as
``{"tokens": 9000, "limit": 8192}``.
"""

from __future__ import annotations

from typing import ClassVar


class GeistPoolError(Exception):
    """Base of everything this package raises on purpose."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, path: str | None = None, retry_after: float | None = None, **data: object) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.retry_after = retry_after  # seconds, where trying again makes sense
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} (at {self.path})" if self.path else self.message


# ---- the request is at fault


class BadRequest(GeistPoolError):
    """The request cannot be understood or breaks a rule; `path` names the field."""

    code = "bad_request"


class Unsupported(GeistPoolError):
    """Well-formed, but not something this version or this model does."""

    code = "unsupported"


class UnknownContext(GeistPoolError):
    """No context of that id or name in the request's space."""

    code = "unknown_context"


class TooLong(GeistPoolError):
    """More tokens than fit; data: `tokens` and `limit`. Nothing is ever cut."""

    code = "too_long"


class TemplateMismatch(GeistPoolError):
    """The rendering with the new messages does not begin with the context's text; data: `position`, `context`, `rendered`."""

    code = "template_mismatch"


class TemplateError(GeistPoolError):
    """The model's chat template failed, ran too long or wrote too much."""

    code = "template_error"


# ---- the pool cannot do it now


class Busy(GeistPoolError):
    """The queue is full; `retry_after` says when to come back."""

    code = "busy"


class StoreFull(GeistPoolError):
    """No room for another context; data: `needed`, `limit`, `used`, `held`."""

    code = "store_full"


class Cancelled(GeistPoolError):
    """The request was cancelled."""

    code = "cancelled"


class DeadlineExceeded(GeistPoolError):
    """The request's own deadline passed."""

    code = "deadline"


class WorkerLost(GeistPoolError):
    """Workers died under this request more often than it is tried again."""

    code = "worker_lost"


class Stopping(GeistPoolError):
    """The pool is shutting down."""

    code = "stopping"


# ---- model, images, engine


class ModelError(GeistPoolError):
    """The model file is broken or incomplete; the message names key, tensor or byte."""

    code = "model"


class ImageDamaged(GeistPoolError):
    """An image, a stored object or a packed file is cut, flipped or inconsistent."""

    code = "image_damaged"


class ImageMismatch(GeistPoolError):
    """A sound image or packed file of another model, KV type, version or byte order."""

    code = "image_mismatch"


class NonFinite(GeistPoolError):
    """A logit came out infinite or NaN."""

    code = "nonfinite"


class EngineError(GeistPoolError):
    """The engine refused a call for another reason (out of memory, input/output, a call that does not fit)."""

    code = "engine"


class Internal(GeistPoolError):
    """A fault of this program."""

    code = "internal"


# ---- this side of the wire only


class ConfigError(GeistPoolError):
    """A setting is wrong; `path` names it."""

    code = "config"


class NameTaken(ConfigError):
    """A pool of this name runs already; `path` is "name"."""

    code = "name_taken"


class PoolLost(GeistPoolError):
    """The supervisor gave up: the pool's processes died again and again."""

    code = "pool_lost"


class NoAnswer(GeistPoolError):
    """The client waited in vain: no pool at the address, or none that answered in time."""

    code = "no_answer"


class ProtocolError(GeistPoolError):
    """Bytes on the wire that are no message of this protocol."""

    code = "protocol"


class DownloadError(GeistPoolError):
    """A model could not be fetched, or is not the one that was asked for."""

    code = "download"


def _tree(cls: type[GeistPoolError]) -> list[type[GeistPoolError]]:
    return [cls, *(c for sub in cls.__subclasses__() for c in _tree(sub))]


CODES: dict[str, type[GeistPoolError]] = {}
for _cls in _tree(GeistPoolError):
    CODES[_cls.code] = _cls  # the base's "internal" is overwritten by Internal


def from_wire(code: str, message: str, path: str | None, retry_after: float | None, data: dict[str, object]) -> GeistPoolError:
    """The exception for an error that came over the wire; an unknown code becomes the base class with the code in front."""
    cls = CODES.get(code)
    reserved = {"path", "retry_after"}
    data = {k: v for k, v in data.items() if k not in reserved}
    if cls is None:
        return GeistPoolError(f"{code}: {message}", path=path, retry_after=retry_after, **data)
    return cls(message, path=path, retry_after=retry_after, **data)
