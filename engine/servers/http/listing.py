"""Parses the query parameters of URLs, and builds list pages in OpenAI's format."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from engine.servers.http.errors import invalid_request, problem

Order = Literal["asc", "desc"]
# The id of the last item of the previous page. The requested page starts after this item.
Cursor = Annotated[str, Field(max_length=512)]


class Query(BaseModel):
    """Base class for the query parameters of a route. Values arrive as text, so pydantic converts
    them to the types of the fields.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


Kind = TypeVar("Kind", bound=Query)


def parse_query(kind: type[Kind], request: Request) -> Kind:
    """Parse the query of a URL. A parameter becomes a list if its name is repeated or ends in `[]`.
    SDKs write lists in both ways. `NAME[KEY]=VALUE` is a field of the object NAME.
    """
    collected: dict[str, list[str]] = {}
    objects: dict[str, dict[str, str]] = {}
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        outer, _, inner = name.partition("[")
        if inner.endswith("]") and inner != "]":
            objects.setdefault(outer, {})[inner[:-1]] = value
            continue
        values = collected.setdefault(name.removesuffix("[]"), [])
        values.append(value)
        is_list = len(values) > 1 or name.endswith("[]")
        given[name.removesuffix("[]")] = values if is_list else value
    try:
        return kind.model_validate(given | objects)
    except ValidationError as error:
        raise invalid_request(error) from None


def following(items: list[dict[str, Any]], after: str | None) -> list[dict[str, Any]]:
    """The items after the one whose id is `after`, or all of them if it is None."""
    if after is None:
        return items
    ids = [item["id"] for item in items]
    if after not in ids:
        raise problem("after", "is the id of none of these items")
    return items[ids.index(after) + 1 :]


def list_body(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page with the first `limit` of `items`. `has_more` is true if `items` is longer than that,
    so pass one item more than `limit`.
    """
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
