"""Every setting changes what it says: in the resolved settings by each source, and where it is
used, as `rows.py` says. A setting without a row fails here.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import SecretStr

from engine.cli import serve
from engine.cli.serve_options import SERVE_FLAGS
from engine.core.config import ENV_PREFIX, flag_name, load_settings
from engine.core.config_schema import SECRET_KEYS, Settings, setting_flags, setting_keys
from engine.core.errors import ConfigError
from tests.tables.settings.rows import OTHER_FLAGS, ROWS, Row

KEYS = pytest.mark.parametrize("key", ROWS)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def test_every_setting_has_a_row() -> None:
    assert list(ROWS) == setting_keys()
    flags = setting_flags().items()
    others = {name: key for key, flag in flags for name in flag.names.split()[1:]}
    assert others == OTHER_FLAGS


def resolved(settings: Settings, key: str) -> Any:
    section, name = key.split(".")
    value = getattr(getattr(settings, section), name)
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def changed(settings: Settings) -> set[str]:
    """The settings that differ from the defaults. A secret from a file is the same setting."""
    usual = Settings()
    found = {key for key in ROWS if resolved(settings, key) != resolved(usual, key)}
    return found - {key for key in SECRET_KEYS if f"{key}_file" in found}


def toml_of(key: str, value: str) -> str:
    section, name = key.split(".")
    return f"[{'cache.tiers' if section == 'tiers' else section}]\n{name} = {value}\n"


@KEYS
def test_each_source_sets_the_setting_and_no_other(key: str, tmp_path: Path) -> None:
    row, path = ROWS[key], tmp_path / "engine.toml"
    variable = ENV_PREFIX + key.replace(".", "__").upper()
    loaded = [load_settings(environ={variable: row.written})]
    origins = [variable]
    if row.toml:
        path.write_text(toml_of(key, row.toml))
        loaded.append(load_settings(path))
        path.unlink()
        loaded.append(load_settings(overrides={key: row.value}))
        origins += [str(path), flag_name(key)]
    else:
        path.write_text(toml_of(key, f"'{row.value}'"))
        for refused in ((path, {}), (None, {key: row.value})):
            with pytest.raises(ConfigError, match="must not be"):
                load_settings(*refused)
    for each, origin in zip(loaded, origins, strict=True):
        assert resolved(each.settings, key) == row.value
        assert changed(each.settings) == {key}
        assert each.origins[key] == origin


def test_each_spelling_of_a_flag_sets_its_setting_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(serve, "_serve", lambda config, flags, preset: given.append(flags))
    program = typer.Typer()
    program.command()(serve.serve)
    command = typer.main.get_command(program)
    wrong = []
    for key in SERVE_FLAGS:
        for arguments in flags_of(key, ROWS[key]):
            command.main(arguments, standalone_mode=False)
            flags = {name: each for name, each in given.pop().items() if each not in (None, {})}
            settings = load_settings(overrides=flags).settings
            if flags.keys() != {key} or resolved(settings, key) != ROWS[key].value:
                wrong.append((arguments, flags))
    assert not wrong


def flags_of(key: str, row: Row) -> Iterator[list[str]]:
    """The arguments of a command that give the setting its value, by each name of the flag."""
    flag = setting_flags().get(key)
    for name in (flag.names.split() if flag is not None else []) or [flag_name(key)]:
        on, _, off = name.partition("/")
        if not isinstance(row.value, bool):
            yield [on, row.written]
        elif row.value or off:
            yield [on if row.value else off]


@KEYS
async def test_the_setting_changes_what_it_says(key: str, tmp_path: Path) -> None:
    row = ROWS[key]
    without = await seen(row, None)
    assert await seen(row, key) == row.seen
    assert without != row.seen, "the row would notice nothing"


async def seen(row: Row, key: str | None) -> Any:
    values, environ = dict(row.needs), {}
    if key is not None and row.toml:
        values[key] = row.value
    elif key is not None:
        environ[ENV_PREFIX + key.replace(".", "__").upper()] = row.written
    found = row.look(load_settings(overrides=values, environ=environ).settings)
    return await found if inspect.isawaitable(found) else found
