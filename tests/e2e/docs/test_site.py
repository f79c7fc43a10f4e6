"""The site of `make docs`: every link leads somewhere, nothing comes from another host, and a
broken link stops the build.
"""

import os
import shutil
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import engine

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "build/site"
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# What a build reads besides docs/.
COPIED = (*OUTSIDE, "deploy/README.md", "benchmarks/README.md", "engine/__init__.py")


class Links(HTMLParser):
    """The anchors of a page, its links, and what a browser loads with it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag in ("link", "script", "img", "iframe"):
            self.loaded.update(found[name] for name in ("href", "src") if name in found)


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    config = root / "deploy/site/mkdocs.yml"
    command = [TOOLS / "bin/mkdocs", "build", "--strict", "-f", config, "-d", out]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    made = subprocess.run(["make", TOOLS.relative_to(ROOT) / ".created"], cwd=ROOT)
    if made.returncode:
        pytest.skip("the tools that build the site can't be installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = build(ROOT, out)
    assert built.returncode == 0, built.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {path: Links(path) for path in site.rglob("*.html")}


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Links]) -> None:
    broken = defaultdict(set)
    for page, found in pages.items():
        for link in found.links | found.loaded:
            target, anchor = urldefrag(link)
            if urlsplit(target).scheme:
                continue
            base = site if target.startswith("/") else page.parent  # 404.html is shown anywhere
            path = Path(os.path.normpath(base / unquote(target).lstrip("/"))) if target else page
            path = path / "index.html" if path.is_dir() else path
            if not path.exists() or (path in pages and anchor not in pages[path].anchors):
                broken[page.name].add(link)
    assert not broken


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Links]) -> None:
    assert not {each for found in pages.values() for each in found.loaded if "//" in each}
    sheets = [path.read_text() for path in site.rglob("*.css")]
    assert sheets and not any("url(http" in each or "url(//" in each for each in sheets)


def test_the_site_has_every_page_a_search_and_the_version(
    site: Path, pages: dict[Path, Links]
) -> None:
    sources = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site) for path in pages}
    assert {path.with_suffix(".html") for path in sources - {Path("README.md")}} <= built
    assert {Path("project") / path.replace(".md", ".html") for path in COPIED[1:4]} <= built
    assert "continuous batching" in (site / "search/search_index.json").read_text()
    assert f"engine {engine.__version__}" in (site / "index.html").read_text()


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "deploy/site", tmp_path / "deploy/site")
    icon = "engine/servers/ui/static/icon.svg"
    for path in (*COPIED, icon):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    with (tmp_path / "docs/features.md").open("a") as page:
        page.write("\n[one](gone.md) [two](models.md#gone) `[three](code.md)`\n")
    built = build(tmp_path, tmp_path / "out")
    assert built.returncode != 0
    assert "gone.md" in built.stderr and "#gone" in built.stderr and "code.md" not in built.stderr
