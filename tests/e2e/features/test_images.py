"""Images over HTTP, through all three chat APIs, to a tiny SmolVLM with random weights."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.parity import tiny_vision
from tests.support.servers.served import ServedEngine, serve

NUM_NEW = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    _, path = tiny_vision.servable("smolvlm", tmp_path_factory.mktemp("served"))
    with serve(str(path), "--backend", "torch", "--threads", "1") as served:
        yield served


def png(seed: int, width: int = 40, height: int = 30) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def parts(*images: bytes) -> list[dict[str, Any]]:
    shown = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in images]
    return [{"type": "text", "text": "What is the fox?"}, *shown]


def ask(server: ServedEngine, *images: bytes) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": parts(*images)}],
        max_tokens=NUM_NEW,
        temperature=0,
        extra_body={"ignore_eos": True},
    )


def test_an_answer_depends_on_the_image_and_its_prefix_is_cached(server: ServedEngine) -> None:
    one, other = png(1), png(2)
    first, again, different = ask(server, one), ask(server, one), ask(server, other)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert different.choices[0].message.content != first.choices[0].message.content
    num_prompt = first.usage.prompt_tokens
    assert num_prompt > 4 * 5  # at least five tiles of four tokens
    assert again.usage.prompt_tokens_details.cached_tokens >= num_prompt - 16
    assert different.usage.prompt_tokens_details.cached_tokens < 32
    two = ask(server, one, other)
    assert two.usage.prompt_tokens > num_prompt + 20


def test_all_chat_apis_give_the_same_answer_about_an_image(server: ServedEngine) -> None:
    image = png(3)
    answer = ask(server, image).choices[0].message.content
    encoded = base64.b64encode(image).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    message = anthropic.Anthropic(base_url=server.url, api_key="none").messages.create(
        model=server.model,
        max_tokens=NUM_NEW,
        extra_body={"temperature": 0},
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is the fox?"},
                    {"type": "image", "source": source},
                ],
            }
        ],
    )
    assert "".join(block.text for block in message.content) in answer
    shown = {"type": "input_image", "image_url": data_url(image)}
    body = {
        "model": server.model,
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "What is the fox?"}, shown],
            }
        ],
        "max_output_tokens": 16,
        "temperature": 0,
    }
    response = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
    assert response.status_code == 200, response.text
    num_tokens = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert response.json()["usage"]["input_tokens"] == num_tokens
    counted = httpx.post(
        f"{server.url}/tokenize",
        json={"messages": [{"role": "user", "content": parts(image)}]},
        timeout=60,
    )
    assert counted.json()["count"] == num_tokens


def test_a_hostile_image_is_refused(server: ServedEngine) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, png(5)[:-200])
    assert refused.value.code == "invalid_image"


def test_images_of_extreme_aspect_ratios_are_answered(server: ServedEngine) -> None:
    """And after all of this, the engine lives."""
    for size in ((1, 1), (1, 5_000), (9_000, 1)):
        assert ask(server, png(6, *size)).usage.completion_tokens == NUM_NEW
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_image_urls_are_not_fetched_by_default(server: ServedEngine) -> None:
    url = "http://127.0.0.1:9/cat.png"
    shown = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": server.model, "messages": [{"role": "user", "content": [shown]}]}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "fetches no images" in response.text and url not in response.text


def chat(server: ServedEngine, content: Any, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "messages": [{"role": "user", "content": content}], **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def test_prompt_logprobs_cover_every_token_of_a_prompt_with_an_image(server: ServedEngine) -> None:
    fields = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 1, "n": 2, "ignore_eos": True}
    answer = chat(server, parts(png(8)), **fields)
    assert answer.status_code == 200, answer.text
    scored = answer.json()["prompt_logprobs"]
    assert len(scored) == answer.json()["usage"]["prompt_tokens"]
    assert scored[0] is None and all(scored[1:])


def test_thousands_of_tiny_images_are_refused_by_every_api(server: ServedEngine) -> None:
    tiny, num_messages = png(9, 1, 1), 50
    encoded = base64.b64encode(tiny).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    url = {"type": "image_url", "image_url": {"url": data_url(tiny)}}
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [url] * 60}]},
        "/v1/messages": {
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}] * 60}],
        },
        "/v1/responses": {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": data_url(tiny)}] * 60,
                }
            ]
        },
        "/api/chat": {"messages": [{"role": "user", "content": "", "images": [encoded] * 60}]},
        "/tokenize": {"messages": [{"role": "user", "content": [url] * 60}]},
    }
    for path, body in bodies.items():
        name = "input" if "input" in body else "messages"
        body = {**body, "model": server.model, name: body[name] * num_messages}
        answer = httpx.post(f"{server.url}{path}", json=body, timeout=120)
        assert answer.status_code == 400, (path, answer.text)
        assert "image" in answer.text, (path, answer.text)
    assert ask(server, png(1)).usage.completion_tokens == NUM_NEW
