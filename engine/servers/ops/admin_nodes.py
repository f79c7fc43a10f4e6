"""/v1/admin/nodes: lists the nodes of this server, and asks a node to leave."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.routing.nodes.manager import NodeManager
from engine.servers.ops.admin import who_is
from engine.servers.ops.reload import audit_of
from engine.servers.serving.services import Services, json_response


def add_admin_nodes_routes(app: FastAPI, services: Services) -> None:
    nodes = app.state.nodes
    assert isinstance(nodes, NodeManager)
    audit = audit_of(services)

    @app.get("/v1/admin/nodes")
    async def list_nodes() -> Response:
        found = {"nodes": nodes.discover(), "open_requests": nodes.num_open()}
        return json_response(found | {"decisions": nodes.decisions()})

    @app.delete("/v1/admin/nodes/{name}")
    async def drain(name: str, request: Request) -> Response:
        async with audit.change(who_is(request), "drain_node", name):
            nodes.drain(name)
        return json_response({"name": name, "state": "leaving"})
