"""The shape of the code: who may import whom, what never occurs, and how large things may grow.

Everything here reads syntax trees, so it covers code that no other test runs.
"""

import ast
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from engine_tools.dev.measure_structure import (
    code_lines,
    long_imports,
    one_importer_next_door,
    package_cycles,
    package_imports,
)
from engine_tools.source_trees import (
    PACKAGES,
    ROOT,
    dotted,
    imports,
    is_within,
    sources,
)

MAX_FILE_LINES = 400  # of code
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100  # a kernel is one function, with a line for each parameter
MAX_FOLDER_FILES = 19
MAX_LONG_IMPORTS = 5
MAX_ONE_IMPORTER_MODULES = 106

# A module may import rooms of its own rank or lower. The composition roots stand on top.
RANKS = {
    "engine.core": 0,
    "engine.adapters": 1,
    "engine.architectures": 1,
    "engine.backends": 1,
    "engine.conversion": 1,
    "engine.finetuning": 1,
    "engine.frontend": 1,
    "engine.ipc": 1,
    "engine.ir": 1,
    "engine.jax": 1,
    "engine.native": 1,
    "engine.runners": 1,
    "engine.runtime": 1,
    "engine.tinygrad": 1,
    "engine.tools": 1,
    "engine.torch": 1,
    "engine.weights": 1,
    "engine.worker": 1,
    "engine.plugins": 2,
    "engine.routing": 2,
    "engine.servers": 3,
    "engine.__main__": 4,
    "engine.backends.custom.app": 4,
    "engine.cli": 4,
    "engine.library": 4,
    "engine.llm": 4,
    "engine.outputs": 4,
    "engine.sampling_params": 4,
    "engine.servers.app": 4,
    "engine.servers.azure": 4,
    "engine.servers.capabilities": 4,
    "engine.servers.files_and_batches": 4,
    "engine.servers.generate": 4,
    "engine.servers.openapi": 4,
    "engine.servers.run": 4,
    "engine_tools": 4,
}
# Where a tensor library, or a library that loads one, may be imported.
FRAMEWORKS = ("native", "torch", "jax", "tinygrad")
WORKSHOP = "engine_tools.dev"
FRAMEWORK_HOMES = {
    "accelerate": ("engine.backends.transformers",),
    "flax": ("engine.jax",),
    "jax": ("engine.jax",),
    "sglang": (),
    "tensorflow": (),
    "tinygrad": ("engine.tinygrad",),
    "torch": (
        "engine.torch",
        "engine.backends.transformers",
        "engine.finetuning",
        WORKSHOP,
    ),
    "transformers": ("engine.backends.transformers", WORKSHOP),
    "triton": ("engine.torch",),
    "vllm": (),
}
# Rooms of one process, or of none, and what of the package they may import. A frontend never runs
# the scheduler, and an engine process never formats an answer.
SHARED_ROOMS = {
    "engine.runtime": (
        "engine.core",
        "engine.architectures.base",  # data about the model, for interpretability
        "engine.architectures.sites",
        "engine.ipc",
        "engine.runtime",
    ),
    "engine.ipc": ("engine.core", "engine.ipc"),
    "engine.frontend": (
        "engine.core",
        "engine.backends.base",
        "engine.architectures.base",
        "engine.architectures.vision",  # settings of the image preprocessing
        "engine.frontend",
        "engine.ipc",
        # A vocabulary's type, for an engine in a thread.
        "engine.runtime.requests.grammar",
        "engine.weights.model",
    ),
    "engine.worker": (
        "engine.core",
        "engine.adapters",
        "engine.architectures",
        "engine.runners.entry",
        "engine.frontend.text_cache",  # the same, if it was read before
        "engine.frontend.text_model",  # the tokenizer, which grammars need
        "engine.ipc",
        "engine.ipc.options",
        "engine.runtime",
        "engine.weights",
        "engine.worker",
    ),
    "engine.architectures": (
        "engine.core",
        "engine.architectures",
        "engine.weights.lazy_tensor",
    ),
    "engine.ir": (
        "engine.core",
        "engine.architectures",
        "engine.ir",
    ),
}
BANNED_MODULES = frozenset(
    {"cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}
)
BANNED_BUILTINS = frozenset({"eval", "exec"})
BANNED_CALLS = frozenset({"torch.load", "yaml.load", "numpy.load", "np.load"})
# The only template environment is the sandboxed one that these files build.
JINJA_HOMES = {"engine.core.text.template_sandbox"}
# Calls that make the host wait for the device.
SYNCS = frozenset({"item", "tolist", "cpu", "block_until_ready"})
# What only CUDA builds of PyTorch have, or what means something else in ROCm builds; and the files
# that may use it.
CUDA_ONLY = frozenset(
    {
        *("get_device_capability", "get_device_properties", "get_arch_list", "nvtx"),
        *("preferred_blas_library", "inline_asm_elementwise", "hip"),
        *("gdc_launch_dependents", "gdc_wait", "libdevice", "pynvml"),
    }
)
TORCH = "engine.torch"
CUDA_HOMES = (f"{TORCH}.device", f"{TORCH}.kernels.cuda", f"{TORCH}.kernels.triton.assembly")
# Wall-clock time is for what people read; durations use time.monotonic.
TIMESTAMP_MODULES = frozenset(
    {
        "engine.backends.custom.base_custom",
        "engine.native.weights.cache",
        "engine.adapters.served",
        "engine.runtime.tiers.base",
        "engine.runtime.tiers.disk",
        "engine.runtime.tiers.redis_tier",
        "engine.core.observability.otel",
        "engine.plugins.audit_log",
        "engine.routing.decisions",
        "engine.routing.shadow.traffic",
        "engine.servers.files.expiry",
        "engine.servers.openai.format",
        "engine.servers.ops.probes",
        "engine.servers.ops.requests",
        "engine.servers.responses.format",
        "engine.servers.storage.objects",
        "engine.servers.access.rate_windows",
    }
)


@cache
def rank(module: str) -> int | None:
    rooms = [room for room in RANKS if is_within(module, room)]
    return RANKS[max(rooms, key=len)] if rooms else None


def test_every_module_has_a_rank() -> None:
    unplaced = [each.module for each in sources() if rank(each.module) is None]
    assert unplaced == ["engine"], "give a new room its rank above"


def test_imports_point_to_lower_ranks() -> None:
    wrong = []
    for source in sources():
        own = rank(source.module)
        if own is None:  # the package itself, whose names resolve lazily
            continue
        for node, target in imports(source):
            if target == "engine" and is_within(source.module, "engine"):
                names = {alias.name for alias in node.names} if hasattr(node, "names") else set()
                if names != {"__version__"}:
                    wrong.append(f"{source.at(node)} imports the package from inside")
            if target == "engine":
                continue
            theirs = rank(target)
            if target.split(".")[0] in PACKAGES and (theirs is None or theirs > own):
                wrong.append(f"{source.at(node)} imports {target}")
    assert not wrong


def test_no_import_cycle_between_packages() -> None:
    """Packages can be understood, tested and moved one after the other, from the lowest."""
    graph = package_imports()
    cycles = package_cycles()
    if cycles:
        shortest = min(cycles, key=len)
        steps = "\n".join(graph[a][b] for a, b in pairwise(shortest))
        pytest.fail(f"{' -> '.join(shortest)}\n{steps}", pytrace=False)


def test_few_imports_have_six_dotted_parts() -> None:
    assert len(long_imports()) <= MAX_LONG_IMPORTS


def test_few_modules_have_one_importer_next_door() -> None:
    """Such a module may be a paragraph of its importer. The bound only ever falls."""
    assert len(one_importer_next_door()) <= MAX_ONE_IMPORTER_MODULES


def test_framework_libraries_are_imported_only_in_their_packages() -> None:
    wrong = []
    for source in sources():
        for node, target in imports(source):
            homes = FRAMEWORK_HOMES.get(target.split(".")[0])
            if homes is not None and not any(is_within(source.module, home) for home in homes):
                wrong.append(f"{source.at(node)} imports {target}")
    assert not wrong


@pytest.mark.parametrize(("name", "most"), [("jax", 1900), ("tinygrad", 1400)])
def test_the_jax_and_tinygrad_packages_stay_small(name: str, most: int) -> None:
    """What a second framework would need too belongs beside their folders."""
    room = f"engine.{name}"
    found = [source for source in sources() if is_within(source.module, room)]
    assert 0 < sum(len(code_lines(source)) for source in found) < most


def test_frameworks_do_not_import_each_other() -> None:
    def name(module: str) -> str | None:
        return next((each for each in FRAMEWORKS if is_within(module, f"engine.{each}")), None)

    wrong = [
        f"{source.at(node)} imports {target}"
        for source in sources()
        if name(source.module) is not None
        for node, target in imports(source)
        if name(target) not in (None, name(source.module))
    ]
    assert not wrong


def test_rooms_import_only_allowed_modules() -> None:
    wrong = [
        f"{source.at(node)} imports {target}"
        for room, allowed in SHARED_ROOMS.items()
        for source in sources()
        if is_within(source.module, room)
        for node, target in imports(source)
        if target.startswith("engine.") and not any(is_within(target, each) for each in allowed)
    ]
    assert not wrong


def test_generic_server_code_imports_no_api() -> None:
    apis = ("openai", "responses", "anthropic", "files", "batches")
    wrong = [
        f"{source.at(node)} imports {target}"
        for room in ("http", "access", "serving", "schema")
        for source in sources()
        if is_within(source.module, f"engine.servers.{room}")
        for node, target in imports(source)
        if any(is_within(target, f"engine.servers.{api}") for api in apis)
    ]
    assert not wrong


def test_every_package_has_a_docstring() -> None:
    folders = {each.path.parent for each in sources()}
    told = {
        each.path.parent
        for each in sources()
        if each.path.name == "__init__.py" and ast.get_docstring(each.tree)
    }
    assert not sorted(str(path.relative_to(ROOT)) for path in folders - told)


def test_folders_have_few_files() -> None:
    kinds = {".py", ".cpp", ".h", ".cu", ".cuh"}
    files = [
        path
        for room in (*PACKAGES, "csrc", "benchmarks", "tests")
        for path in (ROOT / room).rglob("*")
        if path.suffix in kinds
    ]
    sizes = Counter(path.parent for path in files)
    large = {str(path): size for path, size in sizes.items() if size > MAX_FOLDER_FILES}
    assert not large


def test_cuda_only_apis_are_used_in_few_modules() -> None:
    """So that a ROCm build of PyTorch runs all other files."""
    wrong = [
        f"{source.at(node)} uses {node.attr}"
        for source in sources()
        if not any(is_within(source.module, home) for home in CUDA_HOMES)
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in CUDA_ONLY
    ]
    assert not wrong


def code_from_data() -> list[str]:
    """Where the package imports or calls what can turn data into code."""
    wrong = []
    for source in sources():
        wrong += [
            f"{source.at(node)} imports {target}"
            for node, target in imports(source)
            if target.split(".")[0] in BANNED_MODULES
        ]
        for node in source.nodes:
            if isinstance(node, ast.Name) and node.id in BANNED_BUILTINS:
                wrong.append(f"{source.at(node)} uses {node.id}")
            elif isinstance(node, ast.Attribute) and dotted(node) in BANNED_CALLS:
                wrong.append(f"{source.at(node)} uses {dotted(node)}")
            elif isinstance(node, ast.keyword) and node.arg in (
                "allow_pickle",
                "trust_remote_code",
            ):
                wrong.append(f"{source.at(node.value)} passes {node.arg}")
    return wrong


def test_nothing_that_turns_data_into_code_is_used() -> None:
    assert not code_from_data()


def test_jinja_is_imported_in_one_module() -> None:
    users = {
        source.module
        for source in sources()
        for _, target in imports(source)
        if is_within(target, "jinja2")
    }
    assert users <= JINJA_HOMES


def test_only_wait_and_logits_synchronize_with_the_device() -> None:
    """In frameworks, only `PendingTokens.wait` and `logits` may read values from the device."""
    wrong = []
    for source in sources():
        if not any(is_within(source.module, f"engine.{each}") for each in FRAMEWORKS):
            continue
        allowed = {
            id(inner)
            for node in source.nodes
            if isinstance(node, ast.FunctionDef) and node.name in ("wait", "logits")
            for inner in ast.walk(node)
        }
        wrong += [
            f"{source.at(node)} calls .{node.func.attr}()"
            for node in source.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in SYNCS
            and id(node) not in allowed
        ]
    assert not wrong


def wall_clock_uses() -> list[str]:
    """Outside of the modules that write timestamps."""
    wrong = []
    for source in sources():
        if source.module in TIMESTAMP_MODULES:
            continue
        for node in source.nodes:
            by_name = isinstance(node, ast.ImportFrom) and node.module == "time"
            if by_name and {alias.name for alias in node.names} & {"time", "time_ns"}:
                wrong.append(source.at(node))
            if isinstance(node, ast.Attribute) and dotted(node) in ("time.time", "time.time_ns"):
                wrong.append(source.at(node))
    return wrong


def test_durations_do_not_use_the_wall_clock() -> None:
    assert not wall_clock_uses(), "use time.monotonic, or add the module to TIMESTAMP_MODULES"


@pytest.mark.parametrize("folder", ["engine", "tests", "benchmarks", "examples"])
def test_files_and_functions_stay_small(folder: str) -> None:
    large = []
    for source in sources(folder):
        num_lines = len(code_lines(source))
        if num_lines > MAX_FILE_LINES:
            large.append(f"{source.at(source.tree)} has {num_lines} lines of code")
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                is_kernel = ".kernels." in source.module
                if num_lines > (MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES):
                    large.append(f"{source.at(node)} {node.name} has {num_lines} lines")
    assert not large
