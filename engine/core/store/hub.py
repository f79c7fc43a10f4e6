"""The Hugging Face hub: addresses of models, the saved login and cache, the files to download."""

import contextlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from engine.core.errors import ConfigError, ModelError, ModelFormatError
from engine.core.store.checkpoint_files import PEFT_FILES, is_companion, is_weights
from engine.core.store.fetch import BearerToken, RemoteFile, check_status, open_stream
from engine.core.store.model_store import check_file_name

SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_LISTING = 16 * 2**20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SPEC = re.compile(
    r"(?P<org>[A-Za-z0-9][\w.-]*)/(?P<repo>[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[A-Za-z0-9][\w.-]*))?(?::(?P<quant>\w+)|/(?P<file>[^@\\?#\0]+))?",
    re.ASCII,
)
# GGUF repositories have a file per quant. Without a quant, the first of these that exists is taken.
_USUAL_QUANTS = ("Q4_K_M", "MXFP4", "Q5_K_M", "Q4_K_S", "Q4_0", "Q8_0", "Q6_K", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class HubSpec:
    org: str
    repo: str
    revision: str
    file: str | None  # path in the repository
    quant: str | None = None  # which GGUF file of the repository, such as Q4_K_M

    @classmethod
    def parse(cls, text: str) -> "HubSpec":
        """Parse the text after `hf:`."""
        match = _SPEC.fullmatch(text)
        file = match["file"] if match else None
        if match is None or any(part in ("", ".", "..") for part in (file or "x").split("/")):
            raise ConfigError(
                f"'hf:{text}' is not a hub file: write hf:ORG/REPO/FILE, hf:ORG/REPO:QUANT for a "
                "GGUF, or hf:ORG/REPO for a whole repository, with @REVISION after REPO if it "
                "matters"
            )
        revision = match["revision"] or "main"
        return cls(match["org"], match["repo"], revision, file, match["quant"])

    def url(self, file: str, revision: str | None = None) -> str:
        path = quote(file)
        return f"{endpoint()}/{self.org}/{self.repo}/resolve/{revision or self.revision}/{path}"


def endpoint() -> str:
    url = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    if not re.match(r"https?://[^/]", url):
        raise ConfigError("HF_ENDPOINT must be an http(s) URL", param="HF_ENDPOINT")
    return url


def hub_token() -> BearerToken | None:
    """The token of $HF_TOKEN, or the one that `hf auth login` has saved."""
    value = os.environ.get("HF_TOKEN", "").strip()
    if not value:
        saved = Path(os.environ.get("HF_TOKEN_PATH") or _hub_home() / "token").expanduser()
        with contextlib.suppress(OSError, UnicodeDecodeError):
            value = saved.read_text(encoding="utf-8").strip()
    return BearerToken(endpoint(), value) if value else None


def _hub_home() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{base}/huggingface").expanduser()


def cached_snapshot(spec: HubSpec) -> Path | None:
    """A model that another program, such as `hf download`, has put into the hub's own cache: the
    folder of a checkpoint, or the path of a GGUF file. None if the model is not complete.
    """
    if spec.file is not None:
        return None
    root = Path(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub").expanduser()
    repository = root / f"models--{spec.org}--{spec.repo}"
    try:
        commit = (repository / "refs" / spec.revision).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        commit = spec.revision
    snapshot = repository / "snapshots" / commit
    if not re.fullmatch(r"[0-9a-f]{40}", commit) or not snapshot.is_dir():
        return None
    names = {file.name for file in snapshot.iterdir() if file.exists()}
    if spec.quant is None and "config.json" in names:
        shards = _shards(snapshot / _INDEX) if _INDEX in names else {_SINGLE}
        if shards and shards <= names:
            return snapshot
    chosen = pick_gguf(names, spec.quant)
    return snapshot / chosen[0] if chosen and set(chosen) <= names else None


def _shards(index: Path) -> set[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return set(map(str, weight_map.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()


def pick_gguf(names: Iterable[str], quant: str | None) -> list[str]:
    """The GGUF file of a quant, or all parts of it if it is split, in order. Without a quant, the
    file of the most usual quant. Empty if there is none.
    """
    files = [
        name
        for name in sorted(names)
        if name.lower().endswith(".gguf") and "mmproj" not in name.lower()
    ]
    found: list[str] = []
    for wanted in _USUAL_QUANTS if quant is None else (quant,):
        pattern = re.compile(rf"(^|[-_.]){re.escape(wanted)}([-_.]|$)", re.IGNORECASE)
        found = [name for name in files if pattern.search(name.rpartition("/")[2])]
        if found:
            break
    if not found and quant is None:
        found = files
    if not found or not (split := SPLIT.fullmatch(found[0])):
        return found[:1]
    stem = f"{split['stem']}-"
    return [name for name in found if name.startswith(stem) and SPLIT.fullmatch(name)]


def repository_files(
    client: httpx.Client, spec: HubSpec, token: BearerToken | None
) -> tuple[RemoteFile, ...]:
    """The files of a model on the Hub: a safetensors checkpoint, or the GGUF file of a quant. Their
    URLs name the current commit of the revision, so that all files are of the same version.
    """
    commit, names = _listing(client, spec, token)
    companions = set(filter(is_companion, names))
    has_checkpoint = "config.json" in companions and any(map(is_weights, names))
    if spec.quant is not None or not has_checkpoint:
        if chosen := pick_gguf(names, spec.quant):
            return tuple(RemoteFile(_base(name), spec.url(name, commit)) for name in chosen)
        raise ModelFormatError(_not_a_model(spec, names))
    if _INDEX in names:
        weights = _indexed_weights(client, spec.url(_INDEX, commit), token)
        companions.add(_INDEX)
    else:
        weights = {_SINGLE} & names or set(filter(is_weights, names))
    wanted = [*sorted(companions), *sorted(weights)]
    return tuple(RemoteFile(name, spec.url(name, commit)) for name in wanted)


def adapter_files(
    client: httpx.Client, spec: HubSpec, token: BearerToken | None
) -> tuple[RemoteFile, ...]:
    """The files of a LoRA adapter on the Hub: those of PEFT, or else a GGUF file."""
    commit, names = _listing(client, spec, token)
    chosen = [*PEFT_FILES] if names.issuperset(PEFT_FILES) and spec.quant is None else []
    chosen = chosen or pick_gguf(names, spec.quant)[:1]
    if not chosen:
        raise ModelFormatError(
            f"hf:{spec.org}/{spec.repo} is no adapter: it holds neither {' and '.join(PEFT_FILES)}"
            " nor a GGUF file"
        )
    return tuple(RemoteFile(_base(name), spec.url(name, commit)) for name in chosen)


def _listing(
    client: httpx.Client, spec: HubSpec, token: BearerToken | None
) -> tuple[str, set[str]]:
    """The current commit of a revision, and the names of its files."""
    api = f"{endpoint()}/api/models/{spec.org}/{spec.repo}/revision/{spec.revision}"
    listing = _get_json(client, api, token)
    commit = listing.get("sha")
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise ModelError(f"{api} names no commit")
    siblings = listing.get("siblings")
    entries = siblings if isinstance(siblings, list) else []
    return commit, {str(entry.get("rfilename")) for entry in entries if isinstance(entry, dict)}


def _indexed_weights(client: httpx.Client, url: str, token: BearerToken | None) -> set[str]:
    weight_map = _get_json(client, url, token).get("weight_map")
    shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not all(isinstance(name, str) and is_weights(name) for name in shards):
        raise ModelFormatError(f"{url} names files that are not plain .safetensors names")
    return shards


def _base(name: str) -> str:
    return check_file_name(name.rpartition("/")[2])


def _not_a_model(spec: HubSpec, names: set[str]) -> str:
    where = f"hf:{spec.org}/{spec.repo}"
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        others = ", ".join(ggufs[:20])
        return f"{where} has no GGUF file for {spec.quant}; it has {others}"
    return f"{where} holds neither config.json with .safetensors weights nor a GGUF file"


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
