"""Files on a model hub: `hf:ORG/REPO[@REVISION]/FILE`; without FILE, a whole safetensors
repository.

HF_ENDPOINT and HF_TOKEN work as in other hub tools. File names in a listing are untrusted: only
plain names of the kinds that a checkpoint needs are accepted.
"""

import json
import os
import re
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from engine.core.errors import ConfigError, ModelError, ModelFormatError
from engine.core.store.checkpoint_files import is_companion, is_weights
from engine.core.store.fetch import BearerToken, RemoteFile, check_status, open_stream

MAX_LISTING = 16 * 2**20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SPEC = re.compile(
    r"(?P<org>[A-Za-z0-9][\w.-]*)/(?P<repo>[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[A-Za-z0-9][\w.-]*))?(?:/(?P<file>[^@\\?#\0]+))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubSpec:
    org: str
    repo: str
    revision: str
    file: str | None  # path in the repository

    @classmethod
    def parse(cls, text: str) -> "HubSpec":
        """Parse the text after `hf:`."""
        match = _SPEC.fullmatch(text)
        file = match["file"] if match else None
        if match is None or any(part in ("", ".", "..") for part in (file or "x").split("/")):
            raise ConfigError(
                f"'hf:{text}' is not a hub file: write hf:ORG/REPO/FILE, or hf:ORG/REPO for a "
                "whole safetensors repository, with @REVISION after REPO if it matters"
            )
        return cls(match["org"], match["repo"], match["revision"] or "main", file)

    def url(self, file: str, revision: str | None = None) -> str:
        path = quote(file)
        return f"{endpoint()}/{self.org}/{self.repo}/resolve/{revision or self.revision}/{path}"


def endpoint() -> str:
    url = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    if not re.match(r"https?://[^/]", url):
        raise ConfigError("HF_ENDPOINT must be an http(s) URL", param="HF_ENDPOINT")
    return url


def hub_token() -> BearerToken | None:
    value = os.environ.get("HF_TOKEN", "").strip()
    return BearerToken(endpoint(), value) if value else None


def repository_files(
    client: httpx.Client, spec: HubSpec, token: BearerToken | None
) -> tuple[RemoteFile, ...]:
    """The files of a safetensors checkpoint, pinned to the revision's current commit."""
    api = f"{endpoint()}/api/models/{spec.org}/{spec.repo}/revision/{spec.revision}"
    listing = _get_json(client, api, token)
    commit = listing.get("sha")
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise ModelError(f"{api} names no commit")
    siblings = listing.get("siblings")
    entries = siblings if isinstance(siblings, list) else []
    names = {str(entry.get("rfilename")) for entry in entries if isinstance(entry, dict)}
    companions = set(filter(is_companion, names))
    if _INDEX in names:
        weights = _indexed_weights(client, spec.url(_INDEX, commit), token)
        companions.add(_INDEX)
    else:
        weights = {_SINGLE} & names or set(filter(is_weights, names))
    if not weights or "config.json" not in companions:
        raise ModelFormatError(_not_a_checkpoint(spec, names))
    wanted = [*sorted(companions), *sorted(weights)]
    return tuple(RemoteFile(name, spec.url(name, commit)) for name in wanted)


def _indexed_weights(client: httpx.Client, url: str, token: BearerToken | None) -> set[str]:
    weight_map = _get_json(client, url, token).get("weight_map")
    shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not all(isinstance(name, str) and is_weights(name) for name in shards):
        raise ModelFormatError(f"{url} names files that are not plain .safetensors names")
    return shards


def _not_a_checkpoint(spec: HubSpec, names: set[str]) -> str:
    where = f"hf:{spec.org}/{spec.repo}"
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        return f"{where} holds GGUF files; name one of them: {where}/{ggufs[0]}"
    return f"{where} holds no config.json with .safetensors weights, so it cannot be pulled whole"


def _get_json(client: httpx.Client, url: str, token: BearerToken | None) -> dict[str, object]:
    body = bytearray()
    try:
        response, _ = open_stream(client, url, {}, token)
        with closing(response):
            check_status(response, url)
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_LISTING:
                    raise ModelError(f"{url} is larger than {MAX_LISTING} bytes")
        value = json.loads(body)
    except httpx.TransportError as error:
        raise ModelError(f"cannot reach {url}: {error or type(error).__name__}") from error
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ModelError(f"{url} did not answer with a JSON object")
    return value
