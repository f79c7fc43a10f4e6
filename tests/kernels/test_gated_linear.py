"""The gated GEMM in CUDA C++: which tiles it chooses, and that its source is complete."""

import pytest
import torch

from engine.torch.kernels.cuda.gated_linear import (
    ROWS,
    GatedLinearConfig,
    choose,
    source,
)
from engine.torch.kernels.gated_linear import fills_tiles

H200 = 132  # multiprocessors
SHARED_BYTES = 232_448  # that a block may have of a multiprocessor's memory
SIZES = [(rows, outputs) for rows in (65, 128, 129, 256, 8192) for outputs in (8192, 14336)]


@pytest.mark.parametrize(
    ("rows", "outputs", "columns"),
    [(128, 8192, 128), (128, 14336, 224), (256, 8192, 256), (256, 14336, 224)],
)
def test_chosen_tiles_keep_the_gpu_busy(rows: int, outputs: int, columns: int) -> None:
    """With other widths the last round of tiles leaves more of it idle."""
    config = choose(rows, outputs, H200)
    assert config == GatedLinearConfig(columns, cluster=-(-rows // ROWS))
    tiles = -(-outputs // (columns // 2)) * config.cluster
    assert tiles / (-(-tiles // H200) * H200) > 0.95


@pytest.mark.parametrize(("rows", "outputs"), SIZES)
def test_pipeline_buffers_fit_into_shared_memory(rows: int, outputs: int) -> None:
    assert choose(rows, outputs, H200).shared_bytes <= SHARED_BYTES - 256  # barriers


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_generated_cuda_source_defines_the_tile_sizes(name: str, dtype: torch.dtype) -> None:
    text = source(GatedLinearConfig(columns=224, cluster=2), dtype)
    assert "#define COLUMNS 224" in text and "#define CLUSTER 2" in text
    assert f"m64n224k16.f32.{name}.{name}" in text
    assert text.count('"+f"(sums[') == 112


@pytest.mark.parametrize(
    ("fused", "counts"),
    [(True, (65, 128, 224, 256, 448, 512, 768, 8192)), (False, (64, 136, 160, 192, 320, 576))],
)
def test_row_counts_that_waste_tiles_use_the_library_gemm(
    fused: bool, counts: tuple[int, ...]
) -> None:
    """On an H200 at the 8B shape: 98 us, the library's 68, at 136 rows; 180 and 115 at 288."""
    assert {fills_tiles(rows) for rows in counts} == {fused}
