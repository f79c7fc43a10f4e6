"""Kernels that were built from other sources are refused, and not called."""

import re
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest

from engine.core.errors import ConfigError
from engine.native import compiled

ROOT = Path(__file__).parents[3]


def test_the_declared_native_interface_matches_the_sources() -> None:
    """As CMakeLists.txt computes it. If this fails after a change in csrc, the older kernels do not
    fit any more: write the digest of the message to `compiled.INTERFACE`, and build again.
    """
    files = sorted((ROOT / "csrc/bindings").iterdir())
    listed = re.findall(
        r"CMAKE_SOURCE_DIR\}/(csrc/\w+/\w+\.h)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert len(listed) == 5
    digests = [
        sha256(path.read_bytes()).hexdigest() for path in [*files, *map(ROOT.joinpath, listed)]
    ]
    assert sha256("".join(digests).encode()).hexdigest()[:16] == compiled.INTERFACE


@pytest.mark.parametrize("interface", [None, "0123456789abcdef"])
def test_compiled_kernels_of_other_sources_are_refused(
    monkeypatch: pytest.MonkeyPatch, interface: str | None
) -> None:
    other = ModuleType("_native")
    other.__file__ = "/somewhere/_native.so"
    if interface is not None:
        other.INTERFACE = interface  # type: ignore[attr-defined]
    monkeypatch.setattr(compiled, "import_module", lambda name: other)
    with pytest.raises(ConfigError, match=r"/somewhere/_native\.so.*pip install --editable"):
        compiled.kernels()
