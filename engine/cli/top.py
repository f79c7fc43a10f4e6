"""`engine top`: what a server's models and backends do, live in the terminal."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.console import ApiKeyFileOption, JsonOption, output, read_api_key
from engine.core.errors import UnavailableError

if TYPE_CHECKING:
    import httpx
    from rich.live import Live

    from engine.cli.top_data import Frame, Look

TIMEOUT_S = 5.0
HOW_TO_LEAVE = "q or Ctrl-C leaves"


def top(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="The server, with or without /v1.")
    ] = "http://127.0.0.1:8080",
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    api_key_file: ApiKeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a server's models and backends.

    Without a terminal to draw on, and with --json, it prints one frame.
    """
    is_live = not once and not as_json and output().is_terminal
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(url, read_api_key(api_key_file), interval, is_live, as_json))


async def _run(
    url: str, api_key: str | None, interval_s: float, is_live: bool, as_json: bool
) -> None:
    from engine.cli.top_data import look
    from engine.cli.top_view import as_json as frame_json
    from engine.cli.top_view import as_view
    from engine.conformance.run import new_client

    async with new_client(url, api_key, TIMEOUT_S) as client:
        first = await look(client)
        if is_live:
            await _watch(client, first, interval_s)
            return
        await asyncio.sleep(interval_s)  # rates need two looks
        frame = _frame(client, first, await look(client))
    if as_json:
        print(json.dumps(frame_json(frame), indent=2))
    else:
        output().print(as_view(frame))


async def _watch(client: "httpx.AsyncClient", last: "Look", interval_s: float) -> None:
    """Until the user leaves. A server that goes away is waited for."""
    from rich.live import Live

    from engine.cli.top_data import look
    from engine.cli.top_view import as_view

    frame = _frame(client, last, last)
    live = Live(as_view(frame, HOW_TO_LEAVE), screen=True, auto_refresh=False)
    with _keys() as wants_to_leave, live:
        while not wants_to_leave.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wants_to_leave.wait(), interval_s)
            try:
                now = await look(client)
            except UnavailableError as error:
                _show(live, frame, f"{error} {HOW_TO_LEAVE}")
                continue
            frame, last = _frame(client, last, now), now
            _show(live, frame, HOW_TO_LEAVE)


def _show(live: "Live", frame: "Frame", note: str) -> None:
    from engine.cli.top_view import as_view

    live.update(as_view(frame, note), refresh=True)


def _frame(client: "httpx.AsyncClient", before: "Look", now: "Look") -> "Frame":
    from engine.cli.top_data import frame_of

    return frame_of(str(client.base_url).rstrip("/"), before, now)


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Set when q is pressed. The terminal gives keys at once meanwhile, and shows none."""
    import termios
    import tty

    pressed = asyncio.Event()
    if not sys.stdin.isatty():
        yield pressed
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        keys = os.read(descriptor, 64)
        if not keys or b"q" in keys.lower():
            pressed.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
