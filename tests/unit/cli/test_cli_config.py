"""The command line itself: `config show`, `doctor`, and how errors and secrets come out."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine import __version__
from engine.cli.commands import COMMANDS, SYNONYMS, app
from engine.core.config_schema import setting_keys
from engine.core.errors import ConfigError
from engine.core.registry.backend_registry import BUILTIN_BACKENDS, backend_names

SECRET = "correct-horse-battery"
SPEED = {
    "instruction_sets": ["generic", "avx2"],
    "threads": 6,
    "nodes": 1,
    "read_bytes_per_s": 200 * 98_362_432.0,
    "int8_ops_per_s": 1.25e12,
    "bf16_ops_per_s": None,
}


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("LLM_ENGINE_CONFIG", "LLM_ENGINE_API_KEY", "LLM_ENGINE_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("engine.cli.machine_speed.has_kernels", lambda: True)
    monkeypatch.setattr("engine.cli.machine_speed.measured_speed", lambda: SPEED)


def findings() -> list[dict[str, object]]:
    return json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)


def test_config_show_lists_every_setting_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine.toml").write_text("[model]\ndtype = 'bfloat16'\n")
    monkeypatch.setenv("LLM_ENGINE_PORT", "9999")
    result = CliRunner().invoke(app, ["config", "show", "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert list(shown) == setting_keys()
    assert shown["server.port"] == {"value": 9999, "origin": "LLM_ENGINE_PORT"}
    assert shown["model.dtype"] == {"value": "bfloat16", "origin": "engine.toml"}
    assert shown["server.host"]["origin"] == "default"
    assert shown["server.api_key"]["value"] is None, "there is nothing to hide"


def test_config_show_marks_only_written_table_keys_as_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "engine.toml").write_text("[backends.here]\nkind = 'custom'\n")
    shown = json.loads(CliRunner().invoke(app, ["config", "show", "--json"]).stdout)
    origins = {key: each["origin"] for key, each in shown.items() if "backends.here." in key}
    assert origins.pop("backends.here.kind") == "engine.toml"
    assert set(origins.values()) == {"default"}


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_config_show_hides_secrets(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_ENGINE_API_KEY", SECRET)
    result = CliRunner().invoke(app, ["config", "show", *arguments])
    assert result.exit_code == 0
    assert "********" in result.output
    assert "LLM_ENGINE_API_KEY" in result.output
    assert SECRET not in result.output


def test_a_config_error_is_one_line_with_exit_code_2() -> None:
    Path("x.toml").write_text("[server]\nprot = 1\n")
    result = CliRunner().invoke(app, ["config", "show", "--config", "x.toml"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: x.toml: unknown key server.prot; did you mean server.port?"
    ]


def test_control_characters_in_errors_are_escaped() -> None:
    Path("x.toml").write_text('[server]\n"a\\u001b[31m\\nb" = 1\n')
    result = CliRunner().invoke(app, ["config", "show", "--config", "x.toml"])
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_debug_flag_raises_the_original_exception() -> None:
    result = CliRunner().invoke(app, ["--debug", "config", "show", "--config", "absent.toml"])
    assert isinstance(result.exception, ConfigError)


def test_an_unknown_command_or_flag_suggests_the_nearest() -> None:
    command = CliRunner().invoke(app, ["confg"])
    assert command.exit_code == 2
    assert "config" in command.stderr
    flag = CliRunner().invoke(app, ["config", "show", "--confg", "x"])
    assert flag.exit_code == 2
    assert "--config" in flag.stderr


def test_version_flag_prints_the_version() -> None:
    for flag in ("--version", "-V"):
        assert CliRunner().invoke(app, [flag]).stdout.strip() == f"engine {__version__}"


def test_command_synonyms_run_our_commands() -> None:
    assert set(SYNONYMS.values()) <= set(COMMANDS) and not SYNONYMS.keys() & COMMANDS.keys()
    for name, command in SYNONYMS.items():
        shown = CliRunner().invoke(app, [name, "-h"])
        assert shown.exit_code == 0, shown.output
        real = CliRunner().invoke(app, [command, "-h"])
        assert shown.stdout.splitlines()[2:] == real.stdout.splitlines()[2:]


def test_doctor_reports_every_topic_and_the_missing_model() -> None:
    found = findings()
    assert {each["topic"] for each in found} == {
        "software",
        "hardware",
        "kernels",
        "backend",
        "settings",
        "model",
    }
    (model,) = [each for each in found if each["topic"] == "model" and each["name"] != "store"]
    assert model["name"] == "smollm2-135m-instruct"
    assert model["ok"] is False
    assert "engine pull" in model["fix"]
    of_others = [each["name"] for each in found if "another package" in each["detail"]]
    assert set(of_others).isdisjoint(BUILTIN_BACKENDS)


@pytest.mark.parametrize(
    ("best", "flags", "detail"),
    [
        ("avx2", "avx512f", "not avx_vnni, because AVX VNNI is missing on this CPU; not avx512,"),
        (
            "avx_vnni",
            "",
            "not avx512, because AVX-512, avx512bw, avx512dq, avx512vl, AVX-512 VNNI are",
        ),
        ("avx512", "avx512_vnni", "not avx512_bf16, because AVX-512 BF16 is missing on this CPU"),
        (
            "avx512_bf16",
            "amx_tile amx_bf16",
            "not amx, because these kernels were built on another CPU",
        ),
        ("amx", "", None),
        ("neon", "asimddp", "not i8mm, because I8MM is missing on this CPU"),
        ("neon_bf16", "", None),
    ],
)
def test_doctor_explains_why_faster_kernels_are_not_used(
    monkeypatch: pytest.MonkeyPatch, best: str, flags: str, detail: str | None
) -> None:
    speed = SPEED | {"instruction_sets": ["generic", best]}
    monkeypatch.setattr("engine.cli.machine_speed.measured_speed", lambda: speed)
    monkeypatch.setattr("engine.cli.doctor._cpu_flags", flags.split)
    (said,) = (each["detail"] for each in findings() if each["name"] == "native kernels")
    assert said.startswith(f"{best}; also here: generic")
    assert (detail in said) if detail else said.endswith("generic")


def test_doctor_names_the_missing_extra_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {name: (("absent-package",), name) for name in backend_names() if name != "native"}
    monkeypatch.setattr("engine.cli.doctor._BACKEND_NEEDS", absent)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0  # the native backend can run
    monkeypatch.setattr("engine.cli.machine_speed.has_kernels", lambda: False)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    (backend,) = [
        each
        for each in json.loads(result.stdout)
        if each["name"] == "torch" and each["topic"] == "backend"
    ]
    assert backend["ok"] is False
    assert "engine[torch]" in backend["fix"]


def test_doctor_reports_measured_kernel_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model is 98,362,432 bytes, read once for each token."""
    monkeypatch.setattr("engine.cli.doctor._cpu_flags", "avx2 avx512f avx512bw avx512dq".split)
    kernels = {each["name"]: each["detail"] for each in findings() if each["topic"] == "kernels"}
    assert kernels == {
        "native kernels": "avx2; also here: generic; not avx_vnni, because AVX VNNI is missing on "
        "this CPU; not avx512, because avx512vl, AVX-512 VNNI are missing on this CPU",
        "threads": "6, unless performance.threads says otherwise",
        "weights read": "19.7 GB/s",
        "matrix products": "1.25 TOPS int8",
        "smollm2-135m-instruct": "about 150 tok/s for one request, more where speculation guesses "
        "right or the CPU's caches hold its 98 MB",
    }


def test_doctor_reports_numa_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.cli.machine_speed.measured_speed", lambda: SPEED | {"nodes": 2})
    (threads,) = (each["detail"] for each in findings() if each["name"] == "threads")
    assert "on 2 NUMA nodes: threads are bound to their node" in str(threads)


def test_doctor_without_native_kernels_exits_1_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cli.machine_speed.has_kernels", lambda: False)
    monkeypatch.setattr("engine.core.registry.backend_registry.backend_names", lambda: ("native",))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    lacking = [each for each in json.loads(result.stdout) if "native" in each["name"]]
    assert [each["topic"] for each in lacking] == ["kernels", "backend"]
    for each in lacking:
        assert each["ok"] is False
        assert "C++ compiler" in each["fix"]
        assert "pip install 'engine[torch]'" in each["fix"]


def test_doctor_survives_kernels_that_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.cli.machine_speed.has_kernels", lambda: True)
    monkeypatch.setattr("engine.cli.machine_speed.NATIVE", "absent_package")
    (kernels,) = [each for each in findings() if each["topic"] == "kernels"]
    assert kernels["ok"] is False
    assert "measuring them failed" in str(kernels["detail"])
    (backend,) = [each for each in findings() if each["name"] == "native"]
    assert backend["ok"] is False


def test_doctor_survives_invalid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_ENGINE_PORT", "many")
    (settings,) = [each for each in findings() if each["topic"] == "settings"]
    assert settings["ok"] is False
    assert "server.port" in settings["fix"]
