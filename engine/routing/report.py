"""Describes the router's state for `/v1/admin/routes`."""

from typing import Any

from engine.routing.replica import Member
from engine.routing.route import Route
from engine.routing.router import Router

NUM_DECISIONS = 50  # max decisions in the list; older decisions can be queried by request id


def describe_routes(router: Router) -> dict[str, Any]:
    decisions = [each.body() for each in router.decisions.newest(NUM_DECISIONS)]
    return {"models": [_route(route) for route in router.routes], "decisions": decisions}


def describe_decisions(router: Router, request_id: str) -> list[dict[str, Any]]:
    """Every decision about a request, with its reasons as text."""
    found = router.decisions.find(request_id)
    return [each.body() | {"explanation": each.explanation()} for each in found]


def _route(route: Route) -> dict[str, Any]:
    shadow = route.shadow
    return {
        "id": route.id,
        "aliases": route.aliases,
        "policy": route.policy_name,
        "fallbacks": route.fallbacks,
        "shadow": None if shadow is None else {"backend": shadow.backend, "share": shadow.share},
        "backends": [_member(member) for member in route.members],
    }


def _member(member: Member) -> dict[str, Any]:
    replica = member.replica
    health = replica.health()
    state, detail = replica.state(health), health.detail
    if state == "ejected":
        seconds = replica.outlier.seconds_left
        rest = f"left out for {seconds:.1f} s" if seconds else "the next request tries it again"
        detail = f"It failed too often; {rest}."
    return {
        "name": replica.name,
        "kind": replica.kind,
        "weight": member.weight,
        "tags": replica.tags,
        "state": state,
        "detail": detail,
        "in_flight": replica.in_flight,
        "max_concurrent": replica.max_concurrent,
        "requests": replica.num_requests,
        "failures": replica.num_failures,
        "restarts": health.num_restarts,
        "tokens_per_s": round(replica.tokens_per_s, 1),
        "ttft_p50_s": _rounded(replica.first_token_p50_s),
        "prefix_hit_rate": _rounded(replica.prefix_hit_rate),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
