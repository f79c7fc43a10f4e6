"""Generates docs/reference: every setting, metric and error, as the code defines them. Also writes
the tables of other servers' parameters into docs/compatibility.md.

    engine dev reference_pages            # write the pages
    engine dev reference_pages --check    # exit status 1 if a page is stale

A setting's description is the string below its field (`core/config_schema.py`,
`core/config_tables.py`); a metric's description is its help text.
"""

import argparse
import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from engine.cli.serve import serve
from engine.core.config import CONFIG_VARIABLE, flag_name, variable_names
from engine.core.config_presets import ParametersTable, PresetTable
from engine.core.config_schema import SECRET_KEYS, SECTIONS, Settings
from engine.core.config_tables import BackendTable, ModelTable, PluginTable, ShadowTable
from engine.core.errors import EngineError
from engine.core.interfaces.stats import TierStats
from engine.core.observability.metrics import Metrics, TierCollector
from engine.plugins.metrics import PluginMetrics
from engine.routing.metrics import PrefillCollector, RouterMetrics, ShadowMetrics
from engine.servers.capabilities import TRANSLATING, verdict_in
from engine.servers.fine_tuning.progress import JobMetrics
from engine.servers.schema.dialects.parameters import DIALECTS, PARAMETERS, Parameter

FOLDER = Path(__file__).parents[2] / "docs"
_BOUNDS = (
    (("minimum", "maximum"), "{} to {}"),
    (("exclusiveMinimum", "maximum"), "above {}, at most {}"),
    (("minLength", "maxLength"), "{} to {} characters"),
    (("maxLength",), "at most {} characters"),
    (("pattern",), "matches `{}`"),
)
# Modules with the errors that clients see.
_ERRORS = ("engine.core.errors", "engine.servers.http.errors")
_KINDS = {"boolean": "true, false", "array": "list", "object": "table"}
_NOTICE = "<!-- Written by `engine dev reference_pages` from the code; do not edit it here. -->"


# docs/compatibility.md is written by hand, except for the part between these marks.
_BEGIN = "<!-- Tables, written by `engine dev reference_pages`; do not edit them here. -->"
_END = "<!-- End of the tables. -->"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only tell whether a page is stale")
    check = parser.parse_args(arguments).check
    stale = [name for name, page in pages().items() if _read(FOLDER / name) != page]
    if check and stale:
        print(f"stale: {', '.join(stale)}; run `engine dev reference_pages`", file=sys.stderr)
        raise SystemExit(1)
    for name in stale:
        (FOLDER / name).write_text(pages()[name], encoding="utf-8")
        print(FOLDER / name)


def pages() -> dict[str, str]:
    """The text of each page, by its path below docs."""
    return {
        "reference/settings.md": settings_page(),
        "reference/metrics.md": metrics_page(),
        "reference/errors.md": errors_page(),
        "compatibility.md": compatibility_page(_read(FOLDER / "compatibility.md") or ""),
    }


def compatibility_page(text: str) -> str:
    """The page `text` with the current tables between its two marks."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    lines = [_BEGIN, ""]
    for dialect, shown in DIALECTS.items():
        lines += [
            f"### {shown}",
            "",
            *_table("parameter", "chats", "completions", "`/generate`", "what happens"),
        ]
        rows: dict[tuple[str, ...], list[str]] = {}
        for word in sorted(PARAMETERS.values(), key=lambda each: each.name):
            if dialect in word.dialects:
                rows.setdefault(_verdicts(word), []).append(f"`{word.name}`")
        lines += [_row(", ".join(names), *cells) for cells, names in rows.items()]
        lines.append("")
    return before + "\n".join([*lines, _END]) + after


def _verdicts(word: Parameter) -> tuple[str, ...]:
    """The verdict of each endpoint, and what else a reader should know."""
    verdicts = tuple(verdict_in(word, kind) for kind in TRANSLATING.values())
    told = {
        "acts": word.note,
        "translated": "; ".join(each for each in (f"becomes `{word.target}`", word.note) if each),
        "warned": f"the warning: {word.warning}",
        "refused": f"instead: {word.instead}",
    }
    if not word.target:
        told["translated"] = word.note
    return *verdicts, next(text for verdict, text in told.items() if verdict in verdicts)


def settings_page() -> str:
    lines = [
        *("# Settings", "", _NOTICE, ""),
        "Values come from defaults, then `engine.toml`, then environment variables, then flags of"
        " `engine serve`; later ones win.",
        f"`--config` or `{CONFIG_VARIABLE}` names another file. `engine config show` prints the"
        " values in force and where each is from.",
        "Sizes in `_mb` are MiB, times in `_s` are seconds.",
    ]
    flags = _serve_flags()
    variables: dict[str, list[str]] = {}
    for variable, key in variable_names().items():
        variables.setdefault(key, []).append(f"`{variable}`")
    for section in SECTIONS:
        model = type(getattr(Settings(), section))
        title = "cache.tiers" if section == "tiers" else section
        lines += ["", f"## `[{title}]`", ""]
        lines += _table("key", "environment variable", "flag", "default", "bounds", "what it does")
        for name, default, bounds, sentence in _fields(model):
            key = f"{section}.{name}"
            flag = flag_name(key)
            in_file = f"`{name}`" if key not in SECRET_KEYS else f"`{name}` (not in the file)"
            shown = f"`{flag}`" if flag in flags else ""
            lines.append(_row(in_file, ", ".join(variables[key]), shown, default, bounds, sentence))
    for title, model in (
        ("[backends.NAME]", BackendTable),
        ("[models.ID]", ModelTable),
        ("[models.ID.shadow]", ShadowTable),
        ("[plugins.NAME]", PluginTable),
        ("[presets.ID]", PresetTable),
        ("[presets.ID.parameters]", ParametersTable),
    ):
        lines += ["", f"## `{title}`", ""]
        lines += _table("key", "default", "bounds", "what it does")
        lines += [_row(f"`{name}`", *rest) for name, *rest in _fields(model)]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    lines = [
        *("# Errors", "", _NOTICE, ""),
        "Each error that a client or user sees is of one of these classes. `error.type` and"
        " `error.code` are in the answer. Some errors have a more exact code, such as"
        " `model_not_found`.",
        "Where a retry may help, the header `x-should-retry` is not `false`, and `Retry-After` says"
        " when, if the server knows it.",
        "The body has the form of the API: OpenAI's, Anthropic's, Ollama's or llama.cpp's.",
        "",
        *_table("category", "status", "type", "code", "retry", "when"),
    ]
    kinds = [each for each in _kinds_of(EngineError) if each.__module__ in _ERRORS]
    for kind in sorted(kinds, key=lambda each: (each.status, each.code)):
        first = " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
        status, retry = str(kind.status), "yes" if kind.retryable else "no"
        cells = (kind.category, status, f"`{kind.type}`", f"`{kind.code}`", retry)
        lines.append(_row(*cells, first))
    lines += ["", "Any other error is a bug: 500, `internal_error`, without details."]
    return "\n".join(lines) + "\n"


def _kinds_of(kind: type[EngineError]) -> Iterator[type[EngineError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds_of(each)


def metrics_page() -> str:
    registry = Metrics("MODEL").registry
    RouterMetrics(registry).watch(())
    ShadowMetrics(registry)
    registry.register(PrefillCollector(lambda: ()))
    PluginMetrics(registry)
    JobMetrics(registry)
    TierCollector(registry).update((TierStats(name="disk"),))
    lines = [
        *("# Metrics", "", _NOTICE, ""),
        "`GET /metrics` serves these in Prometheus' text format. `vllm:*` are the names that"
        " dashboards for vLLM query.",
        "`engine_backend_*` exist with a router, `engine_shadow_*` with shadow traffic,"
        " `engine_plugin_*` with plugins, `engine_cache_tier_*` with cache tiers,"
        " `engine_finetuning_*` with fine-tuning jobs, `engine_prefill_node_*` if nodes may join."
        " A histogram has the series `_bucket`, `_sum` and `_count`.",
        "",
        *_table("metric", "type", "labels", "what it counts"),
    ]
    for name, kind, labels, sentence in sorted(_metrics(registry)):
        shown = ", ".join(f"`{label}`" for label in labels)
        lines.append(_row(f"`{name}`", kind, shown, f"{sentence}."))
    return "\n".join(lines) + "\n"


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Yields the name, default, bounds and description of every setting."""
    sentences = _sentences(model)
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        yield name, _default(field.default), _bounds(schema["properties"][name]), sentences[name]


def _sentences(model: type[BaseModel]) -> dict[str, str]:
    """The description of each setting, by field name. It is the string below the field in the
    source of the class or of a base class.
    """
    found: dict[str, str] = {}
    for kind in model.mro()[: model.mro().index(BaseModel)]:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant)
                found[field.target.id] = inspect.cleandoc(str(text.value.value))
    missing = model.model_fields.keys() - found.keys()
    if missing:
        raise ValueError(f"{model.__name__}: no sentence below {', '.join(sorted(missing))}")
    return found


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, SecretStr):
        return ""
    if isinstance(value, float) and value.is_integer():
        return f"`{int(value)}`"
    return f"`{json.dumps(value)}`"


def _bounds(schema: dict[str, Any]) -> str:
    """The bounds of a JSON schema, in words."""
    if "anyOf" in schema:
        schema = next(each for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    texts: list[str] = []
    used: set[str] = set()
    for keys, text in _BOUNDS:
        if schema.keys() >= set(keys) and not used & set(keys):
            texts.append(text.format(*(_number(schema[key]) for key in keys)))
            used |= set(keys)
    if texts:
        return ", ".join(texts)
    return "path" if schema.get("format") == "path" else _KINDS.get(schema.get("type", ""), "")


def _number(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _serve_flags() -> set[str]:
    """Every option and argument of `engine serve`."""
    app = typer.Typer()
    app.command()(serve)
    parameters = typer.main.get_command(app).params
    return {name for each in parameters for name in (*each.opts, each.metavar or "")}


def _metrics(registry: CollectorRegistry) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Exposed name, type, label names and help text of every metric."""
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            # Before the first sample, the label names are only in private fields: in the
            # collector's for a labelled metric, in the family's for a custom collector.
            labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
            suffix = "_total" if family.type == "counter" else ""
            yield family.name + suffix, family.type, tuple(labels), family.documentation


def _table(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


if __name__ == "__main__":
    main()
