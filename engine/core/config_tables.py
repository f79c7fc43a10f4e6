"""Reads the named tables of the TOML file: `[backends.NAME]` defines a backend, `[models.ID]` a
model id with its backends, `[plugins.NAME]` a plugin, `[presets.ID]` the defaults of a model, and
`[adapters.NAME]` a LoRA adapter.

A backend's table has keys for the router, which are defined here, and options for its kind of
backend. The configuration class of that kind validates the options when the backend is created. A
plugin validates its own options.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from engine.core.config_presets import NO_BOOL, ConfigTable, PresetTable
from engine.core.config_schema import TABLES, NamedTables
from engine.core.errors import ConfigError
from engine.core.suggestions import suggest

if TYPE_CHECKING:
    from engine.core.config_schema import Settings

POLICIES = ("round_robin", "least_loaded", "power_of_two", "prefix", "session")
MAX_REPLICAS = 64

# Names of options that usually hold a secret. They are refused, because a configuration file tends
# to be committed.
_SECRET_KEY = re.compile(
    r"(?i)(.*[_-])?(api[_-]?key|token|secret|password|passwd|authorization|credentials?)"
)
_PUBLIC_KEY = re.compile(r"(?i).*_(file|env|path)")
_URL_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]*@", re.IGNORECASE)


def _use_of_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def refuse_secrets(options: dict[str, Any]) -> dict[str, Any]:
    """Raise `ValueError` if an option seems to hold a secret."""
    for path, value in _leaves(options):
        if isinstance(value, str) and _URL_WITH_PASSWORD.match(value):
            raise ValueError(
                f"{path} has a password in its URL, which a configuration file must"
                " not hold; give the key by a file or an environment variable"
            )
        key = path.rpartition(".")[2]
        if isinstance(value, str) and _SECRET_KEY.fullmatch(key) and not _PUBLIC_KEY.fullmatch(key):
            raise ValueError(
                f"{path} looks like a secret, which a configuration file must not hold; name a"
                " file that holds it (such as api_key_file), or an environment variable"
            )
    return options


def _leaves(options: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{parent}{key}.")
        else:
            yield f"{parent}{key}", value


Weight = Annotated[float, Field(gt=0, le=1000), NO_BOOL]
Tag = Annotated[str, Field(min_length=1, max_length=64)]
ModelId = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]
Options = Annotated[dict[str, Any], AfterValidator(refuse_secrets)]


class BackendTable(ConfigTable):
    """A table `[backends.NAME]`: one engine, or several equal engines (`replicas`)."""

    kind: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Kind of backend, as `--backend` takes it."""
    model: str = Field(default="auto", min_length=1, max_length=4096)
    """Model, as the kind names models: a catalogue name, a file, a folder or an id."""
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS), NO_BOOL] = 1
    """Equal engines to start, named `NAME#1`, `NAME#2` and so on."""
    max_concurrent: Annotated[int, Field(ge=1, le=65536), NO_BOOL] | None = None
    """Max requests at once for each replica; unset, the backend's own limit."""
    tags: tuple[Tag, ...] = ()
    """Words by which models choose backends."""
    weight: Weight = 1.0
    """Share of requests among the backends of a model."""
    options: Options = {}
    """Every other key of the table: a field of the kind's configuration class."""


class BackendUse(ConfigTable):
    """An entry in a model's list of backends."""

    name: str
    """Name of a `[backends.NAME]` table."""
    weight: Weight | None = None
    """Share of the model's requests; unset, the backend's own weight."""


class ShadowTable(ConfigTable):
    """The shadow of a model: a second backend that gets copies of requests. Its answers are
    discarded.
    """

    backend: str
    """Backend that gets copies of requests."""
    share: Annotated[float, Field(gt=0, le=1), NO_BOOL] = 1.0
    """Share of the model's requests that are copied."""


class ModelTable(ConfigTable):
    """A table `[models.ID]`: a model that clients can request."""

    aliases: tuple[ModelId, ...] = ()
    """Other ids of the model."""
    backends: tuple[Annotated[BackendUse, BeforeValidator(_use_of_name)], ...] = ()
    """Backends of the model: names, or `{ name = "...", weight = 2 }`."""
    tags: tuple[Tag, ...] = ()
    """In place of `backends`: every backend that has one of these tags."""
    policy: Literal["round_robin", "least_loaded", "power_of_two", "prefix", "session"] = "prefix"
    """How the router ranks the backends of the model."""
    fallbacks: tuple[str, ...] = ()
    """Models that answer while all backends of this one are down."""
    shadow: ShadowTable | None = None
    """Copies requests to a second backend: `{ backend = "...", share = 0.1 }`."""


class PluginTable(ConfigTable):
    """A table `[plugins.NAME]`: a plugin that processes requests."""

    enabled: bool = True
    """Load the plugin; `false` keeps the table and leaves the plugin out."""
    order: Annotated[int, Field(ge=0, le=1000), NO_BOOL] = 100
    """Position in the chain; a lower order sees a request first."""
    timeout_s: Annotated[float, Field(ge=0.01, le=600), NO_BOOL] = 2.0
    """Max time of one call of a hook."""
    on_failure: Literal["pass", "refuse"] | None = None
    """Whether requests pass without the plugin when it fails; unset, the plugin decides."""
    options: Options = {}
    """Every other key of the table: an option of the plugin."""


class AdapterTable(ConfigTable):
    """A table `[adapters.NAME]`: a LoRA adapter that clients can request as the model NAME."""

    path: str = Field(min_length=1, max_length=4096)
    """PEFT folder or GGUF file; relative to the configuration file."""
    base: str | None = Field(default=None, min_length=1, max_length=256)
    """Id of the base model, if there are several."""


_NAMES = {
    "backends": re.compile(r"[A-Za-z0-9_.-]{1,64}"),
    "models": re.compile(r"[!-~]{1,256}"),
    "plugins": re.compile(r"[A-Za-z0-9_.-]{1,64}"),
    "presets": re.compile(r"[!-~]{1,256}"),
    "adapters": re.compile(r"[!-~]{1,256}"),
}


def read_tables(tables: Mapping[str, Any], where: str) -> NamedTables:
    """Validate the named tables of a configuration file. Raises a `ConfigError` whose message names
    the file (`where`) and the key.
    """
    given = {section: tables.get(section, {}) for section in TABLES}
    for section, named in given.items():
        _check_shape(section, named, where)
    backends = {
        name: _made(BackendTable, f"{where}: backends.{name}", _split_options(BackendTable, table))
        for name, table in given["backends"].items()
    }
    models = {
        name: _made(ModelTable, f"{where}: models.{name}", table)
        for name, table in given["models"].items()
    }
    plugins = {
        name: _made(PluginTable, f"{where}: plugins.{name}", _split_options(PluginTable, table))
        for name, table in given["plugins"].items()
    }
    presets = {
        name: _made(PresetTable, f"{where}: presets.{name}", _with_template(name, table, where))
        for name, table in given["presets"].items()
    }
    adapters = {
        name: _made(AdapterTable, f"{where}: adapters.{name}", _with_path(table, where))
        for name, table in given["adapters"].items()
    }
    # If the file has no `[models]` tables, each backend is a model with the backend's name.
    uses = {name: ModelTable(backends=(BackendUse(name=name),)) for name in backends}
    made = NamedTables(backends, models or uses, plugins, presets, adapters)
    _check_references(made, where)
    return made


def _with_template(name: str, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Copy a preset's table, with the text of its template."""
    template = table.get("template")
    if not isinstance(template, str):
        return dict(table)
    origin = f"{where}: presets.{name}.template"
    return {**table, "template": template_text(template, Path(where).parent, origin)}


def template_text(template: str, folder: Path, origin: str) -> str:
    """The text of a template that is given as such, by the name of a built-in template, or by the
    path of a file, which is relative to `folder`.
    """
    if "{{" in template or "{%" in template:
        return template
    # imported late: few settings name a template
    from engine.core.text.builtin_templates import BUILTIN_TEMPLATES

    if template in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[template]
    path = folder / Path(template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{origin}: {path} can't be read: {reason}; the names of built-in templates are"
            f" {', '.join(BUILTIN_TEMPLATES)}",
            param=origin.rpartition(": ")[2],
        ) from None


def with_preset(settings: "Settings", name: str, given: Mapping[str, Any]) -> "Settings":
    """The settings with these values in the preset of the model that clients call `name`: sampling
    parameters, and a `template`.
    """
    if settings.tables.backends:
        raise ConfigError(
            "flags of sampling are for a server with one model; set them in [presets.ID.parameters]"
        )
    before = settings.tables.presets.get(name, PresetTable())
    parameters = dict(given)
    template = parameters.pop("template", None)
    table = before.model_dump(exclude_none=True)
    if template is not None:
        table["template"] = template_text(template, Path(), "--chat-template")
    table["parameters"] = table.get("parameters", {}) | parameters
    presets = {**settings.tables.presets, name: _made(PresetTable, f"presets.{name}", table)}
    tables = msgspec.structs.replace(settings.tables, presets=presets)
    return settings.model_copy(update={"tables": tables})


def _with_path(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Copy an adapter's table. Its path is relative to the configuration file."""
    path = table.get("path")
    if not isinstance(path, str):
        return dict(table)
    return {**table, "path": str(Path(where).parent / Path(path).expanduser())}


def backends_of(table: ModelTable, tables: NamedTables) -> list[BackendUse]:
    """The backends of a model: those that it lists, or those that have one of its tags."""
    if table.backends:
        return list(table.backends)
    wanted = set(table.tags)
    return [
        BackendUse(name=name) for name, each in tables.backends.items() if wanted & {*each.tags}
    ]


def adapters_of(backend: str, tables: NamedTables) -> dict[str, str]:
    """The paths of the LoRA adapters that a backend needs for its models, by name."""
    uses = {
        model_id: any(use.name == backend for use in backends_of(table, tables))
        for model_id, table in tables.models.items()
    }
    only = next(iter(tables.models), "")
    return {
        name: table.path
        for name, table in tables.adapters.items()
        if uses.get(table.base or only, False)
    }


def _check_shape(section: str, named: Any, where: str) -> None:
    if not isinstance(named, Mapping):
        raise ConfigError(f"{where}: {section} must be tables, written [{section}.NAME]")
    for name, table in named.items():
        if not _NAMES[section].fullmatch(name):
            raise ConfigError(f"{where}: {name[:64]!r} can't be a name in [{section}.NAME]")
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{where}: {section}.{name} must be a table, written [{section}.NAME]"
            )


T = TypeVar("T", bound=ConfigTable)


def _made(kind: type[T], where: str, table: Mapping[str, Any]) -> T:
    known = list(kind.model_fields)
    for field in table:
        if field not in known:
            raise ConfigError(f"{where}: unknown key {field}{suggest(field, known)}", param=field)
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{where}.{_explain(error)}") from None


def _split_options(kind: type[ConfigTable], table: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a table, and move keys that are not fields of `kind` into its `options`."""
    ours = kind.model_fields.keys() - {"options"}
    options = {key: value for key, value in table.items() if key not in ours}
    return {key: value for key, value in table.items() if key in ours} | {"options": options}


def _check_references(tables: NamedTables, where: str) -> None:
    if tables.models and not tables.backends:
        raise ConfigError(f"{where}: there are [models.*] and no [backends.*] to answer for them")
    _check_presets(tables, where)
    _check_adapters(tables, where)
    for model_id, table in tables.models.items():
        _check_model(f"{where}: models.{model_id}", model_id, table, tables)
    _check_names(tables, where)
    used = {use.name for table in tables.models.values() for use in backends_of(table, tables)}
    used |= {table.shadow.backend for table in tables.models.values() if table.shadow is not None}
    for name in tables.backends:
        if name not in used:
            raise ConfigError(
                f"{where}: backends.{name} is used by no model: name it in models.ID.backends",
                param=f"backends.{name}",
            )


def _check_presets(tables: NamedTables, where: str) -> None:
    """With several backends, a preset must be of a model, and cannot choose what is loaded."""
    if not tables.backends:
        return
    for name, table in tables.presets.items():
        if name not in tables.models:
            known = list(tables.models)
            raise ConfigError(f"{where}: presets.{name}: no such model{suggest(name, known)}")
        for field in ("model", "template"):
            if getattr(table, field) is not None:
                raise ConfigError(
                    f"{where}: presets.{name}.{field} is for a server without [backends.*]",
                    param=f"presets.{name}.{field}",
                )


def _check_adapters(tables: NamedTables, where: str) -> None:
    known = list(tables.models)
    for name, table in tables.adapters.items():
        key = f"adapters.{name}"
        if table.base is None and len(known) > 1:
            raise ConfigError(
                f"{where}: {key} needs base, the id of its model: {', '.join(known)}", param=key
            )
        if table.base is not None and tables.backends and table.base not in known:
            raise ConfigError(
                f"{where}: {key}.base: there is no model '{table.base}'"
                f"{suggest(table.base, known)}",
                param=f"{key}.base",
            )


def _check_model(where: str, model_id: str, table: ModelTable, tables: NamedTables) -> None:
    known, ids = list(tables.backends), list(tables.models)
    if bool(table.backends) == bool(table.tags):
        raise ConfigError(f"{where} needs either backends, a list of names, or tags")
    named = [("backends", use.name) for use in table.backends]
    named += [("shadow.backend", table.shadow.backend)] if table.shadow is not None else []
    for field, name in named:
        if name not in known:
            raise ConfigError(
                f"{where}.{field}: there is no backend '{name}'{suggest(name, known)}"
            )
    if not backends_of(table, tables):
        tags = sorted({tag for each in tables.backends.values() for tag in each.tags})
        raise ConfigError(f"{where}.tags: no backend has one of them{suggest(table.tags[0], tags)}")
    names = [use.name for use in table.backends]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}.backends has '{name}' twice; use weight or replicas")
    for name in table.fallbacks:
        if name not in ids or name == model_id:
            others = [each for each in ids if each != model_id] or ["no other model"]
            raise ConfigError(
                f"{where}.fallbacks: there is no other model '{name}'{suggest(name, others)}"
            )


def _check_names(tables: NamedTables, where: str) -> None:
    owners = {model_id: f"models.{model_id}" for model_id in tables.models}
    for model_id, table in tables.models.items():
        for alias in table.aliases:
            if alias in owners:
                raise ConfigError(
                    f"{where}: models.{model_id}.aliases: '{alias}' is a name of {owners[alias]}"
                    " already"
                )
            owners[alias] = f"models.{model_id}"
    for name in tables.adapters:
        if name in owners:
            raise ConfigError(f"{where}: adapters.{name}: {owners[name]} has this name already")


def _explain(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False, include_context=False)
    key = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if first["type"] == "literal_error":
        reason += suggest(str(first["input"]), list(POLICIES)) if "policy" in key else ""
    if first["type"] == "missing":
        reason = "must be given"
    got = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r:.80}"
    return f"{key}: {reason}{got}" + (f" (and {len(others)} more)" if others else "")
