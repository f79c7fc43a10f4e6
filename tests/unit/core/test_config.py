"""Settings: which source wins, where a value is from, and how a mistake is answered."""

import math
from pathlib import Path

import pytest

from engine.core.config import (
    SHORT_VARIABLES,
    Settings,
    check_exposure,
    check_references,
    is_loopback,
    load_settings,
    variable_names,
)
from engine.core.config_schema import SECRET_KEYS, setting_keys
from engine.core.errors import ConfigError

KEY = "correct-horse-battery"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine.toml of the developer's own."""
    monkeypatch.chdir(tmp_path)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def complaint(
    overrides: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    toml: str | None = None,
) -> str:
    """The message of the `ConfigError` that loading must raise."""
    path = write(Path("bad.toml"), toml) if toml is not None else None
    with pytest.raises(ConfigError) as caught:
        load_settings(path, overrides or {}, environ or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_setting_sources_have_an_order_of_precedence(tmp_path: Path) -> None:
    path = write(
        tmp_path / "my.toml", "[server]\nport = 1111\nhost = '10.0.0.1'\nbody_limit_mb = 3\n"
    )
    loaded = load_settings(
        path,
        {"server.port": 3333},
        {"LLM_ENGINE_PORT": "2222", "LLM_ENGINE_HOST": "10.0.0.2", "PATH": "ignored"},
    )
    server = loaded.settings.server
    assert (server.port, server.host, server.body_limit_mb) == (3333, "10.0.0.2", 3)
    assert loaded.origins["server.port"] == "--port"
    assert loaded.origins["server.host"] == "LLM_ENGINE_HOST"
    assert loaded.origins["server.body_limit_mb"] == str(path)
    assert loaded.origins["server.drain_timeout_s"] == "default"
    assert list(loaded.origins) == setting_keys()


def test_without_any_source_settings_have_their_defaults() -> None:
    loaded = load_settings()
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}


def test_the_config_file_is_found_by_flag_then_variable_then_folder(tmp_path: Path) -> None:
    write(tmp_path / "engine.toml", "[server]\nport = 1\n")
    by_variable = write(tmp_path / "variable.toml", "[server]\nport = 2\n")
    by_flag = write(tmp_path / "flag.toml", "[server]\nport = 3\n")
    environ = {"LLM_ENGINE_CONFIG": str(by_variable)}
    assert load_settings().origins["server.port"] == "engine.toml"
    assert load_settings(None, {}, environ).settings.server.port == 2
    assert load_settings(by_flag, {}, environ).settings.server.port == 3


def test_every_setting_has_an_environment_variable_and_short_names_map_to_settings() -> None:
    names = variable_names()
    assert set(names.values()) == set(setting_keys())
    assert set(SHORT_VARIABLES.values()) <= set(setting_keys())
    assert names["LLM_ENGINE_CACHE__EVICTION_POLICY"] == "cache.eviction_policy"


def test_environment_variables_become_typed_values() -> None:
    environ = {
        "LLM_ENGINE_CACHE_ENABLED": "false",
        "LLM_ENGINE_CACHE_SIZE_MB": "512",
        "LLM_ENGINE_LOG_LEVEL": "WARNING",
        "LLM_ENGINE_SERVER__CORS_ORIGINS": "https://a.example, https://b.example",
        "LLM_ENGINE_CACHE__TTL_SECONDS": "1.5",
        "LLM_ENGINE_DEVICE": "",  # empty is not set
    }
    settings = load_settings(None, {}, environ).settings
    assert settings.cache.enabled is False
    assert settings.cache.max_size_mb == 512
    assert settings.logging.level == "warning"
    assert settings.server.cors_origins == ("https://a.example", "https://b.example")
    assert settings.cache.ttl_seconds == 1.5
    assert settings.model.device == "auto"


def test_the_documented_config_file_is_accepted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "all.toml",
        """
        [server]
        host = "0.0.0.0"
        port = 8080
        max_concurrent_requests = 100
        enable_cors = true
        [model]
        name = "some/model"
        model_path = "some/model"
        device = "cpu"
        max_sequence_length = 2048
        [cache]
        enabled = true
        max_size_mb = 1024
        eviction_policy = "lru"
        max_sequences = 1000
        [performance]
        batch_size = 1
        memory_pool_size_mb = 512
        use_mmap = true
        [logging]
        level = "info"
        format = "pretty"
        log_requests = true
        [metrics]
        enabled = true
        endpoint = "/metrics"
        """,
    )
    settings = load_settings(path).settings
    assert settings.performance.memory_pool_size_mb == 512
    assert settings.server.allowed_origins == ("*",)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"toml": "[server]\nprot = 1\n"}, ("server.prot", "server.port")),
        ({"toml": "[sever]\nport = 1\n"}, ("[sever]", "server")),
        ({"toml": "port = 1\n"}, ("port",)),
        ({"toml": "server = 1\n"}, ("[server]",)),
        ({"environ": {"LLM_ENGINE_PROT": "1"}}, ("LLM_ENGINE_PROT", "LLM_ENGINE_PORT")),
        ({"environ": {"LLM_ENGINE_CACHE__BLOCKSIZE": "1"}}, ("LLM_ENGINE_CACHE__BLOCK_SIZE",)),
        ({"overrides": {"model.dtipe": "x"}}, ("model.dtipe", "model.dtype")),
    ],
)
def test_unknown_settings_are_refused_with_the_nearest_name(
    given: dict, names: tuple[str, ...]
) -> None:
    message = complaint(**given)
    for name in names:
        assert name in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("server.port", 65536),
        ("server.port", -1),
        ("server.port", True),
        ("server.port", "80a"),
        ("server.request_timeout_s", math.nan),
        ("server.request_timeout_s", math.inf),
        ("server.request_timeout_s", 0),
        ("server.dialects", "ollama,lmstudio"),
        ("server.cors_origins", "example.com/path"),
        ("model.dtype", "int3"),
        ("model.device", "../x"),
        ("cache.block_size", 24),
        ("cache.block_size", 512),
        ("cache.eviction_policy", "random"),
        ("cache.ttl_seconds", "nan"),
        ("performance.batch_size", 0),
        ("performance.memory_pool_size_mb", 2**40),
        ("logging.level", "loud"),
        ("metrics.endpoint", "metrics"),
        ("metrics.endpoint", "/v1/metrics"),
        ("metrics.endpoint", "/health"),
    ],
)
def test_setting_values_out_of_bounds_are_refused_by_name(key: str, value: object) -> None:
    assert key in complaint({key: value})


def test_a_token_budget_smaller_than_the_batch_is_refused() -> None:
    message = complaint({"performance.batch_size": 100, "performance.max_batch_tokens": 50})
    assert "max_batch_tokens" in message


def test_every_numeric_setting_is_bounded() -> None:
    """A new numeric setting without limits turns this red."""
    for section, schema in Settings.model_json_schema()["$defs"].items():
        for name, field in schema["properties"].items():
            for part in field.get("anyOf", [field]):
                if part.get("type") in ("integer", "number"):
                    assert {"minimum", "exclusiveMinimum"} & part.keys(), (section, name)
                    assert {"maximum", "exclusiveMaximum"} & part.keys(), (section, name)


def test_malformed_config_files_are_reported_in_one_line(tmp_path: Path) -> None:
    assert "bad.toml" in complaint(toml="[server\n")
    assert "bad.toml" in complaint(toml="[server]\nport = 1\nport = 2\n")
    with pytest.raises(ConfigError, match="absent.toml"):
        load_settings(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary.toml"):
        load_settings(tmp_path / "binary.toml")


def test_a_setting_given_by_two_environment_variables_is_refused() -> None:
    message = complaint(environ={"LLM_ENGINE_PORT": "1", "LLM_ENGINE_SERVER__PORT": "2"})
    assert "LLM_ENGINE_PORT" in message
    assert "LLM_ENGINE_SERVER__PORT" in message


def test_the_earlier_name_of_a_setting_beside_the_new_one_is_refused() -> None:
    in_file = complaint(toml="[server]\nresume_requests = true\nsurvive = false\n")
    names = ("LLM_ENGINE_SERVER__RESUME_REQUESTS", "LLM_ENGINE_SERVER__SURVIVE")
    by_variables = complaint(environ=dict.fromkeys(names, "true"))
    assert "server.survive" in in_file and "server.resume_requests" in in_file
    assert all(name in by_variables for name in names)


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_secrets_are_refused_on_the_command_line_and_in_toml(key: str) -> None:
    section, name = key.split(".")
    assert f"{key}_file" in complaint(toml=f"[{section}]\n{name} = '{KEY}'\n")
    assert key in complaint({key: KEY})
    assert KEY not in complaint({key: KEY})


def test_an_invalid_secret_is_not_echoed() -> None:
    message = complaint(environ={"LLM_ENGINE_API_KEY": "pass word"})
    assert "LLM_ENGINE_API_KEY" in message
    assert "pass word" not in message


def test_an_api_key_longer_than_512_characters_is_refused() -> None:
    assert "512" in complaint(environ={"LLM_ENGINE_API_KEY": "k" * 513})
    load_settings(environ={"LLM_ENGINE_API_KEY": "k" * 512})


def test_a_secret_file_has_the_precedence_of_the_source_that_names_it(tmp_path: Path) -> None:
    write(tmp_path / "key", KEY + "\n")
    toml = write(tmp_path / "x.toml", f"[server]\napi_key_file = '{tmp_path / 'key'}'\n")

    from_file = load_settings(toml)
    assert from_file.settings.server.api_key is not None
    assert from_file.settings.server.api_key.get_secret_value() == KEY
    assert str(toml) in from_file.origins["server.api_key"]
    assert KEY not in repr(from_file)

    environ = {"LLM_ENGINE_API_KEY": "from-the-environment"}
    from_environ = load_settings(toml, {}, environ)
    assert from_environ.settings.server.api_key is not None
    assert from_environ.settings.server.api_key.get_secret_value() == "from-the-environment"

    by_flag = load_settings(None, {"server.api_key_file": tmp_path / "key"}, environ)
    assert by_flag.settings.server.api_key is not None
    assert by_flag.settings.server.api_key.get_secret_value() == KEY


def test_missing_and_empty_secret_files_are_refused(tmp_path: Path) -> None:
    assert "api_key_file" in complaint({"server.api_key_file": tmp_path / "absent"})
    write(tmp_path / "empty", "\n")
    assert "server.api_key" in complaint({"server.api_key_file": tmp_path / "empty"})


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.server.port = 1  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        settings.server = settings.server  # type: ignore[misc]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "LOCALHOST"]
)
def test_loopback_hosts_need_no_api_key(host: str) -> None:
    assert is_loopback(host)
    check_exposure(load_settings(None, {"server.host": host}).settings)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "192.168.1.2", "example.com", "localhost.example.com", "127.0.0.1.nip"],
)
def test_other_hosts_need_a_long_api_key(host: str) -> None:
    assert not is_loopback(host)
    flags = {"server.host": host}
    with pytest.raises(ConfigError, match="LLM_ENGINE_API_KEY"):
        check_exposure(load_settings(None, flags).settings)
    with pytest.raises(ConfigError, match="shorter than 16"):
        check_exposure(load_settings(None, flags, {"LLM_ENGINE_API_KEY": "short"}).settings)
    check_exposure(load_settings(None, flags, {"LLM_ENGINE_API_KEY": KEY}).settings)
    check_exposure(load_settings(None, flags | {"server.insecure_no_auth": True}).settings)


def test_cors_for_every_site_needs_a_key() -> None:
    flags: dict[str, object] = {"server.enable_cors": True}
    with pytest.raises(ConfigError, match="cors_origins"):
        check_exposure(load_settings(None, flags).settings)
    check_exposure(load_settings(None, flags, {"LLM_ENGINE_API_KEY": KEY}).settings)
    named = load_settings(None, flags | {"server.cors_origins": ["https://a.example"]}).settings
    check_exposure(named)
    assert named.server.allowed_origins == ("https://a.example",)


def test_configured_files_are_checked_before_loading(tmp_path: Path) -> None:
    missing, file = str(tmp_path / "absent"), tmp_path / "file"
    file.write_text("x")
    for flags, word in (
        ({"server.keys_file": missing}, "absent"),
        ({"cache.warm_file": missing}, "cache.warm_file"),
        ({"storage.path": str(file)}, "storage.path"),
        ({"storage.path": "/proc/absent"}, "storage.path: nothing can be kept in /proc/absent"),
    ):
        with pytest.raises(ConfigError, match=word):
            check_references(load_settings(None, flags).settings)
    flags = {"storage.path": missing, "cache.warm_file": str(file)}
    check_references(load_settings(None, flags).settings)
