"""`engine cache`: looks at the tiers of the prefix cache, and fills, copies or clears them.

The commands work on the folder and the Redis that the settings name, even while a server runs.
"""

import json
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.console import ConfigOption, JsonOption, load_cli_settings, output
from engine.cli.help import VerbGroup
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.runtime.tiers.listing import ListedTier, Prefix

MIB = 2**20
MAX_PREFIXES, MAX_TOKENS = 1000, 500_000  # that are sent to a server at once

app = typer.Typer(cls=VerbGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True)

TierOption = Annotated[str | None, typer.Option("--tier", help="Only this tier: disk or redis.")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A tar file.")]


@app.callback()
def _group() -> None:
    """Look at the tiers of the prefix cache, and fill, copy or clear them."""


@app.command()
def stat(config: ConfigOption = None, tier: TierOption = None, as_json: JsonOption = False) -> None:
    """Tell how many blocks each tier has, of which kinds, and of how many models."""
    from engine.runtime.tiers.listing import headers

    rows: list[dict[str, Any]] = []
    for each in _tiers(config, tier):
        kinds: dict[str, int] = {}
        size, models = 0, set[bytes]()
        for _, header in headers(each):
            kinds[header.kind] = kinds.get(header.kind, 0) + 1
            size += header.header_bytes + header.num_bytes
            models.add(header.identity)
        uses = sum(each.uses().values())
        row = {"tier": each.name, "blocks": sum(kinds.values()), "mib": round(size / MIB, 1)}
        rows.append({**row, "kinds": kinds, "models": len(models), "uses": uses})
    _show(rows, as_json)


@app.command("list")
def list_prefixes(
    config: ConfigOption = None,
    tier: TierOption = None,
    limit: Annotated[int, typer.Option("-n", help="Max prefixes to list.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the longest prefixes in each tier, most used first. Their texts are not shown."""
    rows = [
        {
            "tier": each.name,
            "prefix": prefix.key.hex()[:12],
            "model": prefix.identity.hex()[:8],
            "tokens": len(prefix.token_ids),
            "mib": round(prefix.num_bytes / MIB, 1),
            "uses": prefix.num_uses,
        }
        for each in _tiers(config, tier)
        for prefix in _prefixes(each)[:limit]
    ]
    _show(rows, as_json)


@app.command()
def clear(config: ConfigOption = None, tier: TierOption = None) -> None:
    """Remove every block. Prefixes in the KV pool of a running server stay."""
    for each in _tiers(config, tier):
        print(f"{each.name}: {each.clear():,} blocks removed")


@app.command()
def export(file: FileArgument, config: ConfigOption = None, tier: TierOption = None) -> None:
    """Write all blocks of a tier to a tar file. Default: the disk tier if there is one."""
    from engine.runtime.tiers.listing import export as write

    source = _tiers(config, tier)[0]
    with _naming(file):
        count = write(source, file.expanduser())
    print(f"{count:,} blocks of {source.name} written to {file}")


@app.command("import")
def import_file(file: FileArgument, config: ConfigOption = None, tier: TierOption = None) -> None:
    """Store the blocks of a tar file in a tier. Default: the disk tier if there is one.

    Damaged blocks are left out.
    """
    from engine.runtime.tiers.listing import import_records

    target = _tiers(config, tier)[0]
    with _naming(file):
        stored, bad = import_records(target, file.expanduser())
    print(f"{stored:,} blocks stored in {target.name}, {bad:,} damaged ones left out")


@app.command()
def warm(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Prompts, one on each line.")
    ] = None,
    most_used: Annotated[
        int, typer.Option(min=1, max=1000, help="Without FILE: how many prefixes to load.")
    ] = 10,
    model: Annotated[str | None, typer.Option(help="Default: the server's first model.")] = None,
    config: ConfigOption = None,
    url: Annotated[str, typer.Option(help="The running server.")] = "http://127.0.0.1:8080",
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the administrator's key.")
    ] = None,
) -> None:
    """Load prefixes into the KV pool of a running server.

    With FILE, the server prefills its prompts. Without FILE, the server loads the most used
    prefixes of the tiers that belong to its model and to the tenants that it knows.
    """
    from engine.cli.ops.admin import read_prompt_lines
    from engine.cli.ops.admin_client import call_admin

    body: dict[str, Any] = {"prompts": read_prompt_lines(file)} if file else {"most": most_used}
    if file is None:
        body["prompts"] = _most_used(config)
    if not body["prompts"]:
        raise ConfigError("the tiers have no prefixes yet; name a FILE with prompts")
    body |= {} if model is None else {"model": model}
    found = call_admin(url, admin_key_file, "POST", "cache/warm", body)
    print(json.dumps(found))
    if found.get("skipped"):
        count = found["skipped"]
        print(f"{count} prefixes belong to another model or an unknown tenant.", file=sys.stderr)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn a failure to read or write `file` into an error that names it."""
    try:
        yield
    except (OSError, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or f"it is no tar file ({error})"
        raise ConfigError(f"{file}: {reason}") from None


def _most_used(config: Path | None) -> list[Any]:
    """The most used prefixes of all models and tenants. The server knows which are its own."""
    found = [prefix for each in _tiers(config, None) for prefix in _prefixes(each)]
    found.sort(key=lambda each: -each.num_uses)
    prompts: list[Any] = []
    num_tokens = 0
    for each in found[:MAX_PREFIXES]:
        num_tokens += len(each.token_ids)
        if prompts and num_tokens > MAX_TOKENS:
            break
        # One token more than the blocks have, because a prompt's last token is always computed.
        tokens = [*each.token_ids, each.token_ids[-1]]
        prompts.append({"prompt": tokens, "root": each.parent.hex()})
    return prompts


def _prefixes(tier: "ListedTier") -> "list[Prefix]":
    from engine.runtime.tiers.listing import prefixes

    return prefixes(tier)


def _tiers(config: Path | None, name: str | None) -> "list[ListedTier]":
    """The tiers on disk and in Redis that the settings name."""
    from engine.backends.custom.engine_settings import tier_options
    from engine.runtime.tiers.disk import DiskTier
    from engine.runtime.tiers.redis_tier import RedisTier
    from engine.worker.tiers import open_tiers

    if name not in (None, "disk", "redis"):
        raise ConfigError(f"--tier is disk or redis, not {name}")
    options = tier_options(load_cli_settings(config).settings.tiers)
    opened = [] if options is None else open_tiers(options)
    found = [each for each in opened if isinstance(each, DiskTier | RedisTier)]
    found = [each for each in found if name in (None, each.name)]
    if not found:
        wanted = name or "disk or redis"
        raise ConfigError(f"the settings name no {wanted} tier; see [cache.tiers] in docs/cache.md")
    return list(found)


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    from rich.table import Table

    table = Table(*(rows[0] if rows else ("no prefixes",)), box=None)
    for row in rows:
        kinds = row.get("kinds")
        if kinds is not None:
            row["kinds"] = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        table.add_row(*(str(value) for value in row.values()))
    output().print(table)
