"""`engine config show`: lists every setting with its value and the source of that value."""

from typing import TYPE_CHECKING, Any

import typer

from engine.cli.console import ConfigOption, JsonOption, load_cli_settings, output
from engine.cli.help import VerbGroup

if TYPE_CHECKING:
    from engine.core.config import LoadedSettings

HIDDEN = "********"

app = typer.Typer(cls=VerbGroup, add_completion=False, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Show the settings in force and where each comes from."""


@app.command()
def show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting with its value and its origin. Secrets are hidden."""
    rows = setting_rows(load_cli_settings(config))
    if as_json:
        import json

        print(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("setting")
    for column in ("value", "from"):
        table.add_column(column, overflow="fold")
    section = ""
    for key, value, origin in rows:
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            table.add_section()
        changed = "" if origin == "default" else "bold"
        shown = "-" if value is None else value if isinstance(value, str) else _as_toml(value)
        table.add_row(Text(key), Text(shown, style=changed), Text(origin, style=changed))
    output().print(table)


def setting_rows(loaded: "LoadedSettings") -> list[tuple[str, Any, str]]:
    """One row per setting: its name (`section.key`), its JSON value and the origin of the value.
    Secrets are replaced.
    """
    import msgspec

    from engine.core.config_schema import SECRET_KEYS

    sections = loaded.settings.model_dump(mode="json")
    tables = msgspec.structs.asdict(loaded.settings.tables)
    rows: list[tuple[str, Any, str]] = []
    for key, origin in loaded.origins.items():
        section, _, name = key.partition(".")
        if section in tables:
            rows += _table_rows(key, tables[section][name], origin)
            continue
        value = sections[section][name]
        if key in SECRET_KEYS and value is not None:
            value = HIDDEN
        rows.append((key, value, origin))
    return rows


def _table_rows(key: str, table: Any, origin: str) -> list[tuple[str, Any, str]]:
    rows = []
    for field, value in table.model_dump(mode="json").items():
        from_where = origin if field in table.model_fields_set else "default"
        options = value if field == "options" else {field: value}
        rows += [(f"{key}.{name}", each, from_where) for name, each in options.items()]
    return rows


def _as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
