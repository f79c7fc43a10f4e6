"""Pulls from a loopback server that cuts, redirects, lies and changes its mind."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.core.errors import (
    ConfigError,
    ConflictError,
    ModelError,
    ModelFormatError,
    NotFoundError,
    ResourceError,
)
from engine.core.store import fetch, fit
from engine.core.store.catalogue import CATALOGUE
from engine.core.store.model_store import (
    ModelStore,
    needs_pull,
    resolve_model,
)
from engine.core.store.pull import pull
from tests.support.servers.model_site import (
    COMMIT,
    GGUF,
    OTHER,
    Page,
    Site,
    digest,
    parts,
    serve_site,
)


@pytest.fixture
def site() -> Iterator[Site]:
    site, server = serve_site()
    yield site
    server.shutdown()
    server.server_close()


cdn = site  # a second server


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setattr(fetch, "RETRY_SECONDS", 0.0)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ModelStore(tmp_path / "models")


def test_a_finished_pull_is_recorded_and_private(site: Site, store: ModelStore) -> None:
    site.pages["/a/Tiny.Q4.gguf"] = Page(GGUF)
    path = pull(f"{site.url}/a/Tiny.Q4.gguf?token=secret", store=store)
    assert path.read_bytes() == GGUF
    model = store.models()["tiny.q4"]
    assert (model.size, model.sha256) == (len(GGUF), digest(GGUF))
    assert model.source == f"{site.url}/a/Tiny.Q4.gguf"
    assert store.root.stat().st_mode & 0o777 == 0o700
    assert "secret" not in "".join(p.read_text() for p in store.root.glob("*/model.json"))
    pull(f"{site.url}/a/Tiny.Q4.gguf", store=store)
    assert len(site.requests) == 1


def test_a_broken_connection_is_resumed_at_the_last_byte(site: Site, store: ModelStore) -> None:
    site.pages["/m.gguf"] = Page(GGUF, cuts=[100_000, 50_000])
    path = pull(f"{site.url}/m.gguf", store=store)
    assert path.read_bytes() == GGUF
    assert site.ranges() == [None, "bytes=100000-", "bytes=150000-"]


def test_an_interrupted_pull_is_continued_by_the_next_pull(site: Site, store: ModelStore) -> None:
    page = site.pages["/m.gguf"] = Page(GGUF, cuts=[1000] + [0] * 10)
    with pytest.raises(ModelError, match="run the same command"):
        pull(f"{site.url}/m.gguf", store=store)
    assert store.models() == {}
    assert [path.stat().st_size for path in parts(store)] == [1000]
    page.cuts, site.requests[:] = [], []
    assert pull(f"{site.url}/m.gguf", store=store).read_bytes() == GGUF
    assert site.ranges() == ["bytes=1000-"]
    assert parts(store) == []


@pytest.mark.parametrize("etag", ['"v2"', 'W/"v1"', None])
def test_changed_remote_content_is_never_appended_to_old_bytes(
    site: Site, store: ModelStore, etag: str | None
) -> None:
    page = site.pages["/m.gguf"] = Page(OTHER, etag='"v1"' if etag == '"v2"' else etag)
    page.cuts = [1000] + [0] * 10
    with pytest.raises(ModelError):
        pull(f"{site.url}/m.gguf", store=store)
    site.pages["/m.gguf"] = Page(GGUF, etag=etag)
    assert pull(f"{site.url}/m.gguf", store=store).read_bytes() == GGUF


def test_a_server_without_range_support_restarts_the_download(
    site: Site, store: ModelStore
) -> None:
    site.pages["/m.gguf"] = Page(GGUF, ranges=False, cuts=[100_000])
    assert pull(f"{site.url}/m.gguf", store=store).read_bytes() == GGUF


def test_a_pull_with_a_wrong_hash_keeps_nothing(site: Site, store: ModelStore) -> None:
    site.pages["/m.gguf"] = Page(GGUF)
    with pytest.raises(ModelFormatError, match="SHA-256"):
        pull(f"{site.url}/m.gguf", sha256="0" * 64, store=store)
    assert store.models() == {} and parts(store) == []
    path = pull(f"{site.url}/m.gguf", sha256=digest(GGUF), store=store)
    assert path.read_bytes() == GGUF
    with pytest.raises(ConflictError):
        pull(f"{site.url}/m.gguf", sha256="0" * 64, store=store)


def test_a_hash_announced_by_the_server_is_verified(site: Site, store: ModelStore) -> None:
    site.pages["/m.gguf"] = Page(GGUF, headers={"X-Linked-Etag": f'"{digest(OTHER)}"'})
    with pytest.raises(ModelFormatError, match="SHA-256"):
        pull(f"{site.url}/m.gguf", store=store)


def test_a_download_of_unknown_length_needs_a_hash(site: Site, store: ModelStore) -> None:
    site.pages["/m.gguf"] = Page(GGUF, length=False)
    with pytest.raises(ModelError, match="--sha256"):
        pull(f"{site.url}/m.gguf", store=store)
    assert pull(f"{site.url}/m.gguf", sha256=digest(GGUF), store=store).read_bytes() == GGUF


@pytest.mark.parametrize("body", [b"\x80\x04" + b"x" * 100, b"<html>not found</html>", b"GG"])
def test_pulled_content_must_match_its_file_type(
    site: Site, store: ModelStore, body: bytes
) -> None:
    site.pages["/m.gguf"] = Page(body)
    with pytest.raises(ModelFormatError):
        pull(f"{site.url}/m.gguf", store=store)
    assert store.models() == {} and parts(store) == []


@pytest.mark.parametrize("body", [b"PK\x03\x04" + b"x" * 100, b"\xff" * 100, b"\x80\x04\x95" * 9])
def test_shards_must_be_safetensors(
    site: Site, store: ModelStore, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    _repository(site, [])
    site.pages[f"/org/repo/resolve/{COMMIT}/model-2.safetensors"] = Page(body)
    with pytest.raises(ModelFormatError):
        pull("hf:org/repo", store=store)
    assert store.models() == {} and parts(store) == []


@pytest.mark.parametrize("name", ["pytorch_model.bin", "m.pt", "m.ckpt", "m.pkl", "m.npy", "m.zip"])
def test_pickle_file_names_are_refused_without_a_download(
    site: Site, store: ModelStore, name: str
) -> None:
    with pytest.raises(ModelFormatError):
        pull(f"{site.url}/{name}", store=store)
    assert site.requests == []


def test_missing_and_forbidden_files_are_reported_with_advice(
    site: Site, store: ModelStore
) -> None:
    site.pages["/m.gguf"] = Page(status=401)
    with pytest.raises(ModelError, match="HF_TOKEN"):
        pull(f"{site.url}/m.gguf", store=store)
    with pytest.raises(NotFoundError, match="does not exist"):
        pull(f"{site.url}/n.gguf", store=store)


def test_too_little_disk_space_is_noticed_before_writing(
    site: Site, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.pages["/m.gguf"] = Page(GGUF)
    usage = fetch.shutil.disk_usage("/")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ResourceError, match="free"):
        pull(f"{site.url}/m.gguf", store=store)
    assert store.models() == {} and parts(store) == []


def test_a_full_disk_during_a_pull_frees_its_space(
    site: Site, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.pages["/m.gguf"] = Page(GGUF)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch.os, "fsync", full)
    with pytest.raises(ResourceError, match="disk filled up"):
        pull(f"{site.url}/m.gguf", store=store)
    assert store.models() == {} and parts(store) == []


def test_concurrent_pulls_of_one_model_download_once(site: Site, store: ModelStore) -> None:
    site.pages["/m.gguf"] = Page(GGUF)
    with ThreadPoolExecutor(4) as pool:
        pulls = [pool.submit(pull, f"{site.url}/m.gguf", store=store) for _ in range(4)]
    assert {future.result().read_bytes() for future in pulls} == {GGUF}
    assert len(site.requests) == 1


def test_hub_token_is_sent_to_the_hub_and_not_to_redirect_targets(
    site: Site, cdn: Site, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    cdn.pages["/blob"] = Page(GGUF)
    redirect = {"Location": f"{cdn.url}/blob?sig=1", "X-Linked-Etag": f'"{digest(GGUF)}"'}
    site.pages["/org/repo/resolve/v2/sub/M.gguf"] = Page(status=302, headers=redirect)
    assert pull("hf:org/repo@v2/sub/M.gguf", store=store).read_bytes() == GGUF
    assert site.requests[0][1]["authorization"] == "Bearer hf_secret"
    assert "authorization" not in cdn.requests[0][1]


def test_hub_token_is_not_sent_to_plain_urls(
    site: Site, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    site.pages["/m.gguf"] = Page(GGUF)
    pull(f"{site.url}/m.gguf", store=store)
    assert "authorization" not in site.requests[0][1]


def test_redirects_to_other_schemes_are_not_followed(site: Site, store: ModelStore) -> None:
    site.pages["/m.gguf"] = Page(status=302, headers={"Location": "file:///etc/passwd"})
    with pytest.raises(ModelError, match="redirects"):
        pull(f"{site.url}/m.gguf", store=store)


def _repository(site: Site, extra: list[str]) -> dict[str, bytes]:
    # This header length starts with the two bytes of a pickle.
    weights = (0x280).to_bytes(8, "little") + b"{}" + b" " * 0x280
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {
        "config.json": b'{"architectures": []}' + b" " * 40,
        "tokenizer.json": b"{}" + b" " * 40,
        "merges.txt": b"a b\n",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "model-1.safetensors": weights,
        "model-2.safetensors": weights,
    }
    for name, body in files.items():
        site.pages[f"/org/repo/resolve/{COMMIT}/{name}"] = Page(body)
    siblings = [{"rfilename": name} for name in [*files, *extra]]
    listing = json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
    site.pages["/api/models/org/repo/revision/main"] = Page(listing)
    return files


def test_a_repository_pull_fetches_only_the_files_of_a_checkpoint(
    site: Site, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    hostile = ["../../evil.json", "pytorch_model.bin", "modeling.py", "consolidated.safetensors"]
    files = _repository(site, hostile)
    site.pages[f"/org/repo/resolve/{COMMIT}/model-2.safetensors"].cuts = [3] + [0] * 10
    with pytest.raises(ModelError):
        pull("hf:org/repo", store=store)
    assert store.models() == {}
    site.pages[f"/org/repo/resolve/{COMMIT}/model-2.safetensors"].cuts = []
    site.requests[:] = []
    path = pull("hf:org/repo", store=store)
    assert path.is_dir()
    here = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    assert here == {**files, "model.json": here["model.json"]}
    fetched = [request.rsplit("/", 1)[1] for request, _ in site.requests]
    assert "model-1.safetensors" not in fetched, "a finished file was fetched again"


def _ggufs(site: Site, *names: str) -> None:
    listing = {"sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
    site.pages["/api/models/org/repo/revision/main"] = Page(json.dumps(listing).encode())
    for name in names:
        site.pages[f"/org/repo/resolve/{COMMIT}/{name}"] = Page(GGUF + name.encode())


@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ("org/repo", "x-Q4_K_M.gguf"),
        ("org/repo:Q8_0", "x-Q8_0.gguf"),
        ("hf:org/repo:q4_k_s", "x-Q4_K_S.gguf"),
        ("org/repo:IQ2_M", "x-iq2_m-00001-of-00002.gguf"),
    ],
)
def test_a_repository_of_ggufs_gives_the_wanted_quant(
    site: Site, store: ModelStore, monkeypatch: pytest.MonkeyPatch, spec: str, file: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    split = [f"parts/x-iq2_m-0000{part}-of-00002.gguf" for part in (1, 2)]
    _ggufs(site, "x-Q8_0.gguf", "x-Q4_K_S.gguf", "mmproj-Q4_K_M.gguf", "x-Q4_K_M.gguf", *split)
    path = pull(spec, store=store)
    assert path.name == file and path.read_bytes().endswith(file.encode())
    assert len(list(path.parent.glob("*.gguf"))) == (2 if "00001" in file else 1)
    assert resolve_model(spec, store) == path, "it is found again by its address"


def test_a_missing_quant_is_reported_with_the_available_ones(
    site: Site, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    _ggufs(site, "x-Q8_0.gguf")
    with pytest.raises(ModelFormatError, match="Q4_K_M; it has x-Q8_0.gguf"):
        pull("org/repo:Q4_K_M", store=store)


def test_the_saved_hub_login_is_used(
    site: Site, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "token").write_text("hf_saved\n")
    _ggufs(site, "x-Q8_0.gguf")
    pull("org/repo", store=store)
    assert {headers["authorization"] for _, headers in site.requests} == {"Bearer hf_saved"}


def test_a_model_in_the_hugging_face_cache_is_found(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "hub" / "models--org--repo"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    assert needs_pull("org/repo"), "weights are missing"
    (snapshot / "model.safetensors").symlink_to(repository / "gone")
    assert needs_pull("org/repo"), "the link leads nowhere"
    (repository / "gone").write_bytes(b"weights")
    assert resolve_model("org/repo", store) == snapshot and not needs_pull("org/repo")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert needs_pull("org/repo"), "a shard is missing"
    (snapshot / "x-Q8_0.gguf").write_bytes(GGUF)
    assert resolve_model("org/repo:Q8_0", store) == snapshot / "x-Q8_0.gguf"
    assert needs_pull("org/repo:Q4_K_M")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not needs_pull("org/repo:Q4_K_M")


def test_every_part_of_a_split_gguf_is_pulled(site: Site, store: ModelStore) -> None:
    for part in ("1", "2"):
        site.pages[f"/m-0000{part}-of-00002.gguf"] = Page(GGUF)
    path = pull(f"{site.url}/m-00001-of-00002.gguf", store=store)
    assert path.name == "m-00001-of-00002.gguf"
    assert path.with_name("m-00002-of-00002.gguf").read_bytes() == GGUF
    assert list(store.models()) == ["m"]


def test_a_model_name_cannot_be_taken_by_another_source(site: Site, store: ModelStore) -> None:
    site.pages["/a/m.gguf"] = site.pages["/b/m.gguf"] = Page(GGUF)
    pull(f"{site.url}/a/m.gguf", store=store)
    with pytest.raises(ConflictError, match="--name"):
        pull(f"{site.url}/b/m.gguf", store=store)
    assert pull(f"{site.url}/b/m.gguf", name="m-b", store=store).parent.name == "m-b"
    with pytest.raises(ConfigError, match="catalogue"):
        pull(f"{site.url}/b/m.gguf", name=next(iter(CATALOGUE)), store=store)


@pytest.mark.parametrize("name", ["../x", "/etc", "a/b", "a\0b", ".hidden", "UPPER", "x" * 101])
def test_names_that_could_be_paths_are_refused(name: str, site: Site, store: ModelStore) -> None:
    with pytest.raises(ConfigError):
        pull(f"{site.url}/m.gguf", name=name, store=store)
    assert not store.root.exists()


def test_a_catalogue_name_keeps_the_quant_it_was_pulled_in(
    site: Site, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    monkeypatch.setattr(fit, "this_machine", lambda: fit.MachineMemory(10**10, is_gpu=False))
    for quant in ("Q4_K_M", "Q8_0"):
        site.pages[f"/Qwen/Qwen3-4B-GGUF/resolve/main/Qwen3-4B-{quant}.gguf"] = Page(GGUF)
    path = pull("qwen3-4b", quant="q4_k_m", store=store)
    assert path.name == "Qwen3-4B-Q4_K_M.gguf"
    assert pull("qwen3-4b", store=store) == path  # though another quant would be chosen now
    with pytest.raises(ConflictError, match="already here"):
        pull("qwen3-4b", quant="Q8_0", store=store)
    with pytest.raises(ConfigError, match="--quant belongs to"):
        pull(f"{site.url}/m.gguf", quant="Q8_0", store=store)


def test_an_unreachable_hub_is_reported_with_alternatives(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(fetch, "RETRY_SECONDS", 0.0)
    with pytest.raises(ModelError, match="set HF_ENDPOINT to a mirror .* or copy m.gguf here"):
        pull("hf:org/repo/m.gguf", store=store)
