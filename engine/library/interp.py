"""Reads and changes activations from Python, with a model in this process or on a server.

    with llm.trace("The capital of France is") as t:
        middle = t.blocks[5].resid_post.save()
        t.blocks[9].resid_post += vector
    print(middle.value.shape, t.text)

A trace is data: what is inside the `with` block is noted, and the request runs at its end. `Remote`
has the same `trace` for a server of this engine.
"""

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.architectures.sites import EMBED, LAYER_PARTS, NORMALIZED, site_name
from engine.core.errors import EngineError, InvalidRequestError, error_from_code
from engine.core.interp.resolving import resolved
from engine.core.interp.results import InterpResult
from engine.core.interp.spec import parse_interp
from engine.core.interp.vectors import VectorStore
from engine.library.embedded import EmbeddedEngine, Prompt
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams

F32 = NDArray[np.float32]
Positions = str | Sequence[int]
# Runs a prompt with an `interp` object.
Run = Callable[[Prompt, dict[str, Any], SamplingParams], "InterpOutput"]
MAX_BYTES = 2**31
TIMEOUT_S = 600.0
MAX_KEPT = 64  # results of traces that later traces can patch from


class InterpOutput:
    """What a request read, and the text that it generated."""

    def __init__(
        self,
        result_id: str,
        text: str,
        result: InterpResult | None,
        token_text: Callable[[int], str],
        output: RequestOutput | None = None,
    ) -> None:
        self.id = result_id
        self.text = text
        self.token_text = token_text  # of a token of the sequence or of the lens, by its id
        self.output = output  # the whole answer; None if a server made it
        self._result = result
        facts = {} if result is None else result.facts
        self.token_ids: list[int] = facts.get("token_ids", [])
        self.num_prompt: int = facts.get("num_prompt", 0)
        self.lens: list[dict[str, Any]] = [] if result is None else result.lens
        self.attribution: dict[str, Any] | None = facts.get("attribution")

    def value(self, site: str) -> F32:
        """The captured values of a site, (positions, ...)."""
        return self._entry("captures", site)[1]

    def positions(self, site: str) -> list[int]:
        return self._entry("captures", site)[0]

    def attention(self, layer: int) -> F32:
        """(positions, heads, earlier positions)"""
        return self._entry("attention", f"blocks.{layer}.attn.hook_pattern")[1]

    def _entry(self, kind: str, site: str) -> tuple[list[int], F32]:
        result = self._result
        for entry in () if result is None else result.facts.get(kind, ()):
            if entry["site"] == site and result is not None:
                tensor = result.tensors[entry["tensor"]]
                values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
                return entry["positions"], values
        raise InvalidRequestError(f"{site} was not read by this request")

    @property
    def result(self) -> InterpResult:
        assert self._result is not None, "the request read nothing"
        return self._result


class Saved:
    """A value that a trace reads. It has its value when the trace has ended."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.reading: InterpOutput | None = None

    @property
    def value(self) -> F32:
        if self.reading is None:
            raise InvalidRequestError("a saved value is there when its trace has ended")
        return self.reading.value(self.site)


@dataclass(frozen=True, slots=True)
class SiteProxy:
    """A site in a trace. Its methods note what the request shall do there."""

    trace: "Trace"
    name: str

    def save(self, positions: Positions = "all") -> Saved:
        self.trace.note("capture", {"site": self.name, "positions": _places(positions)})
        saved = Saved(self.name)
        self.trace.saved.append(saved)
        return saved

    def add(self, vector: ArrayLike | str, scale: float = 1.0, **where: Any) -> "SiteProxy":
        return self._edit("add", where, vector=_values(vector), scale=scale)

    def set(self, vector: ArrayLike | str, scale: float = 1.0, **where: Any) -> "SiteProxy":
        return self._edit("set", where, vector=_values(vector), scale=scale)

    def scale(self, factor: float, **where: Any) -> "SiteProxy":
        return self._edit("scale", where, scale=factor)

    def project_out(self, vector: ArrayLike | str, **where: Any) -> "SiteProxy":
        return self._edit("project_out", where, vector=_values(vector))

    def ablate(self, **where: Any) -> "SiteProxy":
        return self._edit("ablate", where)

    def patch(self, saved: Saved, source: Positions = "all", **where: Any) -> "SiteProxy":
        """Replace values by those that an earlier trace saved at the positions `source`."""
        if saved.reading is None:
            raise InvalidRequestError("patch takes a value of a trace that has ended")
        origin = {"id": saved.reading.id, "site": saved.site, "positions": _places(source)}
        return self._edit("patch", where, **{"from": origin})

    def __iadd__(self, vector: ArrayLike | str) -> "SiteProxy":
        return self.add(vector)

    def __imul__(self, factor: float) -> "SiteProxy":
        return self.scale(factor)

    def _edit(self, op: str, where: Mapping[str, Any], **fields: Any) -> "SiteProxy":
        placed = dict(where)
        if "positions" in placed:
            placed["positions"] = _places(placed["positions"])
        self.trace.note("edit", {"site": self.name, "op": op} | fields | placed)
        return self


class BlockProxy:
    """A layer in a trace: `resid_post`, `attn_out`, `mlp_pre`, `q`, ... are its sites."""

    _trace: "Trace"
    _layer: int

    def __init__(self, trace: "Trace", layer: int) -> None:
        object.__setattr__(self, "_trace", trace)
        object.__setattr__(self, "_layer", layer)

    def __getattr__(self, part: str) -> SiteProxy:
        if part not in LAYER_PARTS:
            raise AttributeError(f"a block has no {part!r}; it has: {', '.join(LAYER_PARTS)}")
        return SiteProxy(self._trace, site_name(self._layer, part))

    def __setattr__(self, part: str, value: object) -> None:
        if not isinstance(value, SiteProxy):  # what `+=` and `*=` assign is already noted
            self.__getattr__(part).set(value)  # type: ignore[arg-type]


class _Blocks:
    def __init__(self, trace: "Trace") -> None:
        self._trace = trace

    def __getitem__(self, layer: int) -> BlockProxy:
        return BlockProxy(self._trace, layer)


class Trace:
    """A request that is being described. It runs at the end of the `with` block."""

    def __init__(self, run: Run, prompt: Prompt, params: SamplingParams) -> None:
        self._run, self._prompt, self._params = run, prompt, params
        self._spec: dict[str, Any] = {}
        self.saved: list[Saved] = []
        self.blocks = _Blocks(self)
        self.embed = SiteProxy(self, EMBED)
        self.normalized = SiteProxy(self, NORMALIZED)
        self.reading: InterpOutput | None = None

    def note(self, kind: str, entry: dict[str, Any]) -> None:
        self._spec.setdefault(kind, []).append(entry)

    def site(self, name: str) -> SiteProxy:
        return SiteProxy(self, name)

    def lens(self, layers: Sequence[int] | str = "all", top: int = 5, **fields: Any) -> None:
        """The logit lens, or the tuned lens with the name `tuned`."""
        chosen = layers if isinstance(layers, str) else list(layers)
        self._spec["lens"] = {"layers": chosen, "top": top} | fields

    def attention(self, layers: Sequence[int], **fields: Any) -> None:
        self._spec["attention"] = {"layers": list(layers)} | fields

    def attribution(self, **fields: Any) -> None:
        self._spec["attribution"] = fields

    @property
    def text(self) -> str:
        return self.output.text

    @property
    def output(self) -> InterpOutput:
        if self.reading is None:
            raise InvalidRequestError("the output is there when the trace has ended")
        return self.reading

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            return
        self.reading = self._run(self._prompt, self._spec, self._params)
        for saved in self.saved:
            saved.reading = self.reading


class LocalRunner:
    """Runs traces on an engine in this process, and keeps their results for later patches."""

    def __init__(self, engine: EmbeddedEngine, vectors: Path) -> None:
        self._engine = engine
        self._store = VectorStore(vectors)
        self._results: dict[str, InterpResult] = {}

    def run(self, prompt: Prompt, raw: dict[str, Any], params: SamplingParams) -> InterpOutput:
        spec, kept = parse_interp(raw), list[bytes]()
        made = resolved(spec, self._store, self._find, MAX_BYTES)
        if spec.attribution is not None and isinstance(spec.attribution.target, str):
            made = self._with_target(made, spec.attribution.target)
        asked = self._engine.completion(prompt, params)
        context = msgspec.structs.replace(
            asked.request.context, interp=made, on_captured=kept.append
        )
        request = msgspec.structs.replace(asked.request, context=context)
        output = self._engine.call(self._engine.whole(type(asked)(request, asked.prompt, params)))
        reading_id = secrets.token_hex(8)
        result = InterpResult(kept[0]) if kept else None
        if result is not None:
            self._results[reading_id] = result
            while len(self._results) > MAX_KEPT:
                del self._results[next(iter(self._results))]
        return InterpOutput(reading_id, output.outputs[0].text, result, self._token_text, output)

    def _token_text(self, token_id: int) -> str:
        return self._engine.call(self._engine.backend.detokenize((token_id,)))

    def _with_target(self, made: Any, target: str) -> Any:
        backend = self._engine.backend
        ids = self._engine.call(backend.tokenize(target, add_special_tokens=False))
        if len(ids) != 1:
            raise InvalidRequestError(f"attribution: {target!r} is {len(ids)} tokens, not one")
        attribution = msgspec.structs.replace(made.attribution, target=ids[0])
        return msgspec.structs.replace(made, attribution=attribution)

    def _find(self, result_id: str) -> InterpResult:
        if result_id not in self._results:
            raise InvalidRequestError("this LLM has no such result; patch from its own traces")
        return self._results[result_id]


class Remote:
    """A server of this engine: `Remote("http://127.0.0.1:8080").trace(prompt)`."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._url, self._key, self._model = url.rstrip("/").removesuffix("/v1"), api_key, model

    def trace(self, prompt: Prompt, max_tokens: int = 1) -> Trace:
        return Trace(self.run, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))

    def run(self, prompt: Prompt, raw: dict[str, Any], params: SamplingParams) -> InterpOutput:
        body: dict[str, Any] = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "interp": raw | {"store": True},
        }
        if self._model is not None:
            body["model"] = self._model
        made = json.loads(self._send("/v1/completions", json.dumps(body).encode()))
        told = made.get("interp")
        text = made["choices"][0]["text"]
        if told is None:
            return InterpOutput(made["id"], text, None, str)
        names = dict(zip(told["token_ids"], told["tokens"], strict=True))
        result = InterpResult(self._send(f"/v1/interp/results/{told['id']}"))
        return InterpOutput(told["id"], text, result, lambda token: self._name(names, token))

    def _name(self, names: dict[int, str], token_id: int) -> str:
        if token_id not in names:
            asked: dict[str, Any] = {"tokens": [token_id]}
            if self._model is not None:
                asked["model"] = self._model
            told = json.loads(self._send("/detokenize", json.dumps(asked).encode()))
            names[token_id] = told["prompt"]
        return names[token_id]

    def _send(self, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                data: bytes = answer.read()
                return data
        except urllib.error.HTTPError as error:
            raise _told(error) from None


def _told(error: urllib.error.HTTPError) -> EngineError:
    """The error that the server's answer describes."""
    try:
        told = json.loads(error.read())["error"]
        return error_from_code(told["code"] or "", told["message"])
    except (ValueError, KeyError, TypeError):
        return InvalidRequestError(f"the server answered {error.code}")


def _values(vector: ArrayLike | str) -> list[float] | str:
    if isinstance(vector, str):
        return vector
    values: list[float] = np.asarray(vector, np.float32).reshape(-1).tolist()
    return values


def _places(positions: Positions) -> str | list[int]:
    return positions if isinstance(positions, str) else [int(each) for each in positions]
