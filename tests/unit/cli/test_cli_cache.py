"""`engine cache`: what it lists, copies, refuses and removes."""

import io
import json
import tarfile

import pytest
from typer.testing import CliRunner

from engine.cli.ops import admin_client
from engine.cli.ops.cache import app
from engine.core.config_schema import Settings
from engine.core.errors import ConfigError
from engine.runtime.tiers.record import identity_of, root_key
from tests.support.toy_engine.tiers import tiered_engine
from tests.unit.runtime.tiers.test_tiers import PROMPT, answer, disk


@pytest.fixture
def config(tmp_path):
    """Settings with a disk tier, in which an engine without keys has stored one prompt."""
    engine, mover = tiered_engine(disk(tmp_path / "kv"))
    answer(engine, "a")
    answer(engine, "b")
    mover.tidy_up()
    mover.tiers[0].tier.close()
    return written(tmp_path, "kv")


def written(folder, name: str):
    (folder / name).mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(f'[cache.tiers]\ndisk_path = "{folder / name}"\n')
    return path


def told(*arguments) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_blocks_are_counted_and_prefixes_listed(config) -> None:
    (row,) = json.loads(told("stat", "--config", config, "--json"))
    assert (row["tier"], row["models"]) == ("disk", 1)
    assert row["kinds"] == {"full": row["blocks"]} and row["blocks"] >= 10 and row["uses"] >= 8
    (prefix,) = json.loads(told("ls", "--config", config, "--json"))
    assert prefix["tokens"] == 2 * row["blocks"] and prefix["uses"] >= 1
    assert "tokens" in told("ls", "--config", config)


def test_exported_blocks_are_imported_and_damaged_ones_are_skipped(config, tmp_path) -> None:
    file, other = tmp_path / "blocks.tar", written(tmp_path, "other")
    told("export", file, "--config", config)
    assert file.stat().st_mode & 0o077 == 0, "it has the tokens of prompts"
    with tarfile.open(file, "a") as archive:
        for name in ("../../evil", "x"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"bad"))
    assert "2 damaged ones left out" in told("import", file, "--config", other)
    engine, _ = tiered_engine(disk(tmp_path / "other"))
    assert answer(engine, "a").num_cached == 16
    assert not (tmp_path.parent / "evil").exists()


def test_missing_files_and_files_that_are_not_archives_are_named(config, tmp_path) -> None:
    junk, missing = tmp_path / "junk", tmp_path / "missing" / "blocks.tar"
    junk.write_bytes(b"junk")
    for command, file in (("import", junk), ("import", missing), ("export", missing)):
        with pytest.raises(ConfigError, match=str(file)):
            told(command, file, "--config", config)


def test_cache_clear_removes_all_blocks(config) -> None:
    assert "blocks removed" in told("clear", "--config", config)
    assert json.loads(told("ls", "--config", config, "--json")) == []


def test_cache_warm_loads_the_most_used_prefixes(config, monkeypatch) -> None:
    sent = []
    # Modules that are imported meanwhile would keep a `call_admin` that is replaced.
    record = lambda *given, **_: sent.append(given) or {}  # noqa: E731
    monkeypatch.setattr(admin_client, "call_with", record)
    told("warm", "--config", config, "--most-used", "3")
    ((url, _, _, path, body),) = sent
    assert url.endswith(f":{Settings().server.port}")
    (prompt,) = body["prompts"]
    assert path == "cache/warm" and prompt["prompt"][: len(PROMPT)] == PROMPT
    assert body["most"] == 3 and prompt["root"] == root_key(identity_of(("toy",)), "").hex()


def test_cache_warm_without_recorded_prefixes_asks_for_a_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match="name a FILE"):
        told("warm", "--config", written(tmp_path, "kv"))


def test_cache_commands_without_tiers_name_the_setting(tmp_path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text("[cache]\n")
    with pytest.raises(ConfigError, match="cache.tiers"):
        told("stat", "--config", path)
