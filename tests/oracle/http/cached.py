"""Which prompt tokens may come from the cache: those that another request of the same tenant, salt
edits and adapter has computed, in whole blocks, and never the last one.
"""

from collections.abc import Iterator

from engine.servers.http.request_log import RequestRecord
from tests.oracle.http.keys import TENANTS
from tests.oracle.http.run import Client, Outcome
from tests.oracle.http.toy_backend import Seen


def cache_problems(seen: Seen, outcome: Outcome, index: int) -> Iterator[str]:
    client, record = outcome.clients[index], outcome.clients[index].record
    if record is None or record.usage is None or record.completion_id is None:
        return
    told, usage = client.whole, record.usage
    if told is not None and told.cached_tokens not in (None, usage.cached_tokens):
        yield f"cached_tokens: {told.cached_tokens} are told, {usage.cached_tokens} are known"
    prompt = seen.prompts[record.completion_id]
    size = outcome.block_size
    most = (len(prompt) - 1) // size * size
    known = [
        _common(prompt, computed) // size * size
        for other, each in outcome.clients.items()
        if _shares(client, each) and (other != index or _num_choices(client) > 1)
        for computed in _computed(seen, each)
    ]
    allowed = min(most, max(known, default=0))
    yield from _other_than_first(record)
    if usage.cached_tokens > allowed or usage.cached_tokens % size:
        yield f"cached_tokens: {usage.cached_tokens}, but only {allowed} can be"


def _other_than_first(record: RequestRecord) -> Iterator[str]:
    """A request has as many cached tokens as the choice that began first. The others find what that
    one has computed.
    """
    told = [each for each in record.notes.timelines if each.first_token_at is not None]
    if record.usage is None or record.usage.num_revivals or not told:
        return
    first_at = min(each.first_token_at or 0.0 for each in told)
    known = {each.num_cached for each in told if each.first_token_at == first_at}
    if record.usage.cached_tokens not in known:
        yield f"cached_tokens: {record.usage.cached_tokens}, but its first choice has {known}"


def _num_choices(client: Client) -> int:
    body = client.asked.call.body
    places = (body, body.get("sampling_params", {}))
    return max(int(place.get(name, 1)) for place in places for name in ("n", "n_cmpl"))


def _shares(client: Client, other: Client) -> bool:
    """Whether the two requests may share cached prefixes."""
    return _space(client) == _space(other)


def _space(client: Client) -> tuple[str, str | None, str, str]:
    asked = client.asked
    edits = str(asked.call.body.get("interp", {}).get("edit"))
    return TENANTS[asked.tenant], asked.call.salt, asked.weights, edits


def _computed(seen: Seen, client: Client) -> Iterator[tuple[int, ...]]:
    """The prompt of a request, followed by the tokens of each choice."""
    name = None if client.record is None else client.record.completion_id
    if name is None or name not in seen.prompts:
        return
    prompt = seen.prompts[name]
    yield prompt
    for (request_id, _), tokens in seen.tokens.items():
        if request_id == name:
            yield (*prompt, *tokens)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count
