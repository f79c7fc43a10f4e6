"""Every route with every kind of key, and with the objects of another tenant, as `rows.py` says.

A route or a parameter that has no row fails here, so each new one says who may use it and whose
objects it names (SEC-22).
"""

import asyncio
import copy
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

import engine.servers
from engine.servers.http.listing import Query
from engine.servers.openapi import FORMS, QUERIES
from tests.security.access.test_key_models import VARYING
from tests.support.fakes.fake_backend import MODEL
from tests.support.fakes.scripted_trainer import TunedBackend
from tests.tables.routes.inventory import places_of, routes_of
from tests.tables.routes.rows import PLAIN, ROWS, Place, Row
from tests.tables.routes.world import BODIES, World, client_for, new_app, new_world

Ids = dict[str, str]
# The rest of what a place in a body needs.
AROUND: dict[str, dict[str, Any]] = {
    "interp.edit.0": {"site": "blocks.0.hook_resid_post", "op": "patch"}
}
ENDLESS = "GET /v1/admin/live"  # this stream ends only when its client leaves
ORDER = {"HEAD": 0, "GET": 0, "POST": 1, "DELETE": 2}


def test_every_route_and_every_place_that_names_something_has_an_expectation(
    tmp_path: Path,
) -> None:
    app, _ = new_app(tmp_path, TunedBackend())
    routes = routes_of(app)
    assert routes.keys() == ROWS.keys(), "say in rows.py who may call the route"
    others = {each.path for each in app.routes if not isinstance(each, APIRoute)}
    assert others == PAGES, "only routes of the class APIRoute ask for a key"
    unknown = {}
    for name, row in ROWS.items():
        if row.access in ("admin", "node"):
            continue
        said = {re.sub(r"\.\d+", "", each.name) for each in row.places} | row.plain
        left = places_of(name, routes[name]) - said
        if left := {each for each in left if each.removeprefix("?") not in PLAIN}:
            unknown[name] = sorted(left)
    assert not unknown, "say in rows.py whose objects these name, or that they are plain"


PAGES = {"/", "/ui/{page}", "/ui/static/{name:path}"}


def test_routes_read_their_queries_by_a_class() -> None:
    """Otherwise `QUERIES` would not know their parameters. The rows of the others name them."""
    by_hand = {"ops/requests.py", "interp/routes.py", "http/listing.py"}
    sources = {path: path.read_text() for path in SERVERS.rglob("*.py")}
    found = {path.relative_to(SERVERS).as_posix() for path, text in sources.items() if READ in text}
    assert found == by_hand


SERVERS = Path(engine.servers.__file__).parent
READ = "request.query_params"


def access_of(row: Row, key: str | None) -> int:
    """The status with which a route refuses a key; 0: it does not."""
    allowed = {
        "open": (None, "unknown", "alice", "bob", "limited", "admin", "metrics", "node"),
        "key": ("alice", "bob", "limited", "admin"),
        "metrics": ("alice", "bob", "admin", "metrics"),
        "admin": ("admin",),
        "node": ("admin", "node"),
    }
    if key in allowed[row.access]:
        return 0
    is_known = key in ("alice", "bob", "limited")
    return 403 if is_known and row.access in ("metrics", "admin", "node") else 401


async def test_every_route_refuses_the_keys_that_its_row_refuses(tmp_path: Path) -> None:
    wrong = []
    app, keys = new_app(tmp_path, TunedBackend())
    for key in (None, *keys):
        async with client_for(app, None if key is None else keys[key]) as client:
            for name, row in ROWS.items():
                expected = access_of(row, key)
                if name == ENDLESS and not expected:
                    continue
                url = re.sub(r"\{[^}]+\}", "absent", row.path)
                # The content is no JSON, so no route does what it is asked.
                answer = await client.request(row.method, url, headers=JSON, content=b"{")
                status = answer.status_code if answer.status_code in (401, 403) else 0
                if status != expected:
                    wrong.append((name, key, answer.status_code, answer.text[:200]))
    assert not wrong


JSON = {"content-type": "application/json"}


def absent(found: str) -> str:
    """An id of the same form that no object has."""
    return found[:-4] + ("zzzz" if not found.endswith("zzzz") else "yyyy")


def filled(row: Row, ids: Ids) -> dict[str, Any]:
    """The request of a row. `ids` has what is at each place; the others are left out."""
    path = re.sub(r"\{(\w+)(:path)?\}", lambda each: ids.get(f"{{{each[1]}}}", "1"), row.path)
    asked: dict[str, Any] = {"method": row.method, "url": path}
    asked["params"] = {name[1:]: each for name, each in ids.items() if name[0] == "?"}
    if row.path in FORMS:
        return asked | {"files": {FORMS[row.path][1]: b"x"}}
    if row.method == "POST":
        body: Any = copy.deepcopy(BODIES.get(row.path.replace(":path}", "}"), {}))
        for name, each in ids.items():
            if name[0] not in "{?":
                put(body, name, each)
        asked["json"] = body
    return asked


def put(body: Any, place: str, value: str) -> None:
    """Set what is at a place such as `a.0.b`. Lists have one element."""
    *outer, last = place.split(".")
    at = body
    for depth, name in enumerate(outer):
        inner = AROUND.get(".".join(outer[: depth + 1]), {})
        if name == "0":
            at[:] = [dict(inner)]
            at = at[0]
            continue
        following = (*outer, last)[depth + 1]
        at[name] = [] if following == "0" else at.get(name, dict(inner))
        at = at[name]
    if last == "0":
        at[:] = [value]
    else:
        at[last] = value


def own_ids(row: Row, objects: Ids) -> Ids:
    """What a client's own request has at the places that it can't leave out."""
    base = BODIES.get(row.path, {})
    needed = (
        each
        for each in row.places
        if each.name[0] == "{" or (each.name.split(".")[0] in base and each.kind != "model")
    )
    return {each.name: objects[each.kind] for each in needed}


async def answer_to(client: httpx.AsyncClient, row: Row, ids: Ids, asked: str) -> tuple[int, str]:
    """Status and text, without what differs between two answers, and without the `asked` id."""
    async with asyncio.timeout(120):
        answer = await client.request(**filled(row, ids))
    return answer.status_code, VARYING.sub("#", answer.text.replace(asked, "?"))


def probes() -> list[tuple[Row, Place]]:
    """All places of all rows, so that what deletes comes last, and parts before their whole."""
    rows = sorted(ROWS.values(), key=_order)
    return [(row, place) for row in rows for place in row.places]


def _order(row: Row) -> tuple[int, bool, int]:
    return ORDER[row.method], row.path.endswith("/cancel"), -row.path.count("/")


def requests_of(row: Row, place: Place, own: Ids, other: Ids) -> list[tuple[Ids, Ids, str]]:
    """Requests with the other tenant's object, each with the same one for an object that is not
    there, and the id. If there are several places, the others have the client's own objects or the
    other tenant's.
    """
    asked = other[place.kind]
    mine = own_ids(row, own)
    found = [(mine | {place.name: asked}, mine | {place.name: absent(asked)}, asked)]
    if len(theirs := own_ids(row, other)) > 1 and place.name in theirs:
        found.append((theirs, theirs | {place.name: absent(asked)}, asked))
    return found


async def test_objects_of_another_tenant_look_like_missing_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another tenant, for an administrator, and for a key of the tenant that may not use the
    model; and nothing changes them. The owner can use each.
    """
    async with new_world(tmp_path, monkeypatch) as world:
        before = await kept_by(world, "alice")
        wrong = [
            *await _told(world, "bob", probes()),
            *await _told(world, "admin", [each for each in probes() if is_private(*each)]),
            *await _told(world, "limited", [each for each in probes() if is_model(each[1])]),
        ]
        assert not wrong
        assert await kept_by(world, "alice") == before
        assert not await _unused(world)


def is_model(place: Place) -> bool:
    return place.kind == "model"


def is_private(row: Row, place: Place) -> bool:
    """Whether the administrator sees no such object of a tenant."""
    return not is_model(place) and place.kind != "request"


async def _told(world: World, name: str, places: list[tuple[Row, Place]]) -> list[Any]:
    """The answers that say something about an object of `alice`, or that are not as expected."""
    wrong: list[Any] = []
    alice = world.objects["alice"]
    own = alice if name == "limited" else world.objects[name]
    async with world.client(name) as client:
        for row, place in places:
            for turn, (theirs, missing, asked) in enumerate(requests_of(row, place, own, alice)):
                there = await answer_to(client, row, theirs, asked)
                gone = await answer_to(client, row, missing, absent(asked))
                is_expected = there[0] == place.status or (turn > 0 and there[0] >= 400)
                if not is_expected or (there[0] != 200 and there != gone):
                    wrong.append((name, row.name, place.name, there, gone))
                wrong += leaks(name, row, there[1], asked, alice)
    return wrong


def leaks(name: str, row: Row, text: str, asked: str, objects: Ids) -> list[Any]:
    if name == "limited":
        return []
    secrets = {each for each in objects.values() if len(each) > 9} - {asked}
    return [(name, row.name, each) for each in secrets if each in text]


async def _unused(world: World) -> list[Any]:
    """The places where the owner gets no other answer than for a missing object. There, the test
    would notice nothing.
    """
    unused = []
    alice = world.objects["alice"]
    async with world.client("alice") as client:
        for row, place in probes():
            is_last = row.method == "DELETE" or row.path.endswith("/complete")
            if is_last and place is not row.places[-1]:
                continue  # the first request would leave nothing for the second
            own, missing, asked = requests_of(row, place, alice, alice)[0]
            gone = await answer_to(client, row, missing, absent(asked))
            there = await answer_to(client, row, own, asked)
            if (there != gone) != place.for_owner:
                unused.append((row.name, place.name, there, gone))
    return unused


async def kept_by(world: World, name: str) -> dict[str, Any]:
    """What a tenant reads of its objects by every route."""
    objects, found = world.objects[name], {}
    async with world.client(name) as client:
        for row in ROWS.values():
            if row.method == "GET" and row.places:
                found[row.name] = await answer_to(client, row, own_ids(row, objects), "")
    return found


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[type[Query]]:
    """The classes by which routes parse their queries."""
    seen: list[type[Query]] = []

    def validate(kind: type[Query], given: Any) -> Any:
        seen.append(kind)
        return super(Query, kind).model_validate(given)

    monkeypatch.setattr(Query, "model_validate", classmethod(validate))
    return seen


async def test_lists_have_only_the_objects_of_their_tenant_and_parse_what_they_describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[type[Query]]
) -> None:
    async with new_world(tmp_path, monkeypatch) as world:
        for name in ("alice", "bob"):
            told, undescribed, found = [], {}, set()
            mine, others = world.objects[name], [o for n, o in world.objects.items() if n != name]
            async with world.client(name) as client:
                for row in ROWS.values():
                    if row.method != "GET" or row.access in ("admin", "node"):
                        continue
                    parsed.clear()
                    text = (await client.request(**filled(row, own_ids(row, mine)))).text
                    found |= {kind for kind, each in mine.items() if each in text}
                    told += [leaks(name, row, text, "", each) for each in others]
                    described = [QUERIES[row.path]] if row.path in QUERIES else []
                    if parsed != described:
                        undescribed[row.name] = list(parsed)
            assert not any(told)
            assert not undescribed
            assert found >= LISTED


async def test_every_request_to_a_model_is_its_tenants(tmp_path: Path) -> None:
    """With the same words of two tenants, no two requests share an owner, a cache or a session."""
    backend = TunedBackend()
    app, keys = new_app(tmp_path, backend)
    reached, shared = [], []
    for row in ROWS.values():
        if row.method != "POST" or row.access != "key":
            continue
        ids = {each.name: MODEL for each in row.places if each.name[0] == "{"}
        seen = []
        for name in ("alice", "bob"):
            backend.reset()
            async with client_for(app, keys[name]) as client:
                await client.request(**filled(row, ids), headers={"x-session-id": "one"})
            seen += [each.context for each in backend.requests[:1]] or backend.embed_requests[:1]
        if len(seen) == 2:
            reached.append(row.name)
            names = [each for each in ("tenant", "salt", "session") if hasattr(seen[0], each)]
            shared += [(row.name, n) for n in names if getattr(seen[0], n) == getattr(seen[1], n)]
    assert not shared
    assert len(reached) >= 39, reached


# Kinds of objects that a list tells.
LISTED = {"chat", "file", "batch", "message_batch", "job", "model", "request"}
