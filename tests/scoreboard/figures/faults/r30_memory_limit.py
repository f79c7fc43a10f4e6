"""R30: servers in a cgroup with a memory limit plan inside it, live within it under load, and
outlive an engine that the kernel kills.

The load fills the KV cache with long prompts, asks for the logprobs of prompts, and sends images of
millions of pixels. A server whose model does not fit says which limit it met and what would do. In
the last part, another process of the same cgroup takes memory until the kernel kills one process:
the engine, whose streams then continue in an engine with a smaller KV cache.
"""

import asyncio
import base64
import io
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from engine.core.memory import MIB
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.limited_server import MODULE, Limited, limited
from tests.scoreboard.served_engine import Served, served_engine
from tests.scoreboard.streams import CHAT, Reply, all_begun, ask, completion

LIMITS_MIB = (350, 400, 500, 650, 800, 1024, 1536, 2048)
TOO_SMALL_MIB = (200, 250, 280)
IMAGE_LIMITS_MIB = (400, 700)
KILLED_LIMIT_MIB, NUM_KILLS = 800, 3
NUM_CLIENTS, NUM_STREAMS = 24, 8
NUM_TOKENS = 160  # of each stream that lives through a kill
PLAN = re.compile(r"memory plan: (weights|KV cache) ([\d,]+) MiB")
CONTEXT = re.compile(r"memory plan: batch \d+ sequences, context ([\d,]+) tokens")
REFUSALS = (400, 413, 429, 503)


def planned(served: Served) -> tuple[int, int]:
    """The MiB that the engine planned, and its context."""
    log = "\n".join(served.log)
    sizes = dict(PLAN.findall(log))
    (context,) = CONTEXT.findall(log)[-1:]
    return sum(int(each.replace(",", "")) for each in sizes.values()), int(context.replace(",", ""))


def serve_limited(held: Limited, *arguments: str, **options: Any) -> Any:
    words = ("--log-level", "info", *arguments)
    return served_engine(*words, env=held.env, module=MODULE, **options)


def full_load(context: int) -> list[dict[str, Any]]:
    """Long prompts, half of which share nothing, and prompts whose tokens get logprobs."""
    words = max(8, context // 3)
    asked = []
    for client in range(NUM_CLIENTS):
        prompt = f"{client} " + f"word{client % 12} " * (words // 3)
        fields: dict[str, Any] = {"stream": True, "max_tokens": 24}
        if client % 6 == 5:
            fields = {"echo": True, "logprobs": 3, "max_tokens": 4}
        asked.append(completion(prompt, **fields))
    return asked


async def answered(served: Served, bodies: Sequence[dict[str, Any]], path: str) -> list[Reply]:
    return await asyncio.gather(*(ask(served, body, path, patience_s=600) for body in bodies))


class Tally:
    """What went wrong."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.over = self.kills = self.unclear = self.lost = self.other = 0
        self.refused = 0

    def check(self, what: str, served: Served, held: Limited, replies: Sequence[Reply]) -> None:
        """Judge a server that is still under its limit, after its load."""
        self.run.cases += 1
        mebibytes, _ = planned(served)
        if mebibytes * MIB >= held.limit:
            self.over += 1
            self.run.fail(f"{what}: planned {mebibytes} MiB of {held.limit // MIB}")
        if held.num_kills() and held.folder is not None:
            self.kills += held.num_kills()
            self.run.fail(f"{what}: {held.num_kills()} processes were killed")
        if served.process.poll() is not None or served.health() != 200:
            self.run.fail(f"{what}: the server is not well")
            self.lost += 1
        for reply in replies:
            self.refused += reply.status in REFUSALS
            if not reply.is_well_formed or reply.status not in (200, *REFUSALS):
                self.lost += 1
                self.run.fail(f"{what}: {reply.status} {reply.problem or reply.error}")


def texts_within(tally: Tally, mebibytes: int) -> None:
    with limited(mebibytes) as held:
        tally.run.notes["limit"] = held.kind
        with serve_limited(held) as served:
            _, context = planned(served)
            tally.run.notes[f"context_at_{mebibytes}_mib"] = context
            replies = asyncio.run(answered(served, full_load(context), "/v1/completions"))
            tally.check(f"{mebibytes} MiB", served, held, replies)


def picture(width: int, height: int, kind: str, mode: str) -> str:
    file = io.BytesIO()
    Image.effect_noise((width // 10, height // 10), 80).resize((width, height)).convert(mode).save(
        file, kind
    )
    data = base64.b64encode(file.getvalue()).decode()
    return f"data:image/{kind.lower()};base64,{data}"


def images_within(tally: Tally, path: Path, mebibytes: int) -> None:
    urls = [
        *(picture(4000, 3900, "JPEG", "RGB"), picture(2000, 2000, "WEBP", "RGBA")),
        *(picture(40, 30, "PNG", "RGB"), picture(3000, 30, "PNG", "LA")),
    ]
    bodies = [
        {
            "model": path.name,
            "max_tokens": 4,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": urls[client % 4]}}]
                    * (1 + client % 5),
                }
            ],
        }
        for client in range(NUM_CLIENTS)
    ]
    with limited(mebibytes) as held, serve_limited(held, model=str(path)) as served:
        replies = asyncio.run(answered(served, bodies, CHAT))
        tally.check(f"images in {mebibytes} MiB", served, held, replies)
        if not any(reply.is_whole for reply in replies):
            tally.lost += 1
            tally.run.fail(f"images in {mebibytes} MiB: none was answered")


def refused_start(tally: Tally, mebibytes: int) -> None:
    """A start that must fail names the limit, the need, and what to raise."""
    tally.run.cases += 1
    with limited(mebibytes) as held:
        try:
            with serve_limited(held) as served:
                tally.run.notes[f"context_at_{mebibytes}_mib"] = planned(served)[1]
        except AssertionError as error:
            told = str(error)
            if not re.search(r"needs [\d,]+ MiB .*raise it by [\d,]+ MiB", told):
                tally.unclear += 1
                tally.run.fail(f"{mebibytes} MiB: {told[-300:]}")


async def outlive(tally: Tally, served: Served, held: Limited) -> None:
    bodies = [
        completion(f"{client} The story:", stream=True, max_tokens=NUM_TOKENS, seed=client)
        | {"temperature": 0.8 * (client % 2)}
        for client in range(NUM_STREAMS)
    ]
    right = await answered(served, bodies, "/v1/completions")
    replies = [Reply() for _ in bodies]
    asking = [
        asyncio.create_task(ask(served, body, reply=reply, patience_s=600))
        for body, reply in zip(bodies, replies, strict=True)
    ]
    await all_begun(replies)
    engine = served.engine_pid()
    await asyncio.to_thread(held.run_out_of_memory)
    await asyncio.gather(*asking)
    after = await ask(served, completion("Hello", max_tokens=2))
    for reply, expected in zip([*replies, after], [*right, after], strict=True):
        tally.run.cases += 1
        if not reply.is_whole:
            tally.lost += 1
            tally.run.fail(f"after a kill: {reply.problem or reply.error}")
        elif reply.texts != expected.texts:
            tally.other += 1
            tally.run.fail("after a kill: another text")
    if served.process.poll() is not None or served.engine_pid() == engine:
        tally.lost += 1
        tally.run.fail("the kernel killed something else than the engine")
    if not any("killed for lack of memory" in line for line in served.log):
        tally.run.fail("the next engine has the same plan")
        tally.over += 1


def killed_within(tally: Tally, num_kills: int) -> None:
    for _ in range(num_kills):
        with limited(KILLED_LIMIT_MIB) as held:
            if held.folder is None:
                tally.run.notes["kills"] = "none: cgroups can't be made here"
                return
            with serve_limited(held) as served:
                asyncio.run(outlive(tally, served, held))


@figure(
    "R30",
    "servers in a memory-limited cgroup: a full KV cache, large images, an engine killed for lack"
    " of memory",
    minutes=8,
    limits={
        "plans_over_limit": at_most(0),
        "oom_kills": at_most(0),
        "unclear_refusals": at_most(0),
        "requests_lost": at_most(0),
        "other_texts": at_most(0),
    },
)
def memory_limit(run: Run) -> Values:
    tally = Tally(run)
    for mebibytes in LIMITS_MIB if not run.quick else (500,):
        texts_within(tally, mebibytes)
    for mebibytes in TOO_SMALL_MIB if not run.quick else (250,):
        refused_start(tally, mebibytes)
    if not run.quick:
        from tests.parity import tiny_vision  # imports PyTorch

        with tempfile.TemporaryDirectory(prefix="scoreboard-") as name:
            _, path = tiny_vision.servable("smolvlm", Path(name))
            for mebibytes in IMAGE_LIMITS_MIB:
                images_within(tally, path, mebibytes)
    killed_within(tally, run.share(NUM_KILLS, 1))
    run.notes["refused"] = tally.refused
    return {
        "plans_over_limit": tally.over,
        "oom_kills": tally.kills,
        "unclear_refusals": tally.unclear,
        "requests_lost": tally.lost,
        "other_texts": tally.other,
    }
