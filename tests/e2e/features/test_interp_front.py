"""The example that puts `interp` in front of vLLM: its server and its workers' hooks are real, vLLM
is a stand-in that calls its model as vLLM does.
"""

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor, nn

EXAMPLE = Path(__file__).parents[3] / "examples/deploy_inference_server/simple_vllm_nnsight"
WIDTH, VOCAB, CHUNK = 8, 32, 3
PROMPT = "abcde"
SITE = "blocks.1.hook_resid_post"


class Attention(nn.Module):
    """The mean of all tokens so far, which the chunks of a prompt share."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        if int(positions[0]) == 0:
            self.seen = []
        made = []
        for row in hidden_states:
            self.seen.append(row)
            made.append(torch.stack(self.seen).mean(0))
        return torch.stack(made)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, positions: Tensor, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else x + residual
        stream = stream + self.self_attn(positions=positions, hidden_states=stream)
        return self.mlp(stream), stream


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList([Layer(), Layer()])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Inner()
        self.config = SimpleNamespace(hidden_size=WIDTH)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.model.embed(input_ids), None
        for layer in self.model.layers:
            x, residual = layer(positions, x, residual)
        return (x + residual) @ self.model.embed.weight.T


class StandIn:
    """vLLM's routes that the front uses, with one worker. Prompts are computed in chunks."""

    def __init__(self, taps: type) -> None:
        self.worker = type("Worker", (taps,), {"get_model": lambda _: self.model})()
        self.model = Model()
        self.order: list[str] = []
        self.may_stream = asyncio.Event()
        self.strays = False  # whether a token of another request is in each step
        routes = {
            "/tokenize": self.tokenize,
            "/collective_rpc": self.rpc,
            "/v1/completions": self.complete,
        }
        self.app = Starlette(
            routes=[Route(path, call, methods=["POST"]) for path, call in routes.items()]
        )

    async def tokenize(self, request: Request) -> Response:
        text = (await request.json())["prompt"]
        return JSONResponse({"tokens": [ord(c) % VOCAB for c in text], "token_strs": list(text)})

    async def rpc(self, request: Request) -> Response:
        body = await request.json()
        result = getattr(self.worker, body["method"])(*body["args"])
        return JSONResponse({"results": [result]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if body.get("stream"):
            return StreamingResponse(self.stream())
        self.order.append("whole")
        tokens = [ord(c) % VOCAB for c in body["prompt"]]
        made = self.generate(tokens, body["max_tokens"])
        usage = {"prompt_tokens": len(tokens)}
        choices = [{"text": str(made)}]
        return JSONResponse({"id": "x", "model": "m", "choices": choices, "usage": usage})

    async def stream(self) -> Any:
        yield b"first"
        await self.may_stream.wait()
        self.order.append("streamed")
        yield b" last"

    def generate(self, tokens: list[int], count: int) -> list[int]:
        made: list[int] = []
        at = 0
        with torch.no_grad():
            while len(made) < count:
                step = (tokens + made)[at : at + CHUNK]
                places = list(range(at, at + len(step)))
                stray = [0] if self.strays else []
                given = torch.tensor(stray + step), torch.tensor(stray + places)
                logits = self.model(input_ids=given[0], positions=given[1])
                at += len(step)
                if at == len(tokens) + len(made):
                    made.append(int(logits[-1].argmax()))
        return made


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    front = importlib.import_module("front")
    vllm = StandIn(importlib.import_module("worker_taps").InterpTaps)
    inner = httpx.AsyncClient(transport=httpx.ASGITransport(vllm.app), base_url="http://vllm")
    outer = httpx.ASGITransport(front.Front(inner, tmp_path).app)
    yield vllm, httpx.AsyncClient(transport=outer, base_url="http://front")


async def run(client: httpx.AsyncClient, **interp: Any) -> httpx.Response:
    return await client.post("/v1/interp/run", json={"prompt": PROMPT, "interp": interp})


async def test_captures_and_edits_in_front_of_vllm_equal_those_of_the_model(deployed: Any) -> None:
    vllm, client = deployed
    names = [each["name"] for each in (await client.get("/v1/interp/sites")).json()["data"]]
    assert len(names) == 8 and SITE in names
    vector = np.random.default_rng(0).normal(size=WIDTH).astype(np.float32)
    capture = [{"site": SITE}, {"site": "blocks.1.hook_resid_pre", "positions": "last"}]
    edits = [
        {"site": "blocks.0.hook_resid_post", "op": "add", "vector": vector.tolist(), "scale": 3},
        {"site": "blocks.1.hook_mlp_out", "op": "ablate", "positions": [0, 1]},
    ]
    plain = (await run(client, capture=capture)).json()
    edited = (await run(client, capture=capture, edit=edits)).json()
    ids = torch.tensor([ord(c) % VOCAB for c in PROMPT])
    places = torch.arange(len(PROMPT))
    first, second = vllm.model.model.layers
    for answer, added, kept in ((plain, 0.0, torch.ones(5)), (edited, 3.0, places >= 2)):
        with torch.no_grad():
            x, residual = first(places, vllm.model.model.embed(ids), None)
            stream = x + residual + added * torch.from_numpy(vector)
            x, residual = second(places, stream, None)
            expected = x * kept[:, None] + residual
        told = answer["interp"]["captures"]
        np.testing.assert_allclose(told[0]["values"], expected, atol=1e-5)
        np.testing.assert_allclose(told[1]["values"], stream[-1:], atol=1e-5)
        assert told[0]["positions"] == [0, 1, 2, 3, 4] and told[1]["positions"] == [4]
    assert edited["interp"]["tokens"] == list(PROMPT)
    again = (await run(client, capture=capture)).json()
    assert again["interp"] == plain["interp"], "the hooks of an edited request stayed"


async def test_an_interp_request_in_front_of_vllm_runs_without_other_requests(
    deployed: Any,
) -> None:
    vllm, client = deployed
    body = {"prompt": PROMPT, "max_tokens": 4}
    streaming = asyncio.create_task(client.post("/v1/completions", json=body | {"stream": True}))
    await asyncio.sleep(0.05)
    interp = {"capture": [{"site": SITE, "phase": "decode"}]}
    probed = asyncio.create_task(client.post("/v1/completions", json=body | {"interp": interp}))
    await asyncio.sleep(0.05)
    assert vllm.order == []
    vllm.may_stream.set()
    assert (await streaming).content == b"first last"
    told = (await probed).json()
    assert vllm.order == ["streamed", "whole"]
    assert told["interp"]["captures"][0]["positions"] == [5, 6, 7]  # the last token has none
    vllm.strays = True
    mixed = await client.post("/v1/completions", json=body | {"interp": interp})
    assert mixed.status_code == 500 and "send it again" in mixed.json()["error"]["message"]


@pytest.mark.parametrize(
    ("interp", "status"),
    [
        ({"lens": {}}, 400),
        ({"capture": [{"site": "blocks.9.hook_resid_post"}]}, 400),
        ({"edit": [{"site": SITE, "op": "add", "vector": [1.0]}]}, 400),
        ({"edit": [{"site": SITE, "op": "add", "vector": "unknown"}]}, 404),
        ({"edit": [{"site": SITE, "op": "patch", "from": {"id": "x"}}]}, 404),
    ],
)
async def test_interp_features_that_vllm_lacks_are_refused(
    deployed: Any, interp: Any, status: int
) -> None:
    _, client = deployed
    answer = await run(client, **interp)
    assert answer.status_code == status, answer.text
    assert len(answer.json()["error"]["message"]) > 20
    rpc = await client.post("/collective_rpc", json={"method": "interp_sites", "args": []})
    assert rpc.status_code == 404, "all methods of a worker could be called"
