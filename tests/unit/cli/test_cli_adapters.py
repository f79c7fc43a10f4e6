"""`engine adapters ls|add|rm|merge`, as a user types them."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from engine.adapters.reading import open_adapter, read_adapter
from engine.cli.commands import app
from engine.cli.serve import parse_adapters
from engine.conversion.lora_export import export_gguf
from engine.core.errors import NotFoundError
from engine.core.store import adapter_store
from engine.core.store.checkpoint_files import PEFT_FILES
from engine.weights.model import open_model
from tests.support.files.gguf_files import gguf_layout, random_weights, tiny_config, write_gguf
from tests.support.files.lora_files import peft_folder
from tests.support.servers.model_site import COMMIT, Page, Site, serve_site

SHAPES = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.mlp.up_proj": (96, 64)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("base") / "tiny.gguf", tiny_config("llama")
    write_gguf(path, config, gguf_layout(config, random_weights(config)))
    return path


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "data_directory", lambda: tmp_path / "store")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made, server = serve_site()
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    yield made
    server.shutdown()
    server.server_close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["adapters", *arguments])


def listed() -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(run("ls", "--json").stdout)
    return found


def test_an_adapter_is_added_listed_merged_and_removed(base: Path, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "a", SHAPES, rank=3)
    added = run("add", "tuned", str(folder), "--base", str(base))
    assert added.exit_code == 0, added.output
    assert [(each["name"], each["base"]) for each in listed()] == [("tuned", base.stem)]
    assert "tuned" in run("ls").stdout
    again = run("add", "tuned", str(folder), "--base", str(base))
    assert again.exit_code != 0 and "remove it first" in again.output
    target = tmp_path / "merged.gguf"
    merged = run("merge", "tuned", str(target), "--base", str(base), "--type", "F32")
    assert merged.exit_code == 0, merged.output
    check_merged(base, folder, target)
    exported = run("export", "tuned", str(tmp_path / "tuned.gguf"), "--base", str(base))
    assert exported.exit_code == 0, exported.output
    check_exported(base, folder, tmp_path / "tuned.gguf")
    again = run("export", "tuned", str(tmp_path / "tuned.gguf"), "--base", str(base))
    assert again.exit_code != 0 and "is there already" in again.output
    assert run("export", "tuned", str(tmp_path / "copy"), "--base", str(base)).exit_code == 0
    check_exported(base, folder, tmp_path / "copy")
    needs = run("merge", str(folder), str(tmp_path / "other"))
    assert needs.exit_code != 0 and "--base" in needs.output
    absent = run("merge", "absent", str(tmp_path / "other"))
    assert absent.exit_code != 0 and "is called 'absent'" in absent.output
    assert run("rm", "tuned").exit_code == 0 and listed() == []
    assert run("rm", "tuned").exit_code != 0


def check_exported(base: Path, folder: Path, exported: Path) -> None:
    """The reader of GGUF adapters is compared with llama.cpp elsewhere."""
    with closing(open_model(base)) as model:
        found, wanted = (open_adapter(each, model.config).pairs for each in (exported, folder))
    assert found.keys() == wanted.keys()
    for name, pair in wanted.items():
        np.testing.assert_allclose(found[name].b @ found[name].a, pair.b @ pair.a, atol=1e-6)


def test_lora_ranks_are_kept_for_matrices_that_gguf_fuses(tmp_path: Path) -> None:
    config = tiny_config("phi3")
    base = tmp_path / "fused.gguf"
    write_gguf(base, config, gguf_layout(config, random_weights(config)))
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = {"model.layers.0.self_attn.qkv_proj": (rows, config.hidden_size)}
    folder = peft_folder(tmp_path / "a", shapes, rank=3)
    export_gguf(folder, base, tmp_path / "a.gguf")
    check_exported(base, folder, tmp_path / "a.gguf")
    (pair,) = read_adapter(tmp_path / "a.gguf").pairs
    assert (pair.name, len(pair.a)) == ("blk.0.attn_qkv.weight", 3)


def check_merged(base: Path, folder: Path, target: Path) -> None:
    before, after = open_model(base), open_model(target)
    pairs = open_adapter(folder, before.config).pairs
    for name, weight in before.weights.items():
        expected = weight.numpy()
        if name in pairs:
            expected = expected + pairs[name].b @ pairs[name].a
        np.testing.assert_allclose(after.weights[name].numpy(), expected, atol=1e-6)
    before.close()
    after.close()


def test_an_invalid_adapter_is_not_added(base: Path, tmp_path: Path) -> None:
    wrong = peft_folder(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (64, 40)})
    for path, says in (
        (str(wrong), "another base model"),
        (str(tmp_path / "none"), "there is no adapter"),
    ):
        refused = run("add", "tuned", path, "--base", str(base))
        assert refused.exit_code != 0 and says in refused.output.replace("\n", " ")
    assert listed() == []


def offer(site: Site, repository: str, folder: Path, names: tuple[str, ...] = PEFT_FILES) -> None:
    """Put these files of an adapter on the hub, beside some others."""
    siblings = [{"rfilename": name} for name in (*names, "README.md", "optimizer.pt")]
    listing = json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
    site.pages[f"/api/models/{repository}/revision/main"] = Page(listing)
    for name in names:
        page = Page((folder / name).read_bytes())
        site.pages[f"/{repository}/resolve/{COMMIT}/{name}"] = page


def test_adapters_are_pulled_from_the_hub(base: Path, site: Site, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "a", SHAPES)
    offer(site, "org/lora", folder)
    added = run("add", "tuned", "hf:org/lora", "--base", str(base))
    assert added.exit_code == 0, added.output
    kept = Path(listed()[0]["path"])
    assert sorted(each.name for each in kept.iterdir()) == ["adapter.json", *PEFT_FILES]
    assert (kept / PEFT_FILES[1]).read_bytes() == (folder / PEFT_FILES[1]).read_bytes()
    offer(site, "org/other", folder, ())
    none = run("add", "other", "hf:org/other", "--base", str(base))
    assert none.exit_code != 0 and "is no adapter" in none.output.replace("\n", " ")


def test_adapters_of_a_served_config_are_pulled_once(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = peft_folder(tmp_path / "a", SHAPES)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    offer(site, "org/lora", folder)
    offer(site, "org/other", tmp_path, ("b.gguf",))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE"):
        parse_adapters(["tuned=hf:org/lora"])
    monkeypatch.delenv("HF_HUB_OFFLINE")
    given = ["tuned=hf:org/lora", "hf:org/other", f"own={folder}"]
    found = parse_adapters(given)
    assert found is not None and list(found) == ["tuned", "other", "own"]
    assert found["own"] == str(folder) and Path(found["other"]).name == "b.gguf"
    for name in PEFT_FILES:
        assert (Path(found["tuned"]) / name).read_bytes() == (folder / name).read_bytes()
    site.pages.clear()
    assert parse_adapters(given) == found
