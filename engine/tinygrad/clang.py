"""Finds clang, which tinygrad needs to compile for a CPU. This module does not import tinygrad."""

import os
import shutil
import subprocess

_INSTALL = "apt-get install clang (or brew install llvm), or name a clang in the variable CC"


def missing_clang() -> str | None:
    """An error message that says why tinygrad cannot compile for a CPU and what to do. None if
    tinygrad can compile for a CPU.
    """
    compiler = os.environ.get("CC", "clang")
    if shutil.which(compiler) is None:
        return f"tinygrad compiles for a CPU with clang, and '{compiler}' is not there: {_INSTALL}"
    # tinygrad passes options that only clang has.
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    if "clang" not in answer.stdout:
        return (
            f"tinygrad compiles with '{compiler}', which CC names and which is no clang: unset CC"
        )
    return None
