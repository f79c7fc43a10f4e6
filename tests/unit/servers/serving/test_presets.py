"""`[presets.ID]`: defaults of a model in the configuration file, in the server and the library."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.backends.custom.engine_settings import preset_of
from engine.core.config import load_settings
from engine.core.config_presets import ParametersTable
from engine.core.config_tables import with_preset
from engine.core.errors import ConfigError
from engine.core.observability.metrics import Metrics
from engine.core.text.builtin_templates import BUILTIN_TEMPLATES
from engine.library import embedded
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.servers.app import create_app
from engine.servers.schema.body import SamplingBody
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings
from tests.support.toy_engine.llm import ToyBackend, written

TABLE = """
[presets.{name}]
system = "Be brief."
stop = ["END"]
template_options = {{ enable_thinking = false, absent = 1 }}

[presets.{name}.parameters]
temperature = 0.25
top_k = 7
max_tokens = 5
mirostat_tau = 4.5
repeat_last_n = 64
"""


def load(path: Path, text: str, **flags: Any) -> Any:
    file = path / "engine.toml"
    file.write_text(text)
    given = {key.replace("__", "."): value for key, value in flags.items()}
    return load_settings(file, given).settings


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def client(backend: FakeBackend, tmp_path: Path) -> httpx.AsyncClient:
    tables = load(tmp_path, TABLE.format(name=f'"{MODEL}"')).tables
    settings = make_settings().model_copy(update={"tables": tables})
    app = create_app(settings, backend, Metrics(MODEL))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> None:
    response = await client.post(path, json={"model": MODEL} | body)
    assert response.status_code == 200, response.text


async def test_omitted_parameters_come_from_the_preset(client, backend):
    hello = [{"role": "user", "content": "Hello"}]
    await ask(client, "/v1/chat/completions", messages=hello, temperature=None)
    await ask(client, "/v1/messages", messages=hello, max_tokens=3)
    await ask(client, "/v1/responses", input="Hello", store=False)
    for request, max_tokens in zip(backend.requests, (5, 3, 5), strict=True):
        params = request.context.params
        assert (params.temperature, params.top_k, params.stop) == (0.25, 7, ("END",))
        assert params.max_tokens == max_tokens
        assert [message["content"] for message in request.messages] == ["Be brief.", "Hello"]
        assert request.template_options == {"enable_thinking": False}


async def test_parameters_of_a_request_override_the_preset(client, backend):
    messages = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hello"}]
    own = {"temperature": 0, "top_k": 0, "stop": "\n", "max_tokens": 9}
    own |= {"chat_template_kwargs": {"enable_thinking": True}}
    await ask(client, "/v1/chat/completions", messages=messages, **own)
    await ask(client, "/v1/completions", prompt="one", temperature=1.5)
    chat, completion = backend.requests
    params = chat.context.params
    assert (params.temperature, params.top_k, params.stop) == (0.0, 0, ("\n",))
    assert params.max_tokens == 9 and chat.messages[0]["content"] == "Be long."
    assert len(chat.messages) == 2
    assert chat.template_options == {"enable_thinking": True}
    params = completion.context.params
    assert (params.temperature, params.top_k, params.max_tokens) == (1.5, 7, 16)


async def test_a_preset_applies_only_to_its_model(client, backend):
    backend.set_card(id="other")
    await ask(
        client, "/v1/chat/completions", model="other", messages=[{"role": "user", "content": "a"}]
    )
    (request,) = backend.requests
    assert request.context.params.temperature == 1.0 and len(request.messages) == 1


def test_a_preset_name_selects_its_model(tmp_path):
    text = '[presets.mario]\nmodel = "smollm2-135m-instruct"\nsystem = "You are Mario."\n'
    settings = load(tmp_path, text, model__model_path="mario")
    assert (settings.model.model_path, settings.model.name) == ("smollm2-135m-instruct", "mario")
    assert preset_of(settings).system == "You are Mario."
    plain = load(tmp_path, text)
    assert plain.model.name is None and preset_of(plain) is None


def test_a_preset_template_is_text_or_a_file_beside_the_config(tmp_path):
    (tmp_path / "plain.jinja").write_text("{{ messages }}")
    for template in ("plain.jinja", "{{ messages }}"):
        settings = load(tmp_path, f'[presets.m]\ntemplate = "{template}"\n')
        assert settings.tables.presets["m"].template == "{{ messages }}"


def test_a_preset_template_may_be_the_name_of_a_built_in_one(tmp_path):
    settings = load(tmp_path, "[presets.m]\ntemplate = 'chatml'\n")
    assert settings.tables.presets["m"].template == BUILTIN_TEMPLATES["chatml"]
    with pytest.raises(ConfigError, match="chatml, chatglm4, "):
        load(tmp_path, "[presets.m]\ntemplate = 'chatlm'\n")


def test_flags_of_sampling_change_the_preset_of_the_file(tmp_path):
    before = load(tmp_path, TABLE.format(name="m"))
    after = with_preset(before, "m", {"temperature": 0.5, "template": "chatml"})
    preset, other = after.tables.presets["m"], with_preset(before, "o", {"seed": 1})
    assert (preset.system, preset.stop) == ("Be brief.", ("END",))
    assert (preset.parameters.temperature, preset.parameters.top_k) == (0.5, 7)
    assert preset.template == BUILTIN_TEMPLATES["chatml"]
    assert other.tables.presets["o"].parameters == ParametersTable(seed=1)
    with pytest.raises(ConfigError, match="temperature"):
        with_preset(before, "m", {"temperature": 3})
    routed = load(tmp_path, "[backends.b]\nkind = 'native'\n")
    with pytest.raises(ConfigError, match="one model"):
        with_preset(routed, "m", {"temperature": 1})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[presets.m]\nsystme = 'x'\n", "did you mean system"),
        ("[presets.m]\ntemplate = 'absent.jinja'\n", "presets.m.template"),
        ("[presets.m.parameters]\ntemperature = 3\n", "temperature"),
        ("[presets.m.parameters]\ntemprature = 1\n", "temprature"),
        ("[presets.m.parameters]\ntop_k = true\n", "top_k"),
        ("[presets.m]\nsystem = 'x'\n[backends.b]\nkind = 'native'\n", "presets.m: no such model"),
        ("[presets.b]\nmodel = 'x'\n[backends.b]\nkind = 'native'\n", "presets.b.model"),
    ],
)
def test_invalid_presets_are_refused_with_the_reason(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, text)


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    text = TABLE.format(name="toy").replace("Be brief.", "gh").replace("END", "zzz")
    (tmp_path / "engine.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "build_backend", lambda settings, in_process: ToyBackend())
    with LLM("toy") as opened:
        yield opened


def test_the_library_uses_the_preset_where_no_parameters_are_given(llm):
    given = llm.get_default_sampling_params()
    assert (given.temperature, given.top_k, given.max_tokens, given.stop) == (0.25, 7, 5, ("zzz",))
    (output,) = llm.chat("abc")
    assert output.usage.completion_tokens <= 5
    assert written(output.prompt_token_ids) == "ghabc"
    own = [{"role": "system", "content": "i"}, {"role": "user", "content": "abc"}]
    (output,) = llm.chat(own, SamplingParams(max_tokens=9, ignore_eos=True))
    assert output.usage.completion_tokens == 9 and written(output.prompt_token_ids) == "iabc"


def test_presets_have_the_same_numeric_bounds_as_requests():
    """A field of requests that is a number is also a preset's, or is named here."""
    own = {"n", "min_tokens", "priority", "truncate_prompt_tokens", "id_slot"}
    table = ParametersTable.model_json_schema()["properties"]
    for name, body in SamplingBody.model_json_schema()["properties"].items():
        kinds = [each for each in body.get("anyOf", [body]) if each.get("type") != "null"]
        if kinds[0].get("type") not in ("integer", "number") or name in own:
            continue
        assert name in table, name
        if name not in ("top_k", "seed"):  # requests may say -1, and wrap seeds around
            assert kinds[0] == table[name]["anyOf"][0], name
