"""The LoRA adapters that a backend serves. A request for an adapter's name is answered by the base
model with this adapter.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from engine.adapters import VALIDATOR
from engine.core.errors import EngineError, InvalidRequestError, ModelError, NotFoundError
from engine.core.interfaces.backend import ModelCard
from engine.core.interfaces.request import AdapterFacts, AdapterRef, ControlReply
from engine.core.sandbox.checkpoint_validation import validate
from engine.core.store.adapter_store import (
    NAME,
    check_is_adapter,
    kept_adapters,
    real_path,
    tenant_of,
)

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0


class ServedAdapter(msgspec.Struct, frozen=True):
    """An adapter that is served under a name. `created` is a Unix time."""

    ref: AdapterRef
    rank: int
    num_bytes: int
    created: int
    tenant: str | None  # who may use it; None: everyone


class AdapterLoader(Protocol):
    """The part of `EngineLink` that loads adapters."""

    async def load_adapter(self, path: str, timeout_s: float) -> ControlReply: ...


class ServedAdapters:
    """The adapters of one backend, by name. `link` leads to the engine that computes them."""

    def __init__(self, link: AdapterLoader) -> None:
        self._link = link
        self.served: dict[str, ServedAdapter] = {}

    @property
    def paths(self) -> dict[str, str]:
        """The path of each adapter, by name."""
        return {name: each.ref.path for name, each in self.served.items()}

    async def add(
        self, name: str, path: str, own: str, base: str | None = None, *, replaces: bool = False
    ) -> None:
        """Load the adapter at `path`, and serve it as `name` from now on. `own` is the name of the
        model that this backend serves, `base` that of the model for which the adapter is meant.
        Raises `EngineError` if the adapter is invalid, does not fit the model, or if the name is
        taken. With `replaces`, an adapter of this name is replaced.
        """
        if not NAME.fullmatch(name):
            raise InvalidRequestError("lora_name must be 1 to 256 visible ASCII characters.")
        if base not in (None, own):
            raise NotFoundError(f"There is no model '{base}' here.", param="base_model_name")
        if name == own or (name in self.served and not replaces):
            raise InvalidRequestError(
                f"The lora adapter '{name}' has already been loaded.", param="lora_name"
            )
        full = real_path(path)
        check_is_adapter(full)
        try:
            await asyncio.to_thread(validate, full, VALIDATOR)
        except ModelError as error:  # what is wrong is the request, not the model that is served
            raise InvalidRequestError(error.message, param="lora_path") from error
        reply = await self._link.load_adapter(str(full), LOAD_TIMEOUT_S)
        if not reply.ok:
            raise InvalidRequestError(reply.message, param="lora_path")
        facts = msgspec.json.decode(reply.message, type=AdapterFacts)
        ref = AdapterRef(facts.key, str(full), facts.changes_head)
        tenant = await asyncio.to_thread(tenant_of, full)
        created = int(time.time())
        self.served[name] = ServedAdapter(ref, facts.rank, facts.num_bytes, created, tenant)

    async def start(self, paths: Mapping[str, str], own: str) -> None:
        """Serve the adapters at `paths`, and those of the store. An adapter of the store that can't
        be loaded is left out.
        """
        await asyncio.gather(*(self.add(name, path, own) for name, path in paths.items()))
        kept = {name: str(path) for name, path in kept_adapters(own).items() if name not in paths}
        adding = (self.add(name, path, own) for name, path in kept.items())
        results = await asyncio.gather(*adding, return_exceptions=True)
        for name, result in zip(kept, results, strict=True):
            if isinstance(result, EngineError):
                log.warning("the adapter %s is not served: %s", name, result.message)
            elif isinstance(result, BaseException):
                raise result

    def remove(self, name: str) -> None:
        """Serve the adapter no longer. Requests that have begun are finished."""
        if self.served.pop(name, None) is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")

    def cards(self, base: ModelCard) -> list[ModelCard]:
        return [
            base.of_adapter(name, each.created, each.tenant) for name, each in self.served.items()
        ]
