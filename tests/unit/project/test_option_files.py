"""How many files a new option touches, counted for options that exist."""

import pytest

from engine_tools.dev.option_files import files_naming

# Options that reach the engine process. Their names mean nothing else in the package.
OPTIONS = ("kv_dtype", "numerics", "eviction_policy", "speculation", "max_adapters")


@pytest.mark.parametrize("name", OPTIONS)
def test_an_engine_option_is_declared_in_at_most_four_files(name: str) -> None:
    declaring, computing = files_naming(name)
    assert len(declaring) <= 4, declaring
    assert "core/config_schema.py" in declaring and "ipc/options.py" in declaring
    assert computing, "an option has an effect"
