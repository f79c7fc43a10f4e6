"""Backends from a configuration's words."""

from dataclasses import dataclass

import pytest

from engine.backends.base import BackendConfig
from engine.backends.factory import make_backend, make_config
from engine.core.errors import ConfigError


@dataclass(frozen=True)
class Config(BackendConfig):
    size: int = 1


def test_backend_options_become_config_fields() -> None:
    made = make_config(Config, "toy", "m", {"size": 3, "backend_args": {"a": True}})
    assert made == Config(model_name="m", port=0, size=3, backend_args={"a": True})


def test_a_misspelt_backend_option_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'sizes'; did you mean size"):
        make_config(Config, "toy", "m", {"sizes": 3})


def test_a_backend_option_of_the_wrong_type_is_named() -> None:
    with pytest.raises(ConfigError, match=r"backend 'toy': .*`str` - at `\$.size`"):
        make_config(Config, "toy", "m", {"size": "3"})


def test_the_native_backend_accepts_engine_options_as_backend_args() -> None:
    backend = make_backend("native", "some-model", {"backend_args": {"max_slots": 4}})
    assert not backend.health().ready
    with pytest.raises(ConfigError, match="unknown backend argument 'slots'"):
        make_backend("native", "some-model", {"backend_args": {"slots": 4}})
