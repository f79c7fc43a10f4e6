"""Prefills prompts in advance, so that later requests with the same prefix hit the prefix cache.

The prompts come from an admin request, or at startup from the file `cache.warm_file`. That file has
one prompt per line. A line is plain text or JSON: a string, or an object with `messages` or
`prompt`. Tenants don't share cached prefixes. So each prompt is computed for every tenant that has
a key, or only for one given tenant. A prompt that comes from a cache tier has a `root`, a hash of
its model and tenant. It is computed for this tenant, or skipped if it belongs to another model.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.core.errors import ConfigError, EngineError, InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    GenerationContext,
    ModelCard,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.servers.access.auth import SERVER
from engine.servers.http.errors import problem
from engine.servers.openai.schema import ChatBody, CompletionBody
from engine.servers.schema.body import parse_body
from engine.servers.serving.generation import OFFLINE_PRIORITY, loaded_messages
from engine.servers.serving.services import Services, new_completion_id

logger = logging.getLogger(__name__)

MAX_PROMPTS = 1_000
MAX_FILE_BYTES = 64 * 2**20
AT_ONCE = 4
READY_POLL_S = 0.05

Prompt = str | dict[str, Any]


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts in a file, one per line. Empty lines are skipped. For an invalid line,
    raises a `ConfigError` with the number of the prompt.
    """
    try:
        with path.expanduser().open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts in {path} can't be read: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > MAX_PROMPTS:
        raise ConfigError(f"{path} has {len(lines)} prompts; there may be {MAX_PROMPTS}")
    return [_prompt(line, f"{path}: prompt {number}") for number, line in enumerate(lines, 1)]


def tenants_of(services: Services, name: str | None = None) -> list[str]:
    """The ids of all tenants that have a key, or the id of the tenant called `name`. If there are
    no keys, all clients are one tenant, whose id is empty.
    """
    known = {
        each.principal.name: services.keys.label(each.principal)
        for each in services.keys.credentials
        if not each.principal.is_admin
    } or {"": ""}
    if name is None:
        return list(known)
    found = [principal for principal, label in known.items() if label == name]
    if not found:
        raise InvalidRequestError(f"There is no tenant {name}.", param="tenant")
    return found


async def warm(
    services: Services,
    prompts: Sequence[Prompt],
    tenants: Sequence[str],
    model: str | None = None,
    most: int | None = None,
) -> dict[str, Any]:
    """Prefill each prompt for each tenant, or only the first `most`. Returns the number of prompts
    and tokens, the time, and the first errors. If the backend refuses a prompt, the other prompts
    are still computed.
    """
    resolved = services.find_model(model, SERVER)
    owned = [(prompt, _owners(prompt, resolved.cache_identity, tenants)) for prompt in prompts]
    num_skipped = sum(not owners for _, owners in owned)
    owned = [each for each in owned if each[1]][:most]
    requests = [(await _request(services, prompt, resolved), owners) for prompt, owners in owned]
    began, places = time.monotonic(), asyncio.Semaphore(AT_ONCE)
    errors: list[str] = []
    used = {"prompt_tokens": 0, "cached_tokens": 0}

    async def one(asked: ChatRequest | CompletionRequest, tenant: str) -> None:
        context = msgspec.structs.replace(
            asked.context, request_id=new_completion_id("warm"), salt=tenant, tenant=tenant
        )
        asked = msgspec.structs.replace(asked, context=context)
        backend = services.backend
        async with places:
            source = (
                backend.chat(asked) if isinstance(asked, ChatRequest) else backend.complete(asked)
            )
            try:
                async for event in source:
                    if isinstance(event, UsageEvent):
                        used["prompt_tokens"] += event.prompt_tokens
                        used["cached_tokens"] += event.cached_tokens
            except EngineError as error:
                errors.append(error.message)

    pairs = [(asked, tenant) for asked, owners in requests for tenant in owners]
    await asyncio.gather(*(one(*each) for each in pairs))
    return {
        "prompts": len(pairs) - len(errors),
        "skipped": num_skipped,
        **used,
        "seconds": round(time.monotonic() - began, 3),
        "errors": errors[:10],
    }


def _owners(prompt: Prompt, identity: str | None, tenants: Sequence[str]) -> Sequence[str]:
    """The tenants for which a prompt is computed."""
    root = prompt.get("root") if isinstance(prompt, dict) else None
    if root is None:
        return tenants
    if identity is None:
        return ()
    from engine.runtime.tiers.record import root_key  # few servers have tiers

    return [each for each in tenants if root_key(bytes.fromhex(identity), each).hex() == root]


class WarmStart:
    """A background component that warms the prefix cache with the prompts of a file, once the model
    is ready.
    """

    def __init__(self, services: Services, path: Path) -> None:
        self._services = services
        self._prompts = read_prompts(path)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._services.backend.health().ready:
            await asyncio.sleep(READY_POLL_S)
        try:
            done = await warm(self._services, self._prompts, tenants_of(self._services))
            logger.info("the prefix cache is warm", extra=done)
        except EngineError as error:
            logger.error("the prefix cache could not be warmed: %s", error)


def _prompt(line: str, where: str) -> Prompt:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError:
        value = line
    if isinstance(value, int | float):
        value = line
    if isinstance(value, str) or (
        isinstance(value, dict) and value.keys() & {"messages", "prompt"}
    ):
        return value
    raise ConfigError(f"{where} is neither text nor an object with messages or prompt")


async def _request(
    services: Services, prompt: Prompt, card: ModelCard
) -> ChatRequest | CompletionRequest:
    context = GenerationContext(
        request_id="", params=SamplingParams(max_tokens=1), model=card.id, priority=OFFLINE_PRIORITY
    )
    if isinstance(prompt, dict) and "messages" in prompt:
        chat = parse_body(ChatBody, {"messages": prompt["messages"], "model": card.id})
        messages = await loaded_messages(services, card, chat.messages)
        return ChatRequest(context=context, messages=messages)
    text = prompt if isinstance(prompt, str) else prompt.get("prompt")
    if text is None:
        raise problem("prompts", "should be texts, or objects with messages or prompt")
    body = parse_body(CompletionBody, {"prompt": text, "model": card.id})
    return CompletionRequest(context=context, prompt=body.prompt[0])
