"""Names the build of the engine, so that processes on two machines notice if they differ.

Two builds may have the same version, such as two commits of a source tree, and still send other
messages. So the name has the version, and a digest of the files that define the messages.
"""

import hashlib
from functools import cache
from pathlib import Path

from engine import __version__

ADVICE = "install the same build on both (the part after + is the format of their messages)"
_PACKAGE = Path(__file__).parents[1]


@cache
def build_name(*files: str) -> str:
    """The version, "+", and a digest of `files`, which are paths inside of the package."""
    digest = hashlib.sha256()
    for each in files:
        digest.update((_PACKAGE / each).read_bytes())
    return f"{__version__}+{digest.hexdigest()[:8]}"
