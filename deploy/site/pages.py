"""What MkDocs asks while it builds the site of `docs/`.

`docs/README.md` lists every page, so it is also the navigation. The pages outside `docs/` that it
lists are in the site too, below `project/`. A link to another file of the repository leads to the
repository's own site.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INDEX = (ROOT / "docs/README.md").read_text(encoding="utf-8")
# Files of the site that are elsewhere in the repository.
ASSETS = {
    "images/icon.svg": "engine/servers/ui/static/icon.svg",
    "site.css": "deploy/site/site.css",
}
# Code, in which nothing is a link, or a link with its target and anchor.
CODE_OR_LINK = re.compile(r"^```.*?^```|`[^`\n]+`|\]\(([^)\s#]+)(#[^)\s]*)?\)", re.S | re.M)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "engine/__init__.py").read_text())
    assert version is not None
    config.site_name += f" {version[1]}"
    config.nav = list(shelves())
    return config


def shelves() -> Iterator[dict[str, Any]]:
    """The headings of the index with their pages. The index itself is the first page."""
    yield {"Home": "README.md"}
    for part in INDEX.split("\n## ")[1:]:
        links = re.findall(r"^- \[([^\]]+)\]\(([^)#]+)\):", part, re.M)
        yield {part.partition("\n")[0]: [place(normpath(f"docs/{link}")) for _, link in links]}


def place(path: str) -> str:
    """Where a page of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"project/{path}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    outside = [each for shelf in shelves() for pages in shelf.values() for each in pages]
    paths = {each: each.removeprefix("project/") for each in outside if each.startswith("project/")}
    for uri, path in {**paths, **ASSETS}.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    inside = uri.startswith("project/")
    folder = os.path.dirname(uri.removeprefix("project/") if inside else f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if target is None or ":" in target:
            return match[0]
        path = normpath(os.path.join(folder, target))
        if files.get_file_from_path(place(path)):
            return f"]({relpath(place(path), os.path.dirname(uri) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return match[0]  # MkDocs says that it leads nowhere
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.extra['repository']}/{kind}/main/{path}{anchor})"

    text = CODE_OR_LINK.sub(moved, text)
    return re.sub(r"\[[\w/-]+\.md\]\((\S+?)\)", titled, text) if uri == "README.md" else text


def titled(match: re.Match[str]) -> str:
    """A link of the index, with the title of the page in place of the name of its file."""
    title = (ROOT / "docs" / match[1]).read_text(encoding="utf-8").partition("\n")[0]
    return f"[{title.removeprefix('# ')}]({match[1]})"


def on_page_content(html: str, **_: Any) -> str:
    """A bar in the code of a table has a backslash before it, which GitHub does not show."""
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html, flags=re.S)


def on_post_build(config: MkDocsConfig) -> None:
    """Remove what no reader loads: source maps, and the search in languages other than English."""
    scripts = Path(config.site_dir) / "assets"
    shutil.rmtree(scripts / "javascripts/lunr")
    for path in scripts.rglob("*.map"):
        path.unlink()
