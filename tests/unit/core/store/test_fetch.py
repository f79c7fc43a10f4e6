"""A download over answers that a test writes: what is continued, how often, and from where."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from engine.core.errors import ModelError
from engine.core.store import fetch
from engine.core.store.fetch import Download, RemoteFile, new_client, open_stream
from engine.core.store.model_store import StoredModelFile

BODY = b"GGUF" + bytes(range(96))
URL = "https://models.test/m.gguf"
Answer = Callable[[httpx.Request], httpx.Response]


class Quiet:
    def note(self, text: str) -> None:
        pass

    def update(self, name: str, done: int, total: int | None) -> None:
        pass


class Pieces(httpx.SyncByteStream):
    """So that a body may be shorter than its announced length."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        yield self._content


def first(num_bytes: int) -> Answer:
    """The beginning of the whole, which says that it is all of it."""
    headers = {"content-length": str(len(BODY)), "etag": '"v1"'}
    return lambda request: httpx.Response(200, headers=headers, stream=Pieces(BODY[:num_bytes]))


def rest(
    num_bytes: int | None = None, *, start: int | None = None, total: int = len(BODY)
) -> Answer:
    """From where the request asks for, or from where a wrong server begins."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked = int(request.headers["range"].removeprefix("bytes=").rstrip("-"))
        begin = asked if start is None else start
        headers = {"content-range": f"bytes {begin}-{total - 1}/{total}", "etag": '"v1"'}
        return httpx.Response(206, headers=headers, stream=Pieces(BODY[begin:][:num_bytes]))

    return answer


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "RETRY_SECONDS", 0.0)


def download(
    folder: Path, *answers: Answer, ranges: list[str | None] | None = None
) -> StoredModelFile:
    """`ranges` is told what was asked for."""
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        if ranges is not None:
            ranges.append(request.headers.get("range"))
        return left.pop(0)(request)

    transport = httpx.MockTransport(answer)
    with httpx.Client(transport=transport) as client:
        made = Download(client, RemoteFile("m.gguf", URL), folder, Quiet()).run()
    assert not left, "not all answers were asked for"
    return made


def test_a_truncated_download_is_continued(tmp_path: Path) -> None:
    made = download(tmp_path, first(60), rest(10), rest())
    assert made.sha256 == hashlib.sha256(BODY).hexdigest()
    assert (tmp_path / "m.gguf").read_bytes() == BODY


@pytest.mark.parametrize("wrong", [rest(start=50), rest(total=len(BODY) + 1)])
def test_a_range_response_that_does_not_match_is_not_appended(
    tmp_path: Path, wrong: Answer
) -> None:
    ranges: list[str | None] = []
    download(tmp_path, first(60), wrong, first(len(BODY)), ranges=ranges)
    assert (tmp_path / "m.gguf").read_bytes() == BODY
    assert ranges == [None, "bytes=60-", None]  # what was there is not built upon


def test_retries_are_counted_only_while_a_download_makes_no_progress(tmp_path: Path) -> None:
    """Only attempts that get no further count."""
    steps = [rest(1) for _ in range(2 * fetch.MAX_FAILURES)]
    download(tmp_path, first(60), *steps, rest())
    stuck = tmp_path / "stuck"
    stuck.mkdir()
    with pytest.raises(ModelError, match="run the same command to go on"):
        download(stuck, first(60), *(rest(0) for _ in range(fetch.MAX_FAILURES - 1)))


@pytest.mark.parametrize("target", ["http://models.test/m.gguf", "file:///etc/passwd"])
def test_a_redirect_from_https_to_http_is_refused(target: str) -> None:
    moved = httpx.Response(302, headers={"location": target})
    transport = httpx.MockTransport(lambda request: moved)
    with (
        httpx.Client(transport=transport) as client,
        pytest.raises(ModelError, match="which is not followed"),
    ):
        open_stream(client, URL, {}, None)
    with new_client() as client:
        assert not client.follow_redirects
