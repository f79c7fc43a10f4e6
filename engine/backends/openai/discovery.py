"""Finds out at start which dialect a server has, which of its models to use, and what this model
supports.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from engine.backends.openai.config import AUTO_MODEL, OpenAIConfig
from engine.backends.openai.dialects import DIALECTS, OPENAI, Dialect
from engine.backends.openai.failures import error_of
from engine.backends.openai.http_client import HttpClient, Response, TransportError
from engine.backends.openai.wire import (
    ModelMeta,
    WireModel,
    decode_embeddings,
    decode_models,
)
from engine.core.errors import ConfigError, ModelError
from engine.core.interfaces.backend import ModelCard

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
RETRY_S = 0.25
# Context length (tokens) if the server does not report it. The server then refuses prompts that are
# too long.
UNKNOWN_CONTEXT = 2**20
_MAX_NAMED_MODELS = 20
# Parameters that can be emulated on any server.
_CAN_EMULATE = frozenset({"n", "top_k"})


@dataclass(frozen=True)
class Facts:
    """What a server reports about a model outside its list of models."""

    max_model_len: int | None = None
    capabilities: tuple[str, ...] | None = None
    emulated: tuple[str, ...] = ()
    template_options: tuple[str, ...] = ()
    num_dimensions: int | None = None


@dataclass(frozen=True)
class DiscoveredServer:
    dialect: Dialect
    card: ModelCard
    vocab_size: int | None  # if the server reports it


class Discovery:
    """Discovery of one server. `prefix` is the base path of the API, such as /v1. `root` is the
    base path of other routes.
    """

    def __init__(self, client: HttpClient, config: OpenAIConfig, prefix: str, root: str) -> None:
        self._client = client
        self._config = config
        self._prefix = prefix
        self._root = root

    async def run(self) -> DiscoveredServer:
        """Find dialect and model. Raises `ConfigError` if the configuration must be changed, and
        `ModelError` if the server does not answer.
        """
        listed = await self._listed()
        dialect = await self._dialect()
        model = self._choose(dialect, listed)
        facts = await self._facts(dialect, model.id)
        extra = frozenset(self._config.lacks)
        dialect = replace(
            dialect,
            lacks=dialect.lacks | (extra - _CAN_EMULATE),
            emulated=dialect.emulated | (extra & _CAN_EMULATE),
        )
        vocab_size = None if model.meta is None else model.meta.n_vocab
        return DiscoveredServer(dialect, self._card(dialect, model, facts), vocab_size)

    async def _listed(self) -> list[WireModel] | None:
        """The models that the server lists. None if it has no route for that."""
        response = await self._answering(f"{self._prefix}/models")
        if response.status in (404, 405, 501):
            return None
        if response.status in (401, 403):
            raise ConfigError(
                "the server refuses the key; name the variable or file that holds a valid one "
                "with api_key_env or api_key_file.",
                param="api_key_env",
            )
        if response.status != 200:
            error = error_of(response.status, response.headers, response.body)
            raise ConfigError(f"the server's list of models can't be had: {error}")
        try:
            return decode_models(response.body).data or []
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ConfigError(
                "what answers there does not list models as OpenAI's API does; is base_url right?",
                param="base_url",
            ) from None

    async def _answering(self, path: str) -> Response:
        """A response to GET `path`. Waits for a server that is still starting."""
        deadline = time.monotonic() + self._config.start_timeout_s
        while True:
            try:
                response = await self._client.request("GET", path, timeout_s=PROBE_TIMEOUT_S)
                if response.status < 500 or response.status == 501:
                    return response
                why = f"it answers with status {response.status}"
            except TransportError as error:
                why = str(error)
            if time.monotonic() + RETRY_S > deadline:
                waited = self._config.start_timeout_s
                raise ModelError(
                    f"the server at base_url gave no answer within {waited:g} s: {why}. Is it "
                    "running, and is the address right?",
                    param="base_url",
                )
            await asyncio.sleep(RETRY_S)

    async def _dialect(self) -> Dialect:
        if self._config.dialect != "auto":
            return DIALECTS[self._config.dialect]
        known = [each for each in DIALECTS.values() if each.signature is not None]
        answers = await asyncio.gather(*(self._recognizes(each) for each in known))
        return next((each for each, is_it in zip(known, answers, strict=True) if is_it), OPENAI)

    async def _recognizes(self, dialect: Dialect) -> bool:
        assert dialect.signature is not None
        path, key = dialect.signature
        return key in await self._object(path)

    async def _object(self, path: str, body: object = None) -> Mapping[str, Any]:
        """The JSON object at `path`, relative to the root; empty if there is none."""
        method = "GET" if body is None else "POST"
        with contextlib.suppress(TransportError, msgspec.DecodeError, UnicodeDecodeError):
            response = await self._client.request(
                method, f"{self._root}{path}", body, timeout_s=PROBE_TIMEOUT_S
            )
            if response.status == 200:
                found = msgspec.json.decode(response.body)
                return found if isinstance(found, dict) else {}
        return {}

    def _choose(self, dialect: Dialect, listed: list[WireModel] | None) -> WireModel:
        wanted = self._config.model_name
        if wanted in ("", AUTO_MODEL):
            if not listed:
                raise ConfigError("the server lists no model; name one.", param="model")
            return listed[0]
        if listed is None:
            log.warning("the server has no list of models; %s is taken on trust", wanted)
            return WireModel(wanted)
        names = (wanted, f"{wanted}:latest") if dialect.name == "ollama" else (wanted,)
        for model in listed:
            if model.id in names:
                return model
        known = ", ".join(each.id for each in listed[:_MAX_NAMED_MODELS]) or "none"
        raise ConfigError(f"the server has no model '{wanted}'; it has: {known}.", param="model")

    async def _facts(self, dialect: Dialect, model: str) -> Facts:
        if dialect.name == "engine":
            return await self._engine_facts(model)
        if dialect.name == "ollama":
            return await self._ollama_facts(dialect, model)
        facts = Facts(capabilities=dialect.capabilities)
        if dialect.name == "llama-server":
            facts = _llama_facts(facts, await self._object("/props"))
        elif dialect.name == "tgi":
            info = await self._object("/info")
            facts = replace(facts, max_model_len=_whole(info.get("max_total_tokens")))
        elif dialect.name == "openai" and "embed" in model:
            facts = replace(facts, capabilities=("embeddings",))
        return await self._with_embeddings(facts, model) if dialect.probes_embeddings else facts

    async def _engine_facts(self, model: str) -> Facts:
        told = await self._object("/v1/capabilities")
        models = [each for each in told.get("models", ()) if each.get("id") == model]
        if not models:
            raise ConfigError("the server does not list its model's capabilities.", param="dialect")
        can: dict[str, str] = models[0].get("capabilities") or {}
        return Facts(
            capabilities=tuple(can),
            emulated=tuple(name for name, how in can.items() if how == "emulated"),
            template_options=tuple(models[0].get("chat_template_kwargs") or ()),
            num_dimensions=_whole(models[0].get("dimensions")),
        )

    async def _ollama_facts(self, dialect: Dialect, model: str) -> Facts:
        told = await self._object("/api/show", {"model": model})
        can = told.get("capabilities") or ()
        if "embedding" in can:
            return Facts(capabilities=("embeddings",))
        added = {"tools": "tools", "thinking": "reasoning", "insert": "suffix"}
        capabilities = dialect.capabilities + tuple(
            ours for its, ours in added.items() if its in can
        )
        options = ("reasoning_effort",) if "thinking" in can else ()
        return Facts(capabilities=capabilities, template_options=options)

    async def _with_embeddings(self, facts: Facts, model: str) -> Facts:
        """Send a test request for embeddings. If it returns a vector, the model is taken as one
        that only embeds: such servers generate no text.
        """
        body = {"model": model, "input": "a", "encoding_format": "float"}
        with contextlib.suppress(TransportError, msgspec.DecodeError, UnicodeDecodeError):
            response = await self._client.request(
                "POST", f"{self._prefix}/embeddings", body, timeout_s=PROBE_TIMEOUT_S
            )
            if response.status == 200:
                vectors = decode_embeddings(response.body).data
                count = len(vectors[0].embedding) if vectors else None
                return replace(facts, capabilities=("embeddings",), num_dimensions=count)
        return facts

    def _card(self, dialect: Dialect, model: WireModel, facts: Facts) -> ModelCard:
        config, meta = self._config, model.meta or ModelMeta()
        context = (
            config.max_model_len
            or model.max_model_len
            or facts.max_model_len
            or model.context_length
            or model.context_window
        )
        capabilities = config.capabilities or facts.capabilities or dialect.capabilities
        _check_names(config, capabilities)
        options = {*facts.template_options, *config.template_options, *dialect.option_fields}
        return ModelCard(
            id=model.id,
            created=model.created or 0,
            owned_by=model.owned_by or dialect.name,
            max_model_len=context or UNKNOWN_CONTEXT,
            backend=dialect.name,
            quantization=model.quantization,
            num_params=meta.n_params,
            size_bytes=meta.size,
            capabilities=capabilities,
            emulated=tuple(sorted({*facts.emulated, *dialect.emulated})),
            lacks=tuple(
                sorted(dialect.lacks | {"return_progress"} | ({"priority"} - dialect.features))
            ),
            template_options=tuple(sorted(options)),
            trained_context=meta.n_ctx_train,
            num_dimensions=facts.num_dimensions,
        )


def _llama_facts(facts: Facts, props: Mapping[str, Any]) -> Facts:
    # Imported late, because few servers need it.
    from engine.core.text.chat_template import template_options

    settings = props.get("default_generation_settings") or {}
    can = props.get("chat_template_caps") or {}
    capabilities = facts.capabilities or ()
    if can.get("supports_tools") is False:  # the server would ignore tools silently
        capabilities = tuple(name for name in capabilities if name != "tools")
    return replace(
        facts,
        capabilities=capabilities,
        max_model_len=_whole(settings.get("n_ctx")),
        template_options=template_options(str(props.get("chat_template") or "")),
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


_CAPABILITIES = (
    *("completions", "chat", "embeddings", "score"),
    *("tools", "json_schema", "reasoning", "suffix"),
)


def _check_names(config: OpenAIConfig, capabilities: tuple[str, ...]) -> None:
    unknown = [name for name in capabilities if name not in _CAPABILITIES]
    if unknown and config.capabilities is not None:
        known = ", ".join(_CAPABILITIES)
        raise ConfigError(
            f"capabilities: '{unknown[0]}' is none; there are {known}.", param="capabilities"
        )


def check_lacks(config: OpenAIConfig, known: tuple[str, ...]) -> None:
    """Raise `ConfigError` if the configured `lacks` has a name that is not in `known`, the names of
    all parameters.
    """
    for name in config.lacks:
        if name not in known:
            raise ConfigError(
                f"lacks: '{name}' is no parameter; there are {', '.join(known)}.", param="lacks"
            )
