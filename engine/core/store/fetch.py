"""Downloads one file over HTTP. Interrupted downloads are resumed. The file is hashed while it is
written, and gets its final name when it is verified.

During a download, `.NAME.part` has the bytes so far, and `.NAME.state` describes their source. A
download is only resumed if the server confirms that the content is the same (If-Range with a strong
ETag), or if the SHA-256 is known and checked at the end. A bearer token is only sent to its own
origin, not after a redirect to another origin.
"""

import base64
import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from engine.core.errors import (
    EngineError,
    ModelError,
    ModelFormatError,
    NotFoundError,
    ResourceError,
)
from engine.core.store.file_formats import HEAD_BYTES, check_head
from engine.core.store.model_store import StoredModelFile

MAX_REDIRECTS = 10
MAX_FAILURES = 4  # max consecutive attempts without progress
RETRY_SECONDS = 1.0  # wait before the first retry; doubled after each failure
_REDIRECTS = (301, 302, 303, 307, 308)
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Progress(Protocol):
    """Receives the progress of a pull. `total` is None while the size is unknown."""

    def update(self, file: str, done: int, total: int | None) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    def update(self, file: str, done: int, total: int | None) -> None:
        pass

    def note(self, text: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class BearerToken:
    """A bearer token, which is only sent to one origin (scheme, host and port)."""

    origin: str  # any URL that has this scheme, host and port
    value: str = field(repr=False)

    def headers(self, url: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.value}"} if same_origin(self.origin, url) else {}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str  # relative to the folder: a file name, or SUBFOLDER/NAME
    url: str
    sha256: str | None = None


class _State(msgspec.Struct, frozen=True):
    url: str
    sha256: str | None
    etag: str | None  # the server's ETag if it is a strong one, else None
    total: int | None

    @property
    def resumable(self) -> bool:
        return self.sha256 is not None or self.etag is not None


class TryAgain(ModelError):
    """This attempt to download failed, but a retry may succeed."""


def new_client() -> httpx.Client:
    return httpx.Client(
        timeout=httpx.Timeout(60, connect=15), headers={"User-Agent": "engine-pull"}
    )


def same_origin(one: str, other: str) -> bool:
    a, b = httpx.URL(one), httpx.URL(other)
    return (a.scheme, a.host, _port(a)) == (b.scheme, b.host, _port(b))


def public_url(url: str) -> str:
    """The URL without parts that may be secret: user, password, query and fragment."""
    return str(httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None))


def open_stream(
    client: httpx.Client, url: str, headers: Mapping[str, str], token: BearerToken | None
) -> tuple[httpx.Response, list[httpx.Headers]]:
    """Send a GET request and follow redirects. Returns the last response, still open, and the
    headers of all responses.
    """
    hops: list[httpx.Headers] = []
    while len(hops) < MAX_REDIRECTS:
        own = token.headers(url) if token else {}
        request = client.build_request("GET", url, headers={**headers, **own})
        response = client.send(request, stream=True)
        hops.append(response.headers)
        if response.status_code not in _REDIRECTS or "location" not in response.headers:
            return response, hops
        response.close()
        url = _redirected(url, response.headers["location"])
    raise ModelError(f"{public_url(url)}: more than {MAX_REDIRECTS} redirects")


def _redirected(url: str, location: str) -> str:
    try:
        following = httpx.URL(url).join(location)
    except httpx.InvalidURL:
        raise ModelError(f"{public_url(url)} redirects to something that is no address") from None
    downgraded = (httpx.URL(url).scheme, following.scheme) == ("https", "http")
    if following.scheme not in ("http", "https") or downgraded:
        raise ModelError(
            f"{public_url(url)} redirects to {following.scheme}://, which is not followed; "
            "give the final address"
        )
    return str(following)


def check_status(response: httpx.Response, url: str) -> None:
    """Raise an error that says what to do, if the response has a failure status."""
    status, shown = response.status_code, public_url(url)
    if status in _RETRIED:
        raise TryAgain(f"{shown} answered {status}")
    if status in (401, 403):
        raise ModelError(
            f"{shown} answered {status}: the file needs permission; set HF_TOKEN to a hub token "
            "that has access, or choose another source"
        )
    if status in (404, 410):
        raise NotFoundError(f"{shown} does not exist ({status}); check the name and the revision")
    if status not in (200, 206):
        raise ModelError(f"{shown} answered {status}")


class Download:
    """Downloads one file into `folder`."""

    def __init__(
        self,
        client: httpx.Client,
        remote: RemoteFile,
        folder: Path,
        progress: Progress,
        token: BearerToken | None = None,
    ) -> None:
        self._client = client
        self._remote = remote
        self._url = public_url(remote.url)
        self._final = folder / remote.name
        self._part = self._final.with_name(f".{self._final.name}.part")
        self._state = self._final.with_name(f".{self._final.name}.state")
        self._progress = progress
        self._token = token

    def run(self) -> StoredModelFile:
        """Download and verify the file. If this is interrupted, the next run resumes the partial
        file.
        """
        self._final.parent.mkdir(mode=0o700, exist_ok=True)
        state = self._load_state()
        # This file was completed by an earlier pull, which was interrupted later.
        if state is not None and self._final.is_file():
            digest = _hash_file(self._final)
            self._verify(digest, state)
            return self._stored(digest)
        best, failures = 0, 0
        while True:
            try:
                return self._attempt()
            except (httpx.TransportError, TryAgain) as error:
                reached = self._part_size()
                failures = 1 if reached > best else failures + 1
                best = max(best, reached)
                reason = str(error) or type(error).__name__
                if failures >= MAX_FAILURES:
                    raise ModelError(
                        f"{self._url}: {reason}; what came is kept, run the same command to go on"
                    ) from error
                self._progress.note(f"{self._remote.name}: {reason}; trying again")
                time.sleep(RETRY_SECONDS * 2 ** (failures - 1))
            except OSError as error:
                raise self._disk_error(error) from error

    def _attempt(self) -> StoredModelFile:
        state, offset = self._load_state(), 0
        headers = {"Accept-Encoding": "identity"}
        if state is not None and state.resumable and self._part_size():
            offset = self._part_size()
            headers["Range"] = f"bytes={offset}-"
            if state.etag is not None:
                headers["If-Range"] = state.etag
        response, hops = open_stream(self._client, self._remote.url, headers, self._token)
        try:
            if response.status_code == 416:
                self._forget()
                raise TryAgain("the server has other content than before")
            check_status(response, self._remote.url)
            found = self._describe(response, hops)
            if response.status_code == 200:
                offset = 0
            elif state is None or not _continues(response, offset, state, found):
                self._forget()
                raise TryAgain("the server has other content than before")
            self._check_space(found, offset)
            self._state.write_bytes(msgspec.json.encode(found))
            digest = self._write(response, offset, found.total)
        finally:
            response.close()
        if found.total is not None and self._part_size() != found.total:
            raise TryAgain(f"only {self._part_size()} of {found.total} bytes came")
        self._verify(digest, found)
        os.replace(self._part, self._final)
        return self._stored(digest)

    def _describe(self, response: httpx.Response, hops: list[httpx.Headers]) -> _State:
        """Describe the content from the response headers, before the body is read."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ModelError(f"{self._url} is sent compressed although it was not asked to be")
        total = _total_size(response)
        sha256 = self._remote.sha256 or next(filter(None, map(_announced_sha256, hops)), None)
        chunked = "chunked" in response.headers.get("transfer-encoding", "")
        if total is None and sha256 is None and not chunked:
            raise ModelError(
                f"{self._url} does not say how long it is, so a cut could not be noticed; "
                "give its SHA-256 with --sha256"
            )
        etag = response.headers.get("etag", "")
        strong = etag if etag.startswith('"') else None
        return _State(url=self._url, sha256=sha256, etag=strong, total=total)

    def _write(self, response: httpx.Response, offset: int, total: int | None) -> str:
        name, done = self._remote.name, offset
        handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "r+b") as part:
            part.truncate(offset)
            digest = hashlib.file_digest(part, "sha256")
            part.seek(0)
            head = part.read(HEAD_BYTES)
            part.seek(0, os.SEEK_END)
            self._progress.update(name, done, total)
            # `iter_raw` yields bytes as they arrive. If the connection breaks, leaving the `with`
            # block still writes them to the file.
            for chunk in response.iter_raw():
                if len(head) < HEAD_BYTES:
                    head = (head + chunk)[:HEAD_BYTES]
                    if len(head) == HEAD_BYTES:
                        self._check_head(head)
                part.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                self._progress.update(name, done, total)
            part.flush()
            os.fsync(part.fileno())
        self._check_head(head)
        return digest.hexdigest()

    def _check_head(self, head: bytes) -> None:
        try:
            check_head(self._remote.name, head)
        except ModelFormatError:
            self._forget()
            raise

    def _verify(self, digest: str, state: _State) -> None:
        if state.sha256 is not None and digest != state.sha256:
            self._forget()
            raise ModelFormatError(
                f"{self._url}: SHA-256 is {digest}, expected {state.sha256}; the file is damaged "
                "or not the one meant, and was not kept"
            )

    def _check_space(self, found: _State, offset: int) -> None:
        if found.total is not None:
            require_space(self._part.parent, found.total - offset, self._remote.name)

    def _disk_error(self, error: OSError) -> EngineError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._forget()  # delete the partial file, which would keep the disk full
            return ResourceError(
                f"the disk filled up while writing {self._remote.name}; free some space under "
                f"{self._part.parent} and run the command again"
            )
        return ResourceError(f"cannot write {self._part}: {error.strerror}")

    def _load_state(self) -> _State | None:
        try:
            state = msgspec.json.decode(self._state.read_bytes(), type=_State)
        except (OSError, msgspec.DecodeError):
            return None
        wanted = self._remote.sha256
        if state.url != self._url or (wanted is not None and state.sha256 != wanted):
            return None
        return state

    def _forget(self) -> None:
        for path in (self._final, self._part, self._state):
            path.unlink(missing_ok=True)

    def _part_size(self) -> int:
        return self._part.stat().st_size if self._part.is_file() else 0

    def _stored(self, digest: str) -> StoredModelFile:
        return StoredModelFile(self._remote.name, self._final.stat().st_size, digest)


def require_space(folder: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{name} needs {needed / 1e9:.2f} GB more and {folder} has {free / 1e9:.2f} GB free; "
            "free some space, or set XDG_CACHE_HOME to a larger disk"
        )


def _hash_file(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _continues(response: httpx.Response, offset: int, state: _State, found: _State) -> bool:
    """Whether the 206 response continues the same file at our offset."""
    range_start = re.match(r"bytes (\d+)-", response.headers.get("content-range", ""))
    return (
        range_start is not None
        and int(range_start[1]) == offset
        and (found.total, found.sha256) == (state.total, state.sha256)
    )


def _total_size(response: httpx.Response) -> int | None:
    if response.status_code == 206:
        whole = re.search(r"/(\d+)$", response.headers.get("content-range", ""))
        return int(whole[1]) if whole else None
    length = response.headers.get("content-length", "")
    return int(length) if length.isdigit() else None


def _announced_sha256(headers: httpx.Headers) -> str | None:
    """The SHA-256 of the file, from the Hugging Face Hub's header for large files or from the
    standard digest header (RFC 9530). None if neither is there.
    """
    linked = headers.get("x-linked-etag", "").strip('"')
    if _SHA256.fullmatch(linked):
        return str(linked)
    digest = re.search(r"\bsha-256=:([A-Za-z0-9+/=]+):", headers.get("repr-digest", ""))
    raw = base64.b64decode(digest[1]) if digest else b""
    return raw.hex() if len(raw) == 32 else None


def _port(url: httpx.URL) -> int | None:
    return url.port or {"http": 80, "https": 443}.get(url.scheme)
