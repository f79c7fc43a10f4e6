"""Routes that generate text, without the general part of FastAPI's dependency solver.

Such a route needs an API key and a ticket, and declares nothing else of a request. For these two,
the solver takes longer than the checks themselves.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from engine.servers.serving.services import Services

Check = Callable[[Request], Awaitable[None]]


class AdmittedRoute(APIRoute):
    """Any route of the application. If its handler only takes a request and a ticket, both are
    passed directly. OpenAPI and the handlers of errors see no difference.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        services = _services_of(self.dependant)
        if services is None:
            return super().get_route_handler()
        checks: list[Check] = [
            each.call
            for each in self.dependant.dependencies
            if each.name is None and each.call is not None
        ]
        admit, handler = services.admit, self.endpoint

        async def handle(request: Request) -> Response:
            for check in checks:
                await check(request)
            ticket = await admit(request)
            # This stack is left when the response has been sent.
            request.scope["fastapi_inner_astack"].push_async_callback(ticket.close)
            response: Response = await handler(request, ticket)
            return response

        return handle


def _services_of(dependant: Dependant) -> Services | None:
    """The services that admit the requests of a route. None if its handler needs other things."""
    more = (
        *(dependant.path_params, dependant.query_params, dependant.header_params),
        *(dependant.cookie_params, dependant.body_params),
    )
    named = [each for each in dependant.dependencies if each.name is not None]
    if any(more) or len(named) != 1 or dependant.request_param_name != "request":
        return None
    services = getattr(named[0].call, "__self__", None)
    is_ticket = isinstance(services, Services) and named[0].call == services.admitted
    return services if is_ticket else None
