"""Processes of two machines compare builds: what decides their messages must decide the name."""

import sys
from pathlib import Path

import msgspec.inspect
import pytest

from engine import __version__
from engine.core import build_name
from engine.routing.nodes.wire import FromNode, ToNode, node_build
from engine.runtime.tiers.peers import block_build
from engine.torch.execution.distributed.group import RankSetup
from engine.torch.execution.distributed.remote import shard_build

BUILDS = {"nodes": node_build, "shards": shard_build, "blocks": block_build}


def files_of(build, monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The files that decide a name."""
    read: set[Path] = set()
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        read.add(path)
        return real(path)

    build_name.build_name.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_bytes)
        assert build().startswith(f"{__version__}+")
    return read


def modules_of(found: object) -> set[str]:
    """The modules of all structs and dataclasses that messages consist of."""
    if isinstance(found, list | tuple):
        return set().union(*map(modules_of, found)) if found else set()
    if not isinstance(found, msgspec.inspect.Type | msgspec.inspect.Field):
        return set()
    own = {found.cls.__module__} if hasattr(found, "cls") else set()
    parts = [getattr(found, name) for name in type(found).__struct_fields__]
    return own.union(*map(modules_of, parts))


@pytest.mark.parametrize(
    ("name", "messages"), [("nodes", FromNode | ToNode), ("shards", RankSetup)]
)
def test_every_module_that_defines_messages_affects_the_build_name(
    name, messages, monkeypatch
) -> None:
    modules = modules_of(msgspec.inspect.type_info(messages))
    files = {Path(sys.modules[each].__file__ or "") for each in modules}
    assert len(files) > 1 and files <= files_of(BUILDS[name], monkeypatch)


@pytest.mark.parametrize("name", BUILDS)
def test_a_changed_source_file_changes_the_build_name(name, monkeypatch) -> None:
    ours, real = BUILDS[name](), Path.read_bytes
    for changed in files_of(BUILDS[name], monkeypatch):

        def read_bytes(path: Path, changed: Path = changed) -> bytes:
            return real(path) + b"#" * (path == changed)

        build_name.build_name.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", read_bytes)
            assert BUILDS[name]() != ours
    build_name.build_name.cache_clear()
    assert BUILDS[name]() == ours
