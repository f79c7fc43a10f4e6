"""The files of deploy/: they lock what the package asks for, and give away no rights."""

import configparser
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from engine.core.config import load_settings
from engine.core.config_schema import Settings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
LOCKED = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)(.*?)(?=^[A-Za-z]|\Z)", re.S | re.M)


def locked() -> dict[str, tuple[Version, str]]:
    """Version and the rest of the entry, by name."""
    text = (DEPLOY / "requirements.lock").read_text()
    return {canonicalize_name(m[1]): (Version(m[2]), m[3]) for m in LOCKED.finditer(text)}


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "engine.service")
    return parser["Service"]


def test_every_dependency_is_locked_in_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = locked()
    for each in map(Requirement, project["dependencies"]):
        assert each.specifier.contains(known[canonicalize_name(each.name)][0]), (
            f"{each} is not what deploy/requirements.lock has: make lock"
        )


def test_every_locked_package_has_hashes() -> None:
    assert len(locked()) > 30
    assert all("--hash=sha256:" in rest for _, rest in locked().values())
    assert "://" not in (DEPLOY / "requirements.lock").read_text()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Type", "notify"),
        ("Restart", "on-failure"),
        ("DynamicUser", "yes"),
        ("ProtectSystem", "strict"),
        ("PrivateTmp", "yes"),
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
    ],
)
def test_the_systemd_unit_is_hardened(key: str, value: str) -> None:
    assert unit()[key] == value


def test_the_systemd_unit_allows_a_drain_and_has_a_watchdog() -> None:
    service = unit()
    assert int(service["TimeoutStopSec"]) > Settings().server.drain_timeout_s + 10
    assert int(service["WatchdogSec"]) > 0
    assert "MemoryMax" in service
    assert service["OOMPolicy"] == "continue"  # the engine alone is killed, and starts again


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_container_images_run_unprivileged_with_a_health_check(name: str) -> None:
    lines = (DEPLOY / name).read_text().replace("\\\n", "").splitlines()
    last_stage = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM")) :]
    assert not any("g++" in line for line in last_stage)
    copies = [index for index, line in enumerate(lines) if line.startswith("COPY")]
    assert "requirements.lock" in lines[copies[0]], "dependencies come before the source"
    assert "USER 10001" in last_stage
    assert "STOPSIGNAL SIGTERM" in last_stage
    assert any(line.startswith("HEALTHCHECK") and "/livez" in line for line in last_stage)
    assert any("--require-hashes" in line for line in lines)


def test_containerignore_admits_only_what_the_image_copies() -> None:
    """What is not copied is ignored, so a change of it builds nothing again."""
    known = (ROOT / ".containerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in known if line.startswith("!")}
    text = (DEPLOY / "Containerfile").read_text()
    copied = {
        word
        for line in text.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    assert kept == copied
    assert all((ROOT / each).exists() for each in kept)


def test_the_compose_file_publishes_ports_on_localhost_only() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert {"engine", "redis", "open-webui", "prometheus", "grafana"} == set(services)
    for name, service in services.items():
        assert ":" in service["image"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for each in service.get("volumes", ()):
            if each.startswith("."):
                assert (DEPLOY / each.split(":")[0]).exists(), each
    engine = services["engine"]
    assert engine["read_only"] and engine["cap_drop"] == ["ALL"]
    variables = {name: value for name, value in engine["environment"].items() if name != "MODEL"}
    loaded = load_settings(environ=variables).settings
    assert loaded.server.allowed_hosts == ("engine",) and loaded.tiers.redis_url is not None


def test_the_two_machines_example_is_a_valid_configuration(tmp_path: Path) -> None:
    example = ROOT / "examples/deploy_inference_server/two_machines/engine.toml"
    settings = load_settings(example, environ={}).settings
    assert list(settings.tables.backends) == ["one", "two"]
