"""Checks the explanation of a request: who may see it, that its parts sum to its time, and that its
causes name what happened to it.
"""

import json
from collections.abc import Iterator
from typing import Any

from engine.core.interfaces.timeline import Timeline
from engine.servers.http.request_log import RequestRecord
from engine.servers.ops.explain import _all_causes, seconds_of, timeline_of
from tests.oracle.http.keys import ADMIN, KEYS, TENANTS
from tests.oracle.http.run import Client, Outcome
from tests.oracle.http.toy_server import ToyServer

ROUND_S = 1e-5  # of times in answers


async def explanation_problems(server: ToyServer, client: Client) -> list[str]:
    """What is wrong with the explanation of one request."""
    reply, record = client.reply, client.record
    whole = client.whole
    if reply is None or whole is None or whole.error is not None:
        return []
    if record is None:
        return ["explanation: there is none"]
    path = f"/v1/admin/requests/{reply.headers['x-request-id']}"
    found: list[str] = []
    who_may = [*KEYS.items(), (None, ADMIN)]
    other = who_may[server.num_histories % len(who_may)]  # one for each request is enough
    own = client.asked.tenant
    for who, key in dict.fromkeys(((own, KEYS[own]), other)):
        answer = await server.ask("GET", path, key)
        if (answer.status == 200) != may_see(key, who, client.asked.tenant):
            found.append(f"{key} gets {answer.status}")
        elif answer.status == 200:
            found += broken_spans(json.loads(answer.body))
    found += _broken_causes(record, client)
    return [f"explanation: {each}" for each in found]


def may_see(key: str, who: str | None, tenant: str | None) -> bool:
    """Whether a key of `who` may see the requests of `tenant`."""
    return key == ADMIN or TENANTS[who] == TENANTS[tenant]


def count_problems(outcome: Outcome) -> Iterator[str]:
    """Whether explanations name all preemptions. Those of requests that were cut short, or whose
    engine died, may be lost.
    """
    if outcome.seen["kill"] or outcome.seen["cancel"] or outcome.seen["swap"]:
        return
    records = [each.record for each in outcome.clients.values() if each.record is not None]
    timelines = [each for record in records for each in record.notes.timelines]
    told = sum(each.num_pauses for each in timelines)
    if told != outcome.seen["preemptions"] and not any(map(_is_cut, outcome.clients.values())):
        yield f"explanations name {told} of {outcome.seen['preemptions']} preemptions"


def _is_cut(client: Client) -> bool:
    """Whether the frontend ended a choice of the request, at a stop string."""
    whole = client.whole
    return whole is None or any(isinstance(each.stop, str) for each in whole.choices)


def broken_spans(shown: dict[str, Any]) -> Iterator[str]:
    """The stages follow each other from the beginning to the end."""
    spans = shown["spans"]
    at = 0.0
    for each in spans:
        if abs(each["start_s"] - at) > ROUND_S or each["end_s"] < each["start_s"]:
            yield f"{each['name']} begins at {each['start_s']}, the stage before ended at {at}"
        at = each["end_s"]
    if abs(at - shown["seconds"]) > ROUND_S * (1 + len(spans)):
        yield f"the stages end at {at} of {shown['seconds']} s"


def _again_s(timeline: Timeline | None) -> float:
    """The seconds of the steps that computed tokens again after the first token."""
    if timeline is None or timeline.first_token_at is None:
        return 0.0
    again = [each for each in timeline.chunks if each.began_at >= timeline.first_token_at]
    return sum(each.ended_at - each.began_at for each in again)


def _broken_causes(record: RequestRecord, client: Client) -> Iterator[str]:
    """The seconds of all causes sum to the request's time, except those in which the frontend was
    too busy to read what the engine had sent.
    """
    causes = list(_all_causes(record, ()))
    seconds = {each.kind: each.seconds for each in causes if each.seconds > ROUND_S}
    timeline = timeline_of(record)
    unread_s = 0.0
    if timeline is not None and record.answered_at is not None:
        unread_s = max(0.0, record.answered_at - timeline.ended_at)
    missing = seconds_of(record) - unread_s - sum(each.seconds for each in causes)
    if not client.has_left and abs(missing) > ROUND_S * 10:
        yield f"of {seconds_of(record):.4f} s, {missing:.4f} s have no cause: {seconds}"
    if seconds.get("preemption", 0.0) < _again_s(timeline) - ROUND_S:
        yield f"preemptions cost less than the {_again_s(timeline):.4f} s of computing again"
    if (
        record.usage is not None
        and record.usage.num_revivals
        and "revival" not in {each.kind for each in causes}
    ):
        yield "it does not name the death of the engine"
