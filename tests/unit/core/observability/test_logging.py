"""Log lines: one record is one line whatever is in it, and carries the id of its request."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.core.config_schema import LoggingSettings
from engine.core.observability.logging import REQUEST_ID, setup_logging

HOSTILE = 'a\r\nb\x1b[31mred\x00\x7f\x9b\u2028c\u2029d\u202e{"level":"error"}\ud800'
LOGGER = logging.getLogger("engine.test")


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def start(**settings: object) -> io.StringIO:
    stream = io.StringIO()
    # pytest's own would keep the text for its report, and half a surrogate pair can't be sent.
    logging.getLogger().handlers.clear()
    logging_settings = LoggingSettings.model_validate(settings)
    setup_logging(logging_settings.level, logging_settings.format, stream)
    return stream


def test_a_json_log_record_has_the_documented_fields() -> None:
    stream = start(format="json")
    with request_context("req-1"):
        LOGGER.info("served %d tokens", 3, extra={"status": 200, "seconds": 0.5})
    (line,) = lines_of(stream)
    record = json.loads(line)
    assert record.pop("ts").endswith("+00:00")
    assert record == {
        "level": "info",
        "logger": "engine.test",
        "message": "served 3 tokens",
        "request_id": "req-1",
        "status": 200,
        "seconds": 0.5,
    }


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_hostile_text_stays_on_one_log_line(log_format: str) -> None:
    stream = start(format=log_format)
    with request_context(HOSTILE):
        LOGGER.warning("model %s", HOSTILE, extra={"user": HOSTILE, "obj": {HOSTILE}})
    (line,) = lines_of(stream)  # splitlines also splits at U+2028, U+2029, U+0085
    assert line.isprintable()


def test_json_extras_cannot_replace_fields_or_break_json() -> None:
    stream = start(format="json")
    LOGGER.error("m", extra={"level": "debug", "ratio": float("nan"), "thing": object()})
    (line,) = lines_of(stream)
    record = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert record["level"] == "error"
    assert record["ratio"] == "nan"


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_exception_text_cannot_forge_a_log_record(log_format: str) -> None:
    stream = start(format=log_format)
    try:
        raise ValueError("x\n12:00:00.000 INFO engine: forged")
    except ValueError:
        LOGGER.exception("failed")
    first, *others = lines_of(stream)
    assert "failed" in first
    assert all(line.startswith("    | ") for line in others)
    assert bool(others) == (log_format == "pretty")


def test_request_ids_do_not_leak_between_tasks() -> None:
    stream = start(format="json")

    async def serve(request_id: str) -> None:
        with request_context(request_id):
            await asyncio.sleep(0)
            LOGGER.info(request_id)

    async def both() -> None:
        await asyncio.gather(serve("a"), serve("b"))
        LOGGER.info("after")

    asyncio.run(both())
    records = [json.loads(line) for line in lines_of(stream)]
    assert {(each["message"], each["request_id"]) for each in records} == {
        ("a", "a"),
        ("b", "b"),
        ("after", None),
    }


def test_a_second_logging_setup_replaces_the_first() -> None:
    first = start(format="pretty")
    second = start(format="json", level="warning")
    LOGGER.info("too quiet")
    LOGGER.warning("once")
    assert not lines_of(first)
    assert [json.loads(line)["message"] for line in lines_of(second)] == ["once"]


def test_uvicorn_logs_through_the_same_handler() -> None:
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.addHandler(logging.StreamHandler(io.StringIO()))
    stream = start(format="json")
    uvicorn.info("Started server process [1]")
    uvicorn.warning("started", extra={"color_message": "\x1b[1mstarted"})
    logging.getLogger("uvicorn.access").info("GET /")
    (line,) = lines_of(stream)
    record = json.loads(line)
    assert record["message"] == "started"
    assert "color_message" not in record
