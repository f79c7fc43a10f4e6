"""`engine plugins list`: shows which plugins are installed, and which of them the configuration
uses.
"""

from typing import Any

import typer

from engine.cli.console import ConfigOption, JsonOption, load_cli_settings, output
from engine.cli.help import VerbGroup

app = typer.Typer(cls=VerbGroup, add_completion=False, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Show the plugins that are installed and in use."""


@app.command(name="list")
def list_plugins(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List every installed plugin and its configuration."""
    rows = plugin_rows(load_cli_settings(config).settings.tables.plugins)
    if as_json:
        import json

        print(json.dumps(rows))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("plugin", "version", "used", "order", "on failure", "what it is")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    output().print(table)


def plugin_rows(tables: Any) -> list[dict[str, Any]]:
    """One row per plugin. Plugins in use come first, in the order in which they process a
    request.
    """
    from engine.core.errors import ConfigError
    from engine.core.registry.plugin_registry import plugin_names
    from engine.plugins.build import make_plugin

    def place(name: str) -> tuple[bool, int, str]:
        table = tables.get(name)
        return (table is None or not table.enabled, table.order if table else 0, name)

    rows = []
    for name in sorted({*plugin_names(), *tables}, key=place):
        table = tables.get(name)
        row: dict[str, Any] = {"name": name, "version": "", "used": "no", "order": ""}
        if table is not None:
            row |= {"used": "yes" if table.enabled else "disabled", "order": table.order}
        try:
            plugin = make_plugin(name)
        except ConfigError as error:
            rows.append(row | {"on_failure": "", "about": f"can't be used: {error}"})
            continue
        on_failure = (table and table.on_failure) or plugin.on_failure
        about = (type(plugin).__doc__ or "").strip().split("\n")[0]
        rows.append(row | {"version": plugin.version, "on_failure": on_failure, "about": about})
    return rows
