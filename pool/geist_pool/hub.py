"""Models from the Hugging Face hub: `hf:OWNER/REPO/FILE`, or `hf:OWNER/REPO@REVISION/FILE` for one commit, branch or tag.

The hub is asked for the file's size and hash first; the library fetches the file, going on where an earlier try was cut off; then
every byte is hashed here and compared. Only what agrees gets the model's name. The library's own settings hold (HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE, proxies).

    CACHE/models/hf/OWNER/REPO/REVISION/FILE        whole whenever it has this name
    CACHE/models/hf/OWNER/REPO/REVISION/FILE.json   where it is from: commit, hash, size
    CACHE/models/.hub/...                           what has arrived of a file that is not complete
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from geist_pool.downloads import CHUNK, Progress, no_progress, only_one
from geist_pool.errors import DownloadError

PREFIX: Final = "hf:"
POLL_S: Final = 0.25


class HubFile(Struct, frozen=True):
    """One file of a repository on the hub."""

    owner: str
    repo: str
    revision: str
    file: str  # path inside the repository

    def path(self, cache_dir: Path) -> Path:
        """Where it lies once it is fetched."""
        return cache_dir / "models" / "hf" / self.owner / self.repo / self.revision / self.file


class Origin(Struct, frozen=True):
    """What stands beside a fetched file."""

    source: str
    commit: str
    hash: str  # as the hub gives it: SHA-256, or git's SHA-1 for a small file
    n_bytes: int


def parse(text: str) -> HubFile:
    """Raises DownloadError for what is no `hf:OWNER/REPO[@REVISION]/FILE.gguf`."""
    word = r"[A-Za-z0-9][A-Za-z0-9._-]*"
    match = re.fullmatch(rf"hf:({word})/({word})(?:@({word}))?/((?:{word}/)*{word}\.gguf)", text)
    if match is None:
        raise DownloadError(f"a model of the hub is hf:OWNER/REPO/FILE.gguf or hf:OWNER/REPO@REVISION/FILE.gguf, not {text!r}")
    return HubFile(match[1], match[2], match[3] or "main", match[4])


def pull(text: str, cache_dir: Path, *, progress: Progress = no_progress, endpoint: str | None = None) -> Path:
    """Fetches the file unless it is there, and returns its path. endpoint: the hub's address; by default the library's.

    Raises DownloadError; what had arrived of a failed try stays for the next one, unless it was wrong.
    """
    wanted = parse(text)
    target = wanted.path(cache_dir)
    if target.is_file():
        return target
    unfinished = cache_dir / "models" / ".hub" / wanted.owner / wanted.repo / wanted.revision
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        with only_one(cache_dir / "models" / ".lock"):
            if target.is_file():  # another process fetched it while this one waited
                return target
            part, origin = _fetch(text, wanted, unfinished, endpoint, progress)
            _check(text, part, origin, progress)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.with_name(target.name + ".json").write_bytes(msgspec.json.encode(origin) + b"\n")
            part.replace(target)
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as e:
        raise DownloadError(f"{text} could not be stored in {cache_dir}: {e.strerror or e}") from e
    return target


def _fetch(text: str, wanted: HubFile, into: Path, endpoint: str | None, progress: Progress) -> tuple[Path, Origin]:
    """The file as it arrived, and what the hub says of it.

    The library's whole-file call begins anew each time; its transfer call, which takes a position to go on from, does not.
    """
    import huggingface_hub as hf  # takes a while, and only this needs it
    from huggingface_hub import errors
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    disable_progress_bars()
    repo = f"{wanted.owner}/{wanted.repo}"
    try:
        url = hf.hf_hub_url(repo, wanted.file, revision=wanted.revision, endpoint=endpoint)
        said = hf.get_hf_file_metadata(url)
        origin = _origin(text, said.commit_hash, said.etag, said.size)
        part = into / f"{origin.hash}.part"
        headers = build_hf_headers()
        if urlsplit(said.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # the token is the hub's, not its storage's
        part.touch()
        with part.open("r+b") as f, _watched(part, origin.n_bytes, progress):
            there = f.seek(0, os.SEEK_END)
            if there > origin.n_bytes:
                there = f.truncate(f.seek(0))
            http_get(said.location, f, resume_size=there, headers=headers, expected_size=origin.n_bytes)
            f.flush()
            os.fsync(f.fileno())
    except DownloadError:
        raise
    except errors.GatedRepoError:
        raise DownloadError(f"{repo} asks for consent first: accept its terms on the hub and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(f"the hub has no repository {repo}, or it is private and HF_TOKEN does not open it") from None
    except errors.RevisionNotFoundError:
        raise DownloadError(f"{repo} has no revision {wanted.revision}") from None
    except errors.EntryNotFoundError:
        raise DownloadError(f"{repo} has no file {wanted.file} at {wanted.revision}") from None
    except Exception as e:  # of whichever HTTP client the library uses; they have no base in common
        words = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise DownloadError(f"{text} could not be fetched from the hub: {words}") from e
    return part, origin


def _origin(text: str, commit: str | None, etag: str | None, size: int | None) -> Origin:
    """Raises DownloadError where the hub does not say what the file must be."""
    if commit is None or etag is None or size is None:
        raise DownloadError(f"the hub gives no commit, hash or size for {text}, so what arrives could not be checked")
    if not re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", etag):
        raise DownloadError(f"the hub gives a hash of an unknown kind for {text}: {etag}")
    return Origin(text, commit, etag, size)


@contextmanager
def _watched(part: Path, total: int, progress: Progress) -> Iterator[None]:
    """Tells how much has arrived, by the size of the file: the library's own way to tell it differs between its versions."""
    done = threading.Event()
    progress("fetching", 0, total)

    def watch() -> None:
        while not done.wait(POLL_S):
            progress("fetching", min(total, part.stat().st_size), total)

    thread = threading.Thread(target=watch, name="download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _check(text: str, part: Path, origin: Origin, progress: Progress) -> None:
    """Compares size and hash. What is wrong is removed, so that the next try begins anew. Raises DownloadError."""
    n = part.stat().st_size
    git = hashlib.sha1(b"blob %d\0" % n, usedforsecurity=False)  # what git calls a file that is not in LFS
    digest = hashlib.sha256() if len(origin.hash) == 64 else git
    with part.open("rb") as f:
        done = 0
        while block := f.read(CHUNK):
            digest.update(block)
            done += len(block)
            progress("checking", done, n)
    if n != origin.n_bytes or digest.hexdigest() != origin.hash:
        part.unlink()
        found = f"{n} bytes with hash {digest.hexdigest()}"
        raise DownloadError(f"{text} arrived as {found}; {origin.n_bytes} with {origin.hash} are expected; not kept")
