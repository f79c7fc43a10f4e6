"""Runs the rules against a server, one after the other, and reports each result.

Connection errors count against the server: a rule fails if its request breaks off or never ends.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import httpx

from engine.core.errors import InvalidRequestError, UnavailableError
from engine_tools.conformance.expect import RuleFailed, RuleSkipped
from engine_tools.conformance.rule import Group, Rule, RuleResult
from engine_tools.conformance.target import SDK_HEADERS, Target

# What the reading of an answer raises if a server's answer is not what OpenAI's would be.
_UNEXPECTED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    httpx.StreamError,
)
_CONTEXT_KEYS = ("max_model_len", "context_length", "context_window")


def root_of(url: str) -> str:
    """The server's root URL, without `/v1`. Users may give the URL with `/v1`, as SDKs need it, or
    without.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidRequestError(f"{url} is no address: begin it with http:// or https://.")
    return url.rstrip("/").removesuffix("/v1")


def new_client(url: str, api_key: str | None, timeout_s: float) -> httpx.AsyncClient:
    headers = SDK_HEADERS | {"authorization": f"Bearer {api_key or 'none'}"}
    try:
        return httpx.AsyncClient(base_url=root_of(url), headers=headers, timeout=timeout_s)
    except httpx.InvalidURL as error:
        raise InvalidRequestError(f"{url} is no address: {error}.") from None


async def find_target(client: httpx.AsyncClient, model: str | None) -> Target:
    """The server as a target of the rules, with `model` or, if None, the first model that the
    server lists.
    """
    try:
        reply = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise UnavailableError(
            f"Nothing answers at {client.base_url}: {_named(error)}. Start a server with `engine"
            " serve`, or give its address."
        ) from None
    try:
        listed = reply.json()["data"] if reply.status_code == 200 else []
        entries = {entry["id"]: entry for entry in listed}
    except (ValueError, KeyError, TypeError):
        entries = {}
    if model is None and not entries:
        raise InvalidRequestError(
            f"{client.base_url} lists no model in /v1/models (HTTP {reply.status_code});"
            " name one with --model, and a key with --api-key-file if the server wants one."
        )
    chosen = model or next(iter(entries))
    return Target(client, chosen, _context_length(entries.get(chosen, {})))


def _context_length(entry: dict[str, Any]) -> int | None:
    found = [entry[key] for key in _CONTEXT_KEYS if isinstance(entry.get(key), int)]
    return found[0] if found else None


async def run_rules(
    target: Target,
    groups: Sequence[Group],
    only: Iterable[str] = (),
    on_result: Callable[[RuleResult], None] = lambda result: None,
) -> list[RuleResult]:
    """Run every rule of `groups`, or only of the groups named in `only`. If the server lacks an
    optional group, its rules are skipped, but they fail if the group is named in `only`.
    """
    wanted = frozenset(only)
    unknown = wanted - {group.name for group in groups}
    if unknown:
        names = ", ".join(group.name for group in groups)
        raise InvalidRequestError(
            f"There is no group {sorted(unknown)[0]!r}. Groups: {names}.", param="only"
        )
    results: list[RuleResult] = []
    for group in groups:
        if wanted and group.name not in wanted:
            continue
        missing = await _missing(group, target)
        for rule in group.rules:
            if missing is None:
                result = await run_rule(rule, target)
            else:
                result = RuleResult(rule, "fail" if wanted else "skipped", missing)
            results.append(result)
            on_result(result)
    return results


async def _missing(group: Group, target: Target) -> str | None:
    if group.missing is None:
        return None
    try:
        return await group.missing(target)
    except (httpx.HTTPError, RuleFailed, *_UNEXPECTED):
        return None  # the endpoint exists; its rules will get the same error and report it


async def run_rule(rule: Rule, target: Target) -> RuleResult:
    try:
        await rule.check(target)
    except RuleSkipped as skipped:
        return RuleResult(rule, "skipped", str(skipped))
    except RuleFailed as failed:
        is_advice = failed.is_advice or rule.severity == "advice"
        return RuleResult(rule, "advice" if is_advice else "fail", str(failed))
    except httpx.HTTPError as error:
        return RuleResult(rule, "fail", f"the request got no whole answer: {_named(error)}")
    except _UNEXPECTED as error:
        return RuleResult(rule, "fail", f"the answer has another shape: {_named(error)}")
    return RuleResult(rule, "pass")


def _named(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
