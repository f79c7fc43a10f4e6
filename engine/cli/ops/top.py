"""`engine top`: a live view of a server's models and backends in the terminal."""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.console import (
    SERVER_URL,
    ApiKeyFileOption,
    JsonOption,
    SameUrlOption,
    UrlArgument,
    output,
    read_api_key,
)
from engine.cli.ops.top_data import BackendRow, Frame
from engine.core.errors import UnavailableError

if TYPE_CHECKING:
    import httpx
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from engine.cli.ops.top_data import Look


TIMEOUT_S = 5.0
HOW_TO_LEAVE = "q or Ctrl-C leaves"


def top(
    url: UrlArgument = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    api_key_file: ApiKeyFileOption = None,
    as_json: JsonOption = False,
    same_url: SameUrlOption = None,
) -> None:
    """Watch a server's models and backends.

    Without a terminal to draw on, and with --json, it prints one frame.
    """
    address = same_url or url or SERVER_URL
    is_live = not once and not as_json and output().is_terminal
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(address, read_api_key(api_key_file), interval, is_live, as_json))


async def _run(
    url: str, api_key: str | None, interval_s: float, is_live: bool, as_json: bool
) -> None:
    from engine.cli.ops.top_data import look
    from engine_tools.conformance.run import new_client

    async with new_client(url, api_key, TIMEOUT_S) as client:
        first = await look(client)
        if is_live:
            await _watch(client, first, interval_s)
            return
        await asyncio.sleep(interval_s)  # rates are computed from two polls
        frame = _frame(client, first, await look(client))
    if as_json:
        print(json.dumps(frame_json(frame), indent=2))
    else:
        output().print(as_view(frame))


async def _watch(client: "httpx.AsyncClient", last: "Look", interval_s: float) -> None:
    """Update the view until the user quits. If the server stops answering, keep trying until it
    answers again.
    """
    from rich.live import Live

    from engine.cli.ops.top_data import look

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

    live.update(as_view(frame, note), refresh=True)


def _frame(client: "httpx.AsyncClient", before: "Look", now: "Look") -> "Frame":
    from engine.cli.ops.top_data import frame_of

    return frame_of(str(client.base_url).rstrip("/"), before, now)


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Yields an event that is set when q is pressed. Inside the context, the terminal passes on
    each key at once and does not echo it.
    """
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


_STATES = {"ready": "green", "loading": "yellow", "ejected": "bold yellow", "down": "bold red"}
_MAX_DECISIONS = 8
_MAX_ROWS = 12
BAR_WIDTH = 36


def frame_json(frame: Frame) -> dict[str, Any]:
    return dataclasses.asdict(frame)


def as_view(frame: Frame, note: str = "") -> "Group":
    """The frame as rich tables. `note` is an extra line, such as how to quit."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_headline(frame), _backends(frame)]
    details = [row for row in frame.backends if row.state != "ready" and row.detail]
    parts += [
        Text(plain(f"{row.model} on {row.name}: {row.detail}"), style="yellow") for row in details
    ]
    parts += [part for engine in frame.engines for part in _batch(engine)]
    if frame.training:
        parts.append(Text(frame.training))
    if frame.decisions:
        parts.append(_decisions(frame))
    if note:
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def _headline(frame: Frame) -> "Text":
    from rich.text import Text

    text = Text(plain(frame.url), style="bold", overflow="fold")
    text.append(f"  {plain(frame.status)}", "green" if frame.status == "healthy" else "bold red")
    figures = [
        f"{frame.in_flight} in flight",
        f"{frame.requests_per_s:.1f} req/s",
        f"{frame.tokens_per_s:.0f} tok/s",
    ]
    if frame.uptime_s is not None:
        figures.insert(0, f"up {_duration(frame.uptime_s)}")
    if frame.memory_mb is not None:
        figures.append(f"{frame.memory_mb:,.0f} MB")
    return text.append("  " + "  ".join(figures), "not bold default")


def _backends(frame: Frame) -> "Table":
    """A table with one line per model, and below it one line for each of its backends."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True)
    table.add_column("model, backend", overflow="fold", ratio=1)
    table.add_column("state")
    for heading in ("busy", "req/s", "tok/s", "TTFT", "cache", "fail", "restarts"):
        table.add_column(heading, justify="right")
    model = None
    for row in frame.backends:
        if row.model != model:
            table.add_row(Text(plain(row.model), style="bold"))
        model = row.model
        table.add_row(
            Text(f"  {_name(row)}"),
            Text(plain(row.state), style=_STATES.get(row.state, "")),
            str(row.in_flight) + (f"/{row.max_concurrent}" if row.max_concurrent else ""),
            f"{row.requests_per_s:.1f}",
            f"{row.tokens_per_s:.0f}",
            "-" if row.ttft_p50_s is None else f"{row.ttft_p50_s * 1000:.0f} ms",
            "-" if row.cache_hit_rate is None else f"{row.cache_hit_rate:.0%}",
            Text(str(row.failures), style="red" if row.failures else ""),
            Text(str(row.restarts), style="yellow" if row.restarts else ""),
        )
    return table


def _name(row: BackendRow) -> str:
    name = plain(row.name)
    return name if not row.kind or row.kind == row.name else f"{name} ({plain(row.kind)})"


def _batch(engine: Mapping[str, Any]) -> "list[Table | Text]":
    """A bar for each running sequence of an engine, and a line about its queue."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True)
    table.add_column(plain(f"batch of {engine['name']}"), overflow="ellipsis", no_wrap=True)
    table.add_column("prompt, answer", no_wrap=True, min_width=BAR_WIDTH)
    for heading in ("tokens", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    running = engine["running"]
    widest = max((row["num_prompt"] + row["max_tokens"] for row in running), default=1)
    for row in running[:_MAX_ROWS]:
        done = min(row["num_computed"], row["num_prompt"])
        count = row["num_generated"] or done
        goal = row["max_tokens"] if row["num_generated"] else row["num_prompt"]
        table.add_row(
            Text(plain(str(row["request_id"])[-12:])),
            _bar(row, widest),
            f"{count}/{goal}",
            f"{row['seconds']:.1f}",
        )
    lines: list[Table | Text] = [table] if running else []
    if len(running) > _MAX_ROWS:
        lines.append(Text(f"and {len(running) - _MAX_ROWS} more sequences", style="dim"))
    if engine["waiting"]:
        longest = max(row["seconds"] for row in engine["waiting"])
        what = f"{len(engine['waiting'])} wait for {engine['blocked_by']}, up to {longest:.1f} s"
        lines.append(Text(plain(what), style="yellow"))
    return lines


def _bar(row: Mapping[str, Any], widest: int) -> "Text":
    from rich.text import Text

    def cells(count: int) -> int:
        return round(BAR_WIDTH * count / widest)

    done = min(row["num_computed"], row["num_prompt"])
    cached = min(row["num_cached"], done)
    left = row["num_prompt"] - done
    parts = [(cached, "green"), (done - cached, "yellow"), (left, "bright_black")]
    parts += [(row["num_generated"], "blue")]
    bar, drawn, total = Text(), 0, 0
    for count, style in parts:
        total += count
        bar.append("━" * (cells(total) - drawn), style)
        drawn = cells(total)
    return bar


def _decisions(frame: Frame) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True)
    table.add_column("last decisions", overflow="ellipsis", no_wrap=True, ratio=2)
    table.add_column("model", overflow="ellipsis", no_wrap=True, ratio=2)
    table.add_column("went to", no_wrap=True, ratio=2)
    table.add_column("why", overflow="ellipsis", no_wrap=True, ratio=5)
    for each in frame.decisions[:_MAX_DECISIONS]:
        attempts = each.get("attempts") or 1
        chosen = plain(str(each.get("chosen") or "none"))
        table.add_row(
            Text(plain(str(each.get("request_id", "")))),
            Text(plain(str(each.get("model", "")))),
            Text(f"{chosen}, attempt {attempts}" if attempts > 1 else chosen),
            Text(plain(f"{each.get('policy', '')}: {each.get('why', '')}")),
        )
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def plain(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)
