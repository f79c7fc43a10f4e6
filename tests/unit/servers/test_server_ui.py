"""The page's routes: what they serve, to whom, and with which headers. Browsers: tests/ui."""

import gzip
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.ui.routes import PAGES, STATIC
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

KEY = "k" * 32
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MAX_LINES = 800
VENDOR = STATIC / "vendor"
CAUSES = Path(__file__).parents[3] / "docs" / "explain.md"


def client_of(**server: object) -> httpx.AsyncClient:
    app = create_app(make_settings(server=server), FakeBackend(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of() as client:
        yield client


async def test_browsers_get_the_page_and_ollama_clients_their_probe(
    client: httpx.AsyncClient,
) -> None:
    page = await client.get("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html") and "<html" in page.text
    assert (await client.get("/")).text == "Ollama is running"
    assert (await client.head("/")).status_code == 200


async def test_each_page_names_files_that_exist(client: httpx.AsyncClient) -> None:
    for path in ("/", *(f"/ui/{page}" for page in PAGES)):
        page = await client.get(path, headers=HTML)
        found = re.findall(r'(?:href|src)="([^"]+)"', page.text)
        found += json.loads(re.findall(r"importmap\">(.*?)<", page.text, re.DOTALL)[0])[
            "imports"
        ].values()
        assert len(found) >= 9
        for url in found:
            answer = await client.get(str(page.url.join(url)))
            assert answer.status_code == 200, (path, url)
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_the_content_security_policy_is_strict(client: httpx.AsyncClient) -> None:
    page = await client.get("/", headers=HTML)
    policy = dict(
        each.strip().split(" ", 1) for each in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["style-src"] == "'self'"
    assert "unsafe" not in str(policy) and "http" not in str(policy)
    inline = re.findall(r"<script(?![^>]*src=)[^>]*>", page.text)
    assert inline == ['<script type="importmap">']
    assert "style=" not in page.text and "onload=" not in page.text


async def test_static_files_are_revalidated_by_etag(client: httpx.AsyncClient) -> None:
    first = await client.get("/ui/static/app.js")
    tag = {"if-none-match": first.headers["etag"]}
    again = await client.get("/ui/static/app.js", headers=tag)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    plain = await client.get("/ui/static/app.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == first.content == (STATIC / "app.js").read_bytes()
    assert first.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    "path",
    [
        "/ui/absent",
        "/ui/static/absent.js",
        "/ui/static/",
        "/ui/static/..%2froutes.py",
        "/ui/static/vendor/README.md",
        "/ui/static//etc/passwd",
    ],
)
async def test_unknown_ui_paths_are_404(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path, headers=HTML)).status_code == 404


async def test_ui_files_need_no_key_but_the_api_does() -> None:
    async with client_of(api_key=KEY) as client:
        assert (await client.get("/", headers=HTML)).status_code == 200
        assert (await client.get("/ui/static/app.js")).status_code == 200
        assert (await client.get("/")).status_code == 401  # Ollama's probe
        assert (await client.get("/v1/models", headers=HTML)).status_code == 401
        assert (await client.post("/ui/live")).status_code == 405


async def test_the_ui_can_be_turned_off() -> None:
    async with client_of(ui=False, dialects=[]) as client:
        for path in ("/", "/ui/live", "/ui/static/app.js"):
            assert (await client.get(path, headers=HTML)).status_code == 404


async def test_the_ui_works_below_a_path_prefix() -> None:
    async with client_of(root_path="/llm") as client:
        page = await client.get("/llm/", headers=HTML)
        assert 'src="ui/static/app.js"' in page.text
        assert (await client.get("/llm/ui/static/app.js")).status_code == 200


async def test_the_ui_may_call_its_own_server(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    own = await client.post(
        "/v1/chat/completions", json=body, headers={"origin": "http://localhost"}
    )
    assert own.status_code == 200
    other = await client.post(
        "/v1/chat/completions", json=body, headers={"origin": "http://evil.example"}
    )
    assert other.status_code == 403


def test_vendored_libraries_equal_the_npm_packages() -> None:
    listed = json.loads((VENDOR / "versions.json").read_text())
    assert {each.name for each in VENDOR.iterdir() if each.is_dir()} == listed.keys()
    for name, package in listed.items():
        inside = (each for each in (VENDOR / name).rglob("*") if each.is_file())
        files = {each.relative_to(VENDOR / name).as_posix() for each in inside}
        assert files == {"LICENSE", *package["files"]}, name
        for file, facts in package["files"].items():
            content = (VENDOR / name / file).read_bytes()
            assert hashlib.sha256(content).hexdigest() == facts["sha256"], file


def test_our_own_ui_files_stay_small() -> None:
    ours = [
        each
        for each in STATIC.rglob("*")
        if each.suffix in (".js", ".css", ".html") and VENDOR not in each.parents
    ]
    long = {each.name: len(each.read_text().splitlines()) for each in ours}
    assert not {name: lines for name, lines in long.items() if lines > MAX_LINES}
    assert sum(len(gzip.compress(each.read_bytes())) for each in ours) < 150_000


def test_the_page_names_every_cause_of_a_slow_request() -> None:
    named = set(re.findall(r"^  (\w+): \[", (STATIC / "room" / "waterfall.js").read_text(), re.M))
    told = set(re.findall(r"^\| `(\w+)` \|", CAUSES.read_text().partition("| cause |")[2], re.M))
    assert len(told) > 25 and told - named == set()
