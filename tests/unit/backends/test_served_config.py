"""External engines' options: which command line they become, and what is refused before a start."""

import sys
from pathlib import Path

import pytest

from engine.backends.external.listening import HeldPort, PrivateSocket
from engine.backends.external.served_config import ServedConfig
from engine.backends.factory import make_config
from engine.backends.sglang import SGLangConfig
from engine.backends.vllm import VLLMConfig
from engine.core.errors import ConfigError, NotFoundError

BOTH = pytest.mark.parametrize("kind", [VLLMConfig, SGLangConfig])


def test_the_quick_start_command_line_of_vllm() -> None:
    config = VLLMConfig(model_name="openai-community/gpt2", host="0.0.0.0", port=8000)
    argv = config.argv()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "openai-community/gpt2"]
    assert argv[:5] == command
    assert {"--host=0.0.0.0", "--port=8000", "--served-model-name=openai-community/gpt2"} < {*argv}
    assert {"--tensor-parallel-size=1", "--gpu-memory-utilization=0.9", "--dtype=auto"} < {*argv}


def test_every_option_of_vllm_has_its_flag() -> None:
    config = VLLMConfig(
        model_name="a/b",
        max_model_len=2048,
        quantization="fp8",
        seed=0,
        enable_prefix_caching=False,
        enforce_eager=True,
        tool_call_parser="hermes",
        backend_args={"max-logprobs": 5, "enable_lora": True, "hf_overrides": {"a": 1}},
    )
    flags = {*config.argv()}
    assert {"--max-model-len=2048", "--quantization=fp8", "--seed=0"} < flags
    assert {"--no-enable-prefix-caching", "--enforce-eager"} < flags
    assert {"--tool-call-parser=hermes", "--enable-auto-tool-choice"} < flags
    assert {"--max-logprobs=5", "--enable-lora", '--hf-overrides={"a": 1}'} < flags


def test_every_option_of_sglang_has_its_flag() -> None:
    config = SGLangConfig(
        model_name="a/b",
        mem_fraction_static=0.8,
        context_length=4096,
        random_seed=1,
        disable_radix_cache=True,
        backend_args={"lora_paths": ["x=1", "y=2"]},
    )
    argv = config.argv()
    assert argv[1:4] == ["-m", "sglang.launch_server", "--model-path=a/b"]
    assert {"--mem-fraction-static=0.8", "--context-length=4096", "--random-seed=1"} < {*argv}
    assert "--disable-radix-cache" in argv
    assert argv[argv.index("--lora-paths") + 1 :] == ["x=1", "y=2"]


def test_the_child_listens_on_the_reserved_port_or_private_socket() -> None:
    place = HeldPort("127.0.0.1", 0)
    assert f"--port={place.port}" in SGLangConfig(model_name="a/b", port=0).argv(place=place)
    place.release()
    private = PrivateSocket()
    argv = VLLMConfig(model_name="a/b", port=0).argv(place=private)
    assert f"--uds={private.path}" in argv
    assert not any(each.startswith("--port") for each in argv)
    private.release()


@BOTH
def test_trust_remote_code_is_passed_only_if_set(kind: type[ServedConfig]) -> None:
    assert not any("trust" in each for each in kind(model_name="a/b").argv())
    assert "--trust-remote-code" in kind(model_name="a/b", trust_remote_code=True).argv()
    for name in ("trust_remote_code", "trust-remote-code", "trust_remote", "Trust-Remote-Code"):
        with pytest.raises(ConfigError, match="trust_remote_code is set to true"):
            kind(model_name="a/b", backend_args={name: True}).argv()


@BOTH
@pytest.mark.parametrize(
    ("backend_args", "told"),
    [
        ({"port": 1}, "port is an option outside"),
        ({"dtype": "half"}, "dtype is an option outside"),
        ({"api_key": "s3cret"}, "readable by every user"),
        ({"x y": 1}, "can't be the name"),
        ({"--x": 1}, "can't be the name"),
        ({"x": ["--trust-remote-code"]}, "may begin with '-'"),
        ({"config": ["options.yaml"]}, "can't be checked; name them here"),
        ({"x": None}, "has no value"),
    ],
)
def test_backend_args_that_belong_elsewhere_are_refused(kind, backend_args, told) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        kind(model_name="a/b", backend_args=backend_args).argv()
    assert "s3cret" not in str(refused.value)


@BOTH
def test_an_option_value_cannot_pass_for_a_flag(kind: type[ServedConfig]) -> None:
    argv = kind(model_name="a/b", dtype="--trust-remote-code").argv()
    assert "--trust-remote-code" not in argv


@BOTH
def test_options_come_from_configuration_files(kind: type[ServedConfig]) -> None:
    made = make_config(kind, "x", "a/b", {"env": {"A": "1"}, "python": "p", "revision": "main"})
    assert made == kind(model_name="a/b", port=0, env={"A": "1"}, python="p", revision="main")
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        make_config(kind, "x", "a/b", {"tensor_paralel_size": 2})


def test_a_missing_interpreter_is_refused() -> None:
    with pytest.raises(ConfigError, match="python: '/no/such/python' is not a program"):
        VLLMConfig(model_name="a/b", python="/no/such/python").argv()


def test_vllm_refuses_a_gguf_unless_load_format_says_so(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ConfigError, match="vLLM can't load model.gguf: .* not GGUF"):
        VLLMConfig(model_name=str(file)).resolved_model()
    assert VLLMConfig(model_name=str(file), load_format="gguf").resolved_model() == str(file)
    assert SGLangConfig(model_name=str(file)).resolved_model() == str(file)


@BOTH
def test_an_unknown_model_name_is_refused_with_the_hub_form(
    kind: type[ServedConfig], tmp_path: Path
) -> None:
    for name in (str(tmp_path / "no-such-folder"), "no-such-name"):
        with pytest.raises(NotFoundError, match="owner/name on the hub"):
            kind(model_name=name).resolved_model()


def test_the_served_name_is_the_models_folder_or_hub_name(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    assert VLLMConfig(model_name=f"{folder}/").model_id == "Llama-3.1-8B"
    assert VLLMConfig(model_name="meta-llama/Llama-3.1-8B").model_id == "meta-llama/Llama-3.1-8B"
    assert VLLMConfig(model_name=str(folder), served_model_name="mine").model_id == "mine"


@BOTH
def test_a_child_gets_none_of_our_environment_settings(
    kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_ENGINE_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("HF_TOKEN", "theirs")
    found = kind(model_name="a/b", env={"PYTHONPATH": "/theirs"}).environment()
    assert "LLM_ENGINE_API_KEY" not in found
    assert found["PYTHONPATH"] == "/theirs"
    assert found["HF_TOKEN"] == "theirs"
    assert found["PATH"].startswith(str(Path(sys.executable).parent))
