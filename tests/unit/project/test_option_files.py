"""How many files a new option or request parameter touches, counted for some that exist."""

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


@pytest.mark.parametrize("name", ["min_p", "top_n_sigma", "dry_base", "mirostat_tau"])
def test_a_sampling_parameter_is_declared_in_at_most_four_files(name: str) -> None:
    declaring, computing = files_naming(name)
    assert len(declaring) <= 4, declaring
    assert "core/interfaces/request.py" in declaring
    assert computing, "a parameter has an effect"
