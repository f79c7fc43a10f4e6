"""Nothing that can turn data into code occurs in the package (SEC-10; T3, T4).

`tests/unit/project/test_structure.py` bans the modules; here are the ways around such a ban, each
with the few places that may use it.
"""

import ast
import re
from pathlib import Path

import pytest

import engine

ROOT = Path(engine.__file__).parent
# Calls by their last name, whatever they are called on.
BANNED = frozenset(
    {
        *("recv_pyobj", "send_pyobj", "literal_eval", "__import__", "exec_module", "load_module"),
        *("popen", "ProcessPoolExecutor", "run_path", "run_module", "load_source", "execfile"),
        *("unsafe_load", "full_load"),
    }
)
# Modules are imported by name only from names that the package, or an installed one, states itself.
IMPORTERS = {
    "__init__.py",
    "cli/dev.py",
    "cli/commands.py",
    "runners/entry.py",
    "runners/lazy.py",
    "conformance/rules/__init__.py",
    "native/compiled.py",
    "torch/kernels/base.py",
    "tools/inspection.py",
    "ipc/connection.py",
    "core/registry/registry.py",
    "core/sandbox/validation_child.py",
    "servers/access/rate_windows.py",
    "servers/app.py",
}
# Who calls a library of C directly: the system's, and NVIDIA's.
CTYPES_USERS = {
    "tinygrad/execution/build.py",
    "torch/kernels/cuda/attention.py",
    "torch/kernels/cuda/decode.py",
    "torch/kernels/cuda/gated_linear.py",
    "torch/kernels/cuda/grouped.py",
    "torch/kernels/cuda/library.py",
    "core/sandbox/validation_child.py",
    "core/sandbox/processes.py",
    "finetuning/memory.py",
}
FILES = sorted(ROOT.rglob("*.py"))
# A file without any of these words can break no rule here, so it need not be parsed.
SUSPECT = re.compile(rf"\b({'|'.join(sorted(BANNED))}|compile|system|shell|import_module|ctypes)\b")


def calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ""
            found.append((function.id if isinstance(function, ast.Name) else name, node))
    return found


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed() -> dict[str, ast.Module]:
    texts = {place(path): path.read_text(encoding="utf-8") for path in FILES}
    return {where: ast.parse(text) for where, text in texts.items() if SUSPECT.search(text)}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return parsed()


def banned_calls(trees: dict[str, ast.Module]) -> list[str]:
    return [
        f"{where}:{node.lineno} calls {name}"
        for where, tree in trees.items()
        for name, node in calls(tree)
        if name in BANNED or ast.unparse(node.func) in ("compile", "os.system")
    ]


def shells(trees: dict[str, ast.Module]) -> list[str]:
    """Where a program might be run by one."""
    return [
        f"{where}:{node.lineno}"
        for where, tree in trees.items()
        for name, node in calls(tree)
        for keyword in node.keywords
        if keyword.arg == "shell" and name != "get_completion_script"  # it only writes text
    ]


def test_no_call_turns_data_into_code(trees: dict[str, ast.Module]) -> None:
    assert not banned_calls(trees)


def test_no_subprocess_uses_a_shell(trees: dict[str, ast.Module]) -> None:
    assert not shells(trees)


def test_import_module_is_used_in_few_places(trees: dict[str, ast.Module]) -> None:
    users = {
        where
        for where, tree in trees.items()
        if any(name == "import_module" for name, _ in calls(tree))
        or "to_thread(import_module" in ast.unparse(tree)
    }
    assert users <= IMPORTERS


def test_ctypes_is_imported_in_few_places(trees: dict[str, ast.Module]) -> None:
    users = {
        where
        for where, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and any(alias.name == "ctypes" for alias in node.names)
    }
    assert users <= CTYPES_USERS
