"""The memory plan: what fits is used; what does not is cut and said, or refused."""

from dataclasses import replace

import pytest

from engine.architectures.base import LayerConfig, ModelConfig, RopeConfig
from engine.core.errors import ResourceError
from engine.ipc.options import EngineOptions
from engine.native.execution.allocation import (
    HUGE_PAGE_BYTES,
    on_huge_pages,
)
from engine.runtime.groups.windows import min_window_blocks
from engine.runtime.model_runner import DeviceInfo
from engine.worker.memory import (
    MIB,
    MIN_CONTEXT,
    WORKSPACE_BYTES,
    MemoryNeeds,
    MemoryPlan,
    dense_needs,
    on_gpu,
    plan_memory,
    with_windows,
)
from engine.worker.training_memory import training_bytes

CONFIG = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    max_position=2048,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope=RopeConfig(theta=1e4, dim=64),
)
OPTIONS = EngineOptions(model_path="x", framework="torch", max_slots=8)


def planned(config, options, dtype, available, copies_tied_head=False):
    """The plan of a framework that keeps everything as `dtype`."""
    device = DeviceInfo("cpu", dtype, available, copies_tied_head)
    return plan_memory(config.max_position, options, device, dense_needs(config, device))


def test_with_plenty_of_memory_everything_requested_is_granted():
    plan = planned(CONFIG, OPTIONS, "float32", 10**11)
    assert (plan.max_slots, plan.max_seq_len, plan.notes) == (8, 2048, ())
    assert plan.bytes_per_token == 2 * 4 * 2 * 64 * 4
    assert (plan.num_blocks - 1) * 16 >= 8 * 2048 - 16


def test_half_the_bytes_per_value_hold_twice_the_tokens():
    options = replace_options(pool_bytes=64 * MIB)
    wide = planned(CONFIG, options, "float32", 10**11)
    narrow = planned(CONFIG, options, "bfloat16", 10**11)
    assert abs(narrow.num_blocks - 2 * wide.num_blocks) <= 1


def test_a_small_pool_shrinks_batch_then_context_with_notes():
    options = replace_options(pool_bytes=700 * 4096)
    plan = planned(CONFIG, options, "float32", 10**11)
    assert plan.max_slots < 8 and plan.max_seq_len < 2048
    assert (plan.num_blocks - 1) * 16 >= plan.max_seq_len
    assert any("batch is" in note for note in plan.notes)
    assert any("context is" in note for note in plan.notes)


def test_a_pool_too_small_for_a_short_context_is_refused_with_the_needed_size():
    block = 16 * planned(CONFIG, OPTIONS, "float32", 10**11).bytes_per_token
    least = (MIN_CONTEXT // 16 + 1) * block
    assert planned(CONFIG, replace_options(pool_bytes=least), "float32", 10**11)
    with pytest.raises(ResourceError, match="at least 1 MiB .*memory_pool_size_mb"):
        planned(CONFIG, replace_options(pool_bytes=least - 1), "float32", 10**11)


@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
@pytest.mark.parametrize("spare_blocks", [0, 1, 30, 5000])
def test_every_memory_plan_fits_and_serves_its_context(block_size, spare_blocks):
    options = replace_options(block_size=block_size)
    token_bytes = CONFIG.kv_bytes_per_token(4)
    least = (-(-MIN_CONTEXT // block_size) + 1) * block_size * token_bytes
    fixed = CONFIG.num_params * 4 + WORKSPACE_BYTES
    plan = planned(
        CONFIG, options, "float32", fixed + least + spare_blocks * block_size * token_bytes
    )
    assert plan.pool_bytes <= least + spare_blocks * block_size * token_bytes
    assert (plan.num_blocks - 1) * block_size >= plan.max_seq_len >= MIN_CONTEXT
    with pytest.raises(ResourceError):
        planned(CONFIG, options, "float32", fixed + least - 1)


def test_a_replicated_kv_head_is_counted():
    tied = planned(CONFIG, OPTIONS, "bfloat16", 10**11)
    copied = planned(CONFIG, OPTIONS, "bfloat16", 10**11, copies_tied_head=True)
    assert copied.weight_bytes - tied.weight_bytes == 1000 * 256 * 2
    untied = replace(CONFIG, tie_embeddings=False)
    plan = planned(untied, OPTIONS, "bfloat16", 10**11, copies_tied_head=True)
    assert plan.weight_bytes == untied.num_params * 2


def test_a_requested_pool_is_cut_to_free_memory():
    options = replace_options(pool_bytes=10**12)
    available = CONFIG.num_params * 4 + WORKSPACE_BYTES + 100 * MIB
    plan = planned(CONFIG, options, "float32", available)
    assert plan.pool_bytes <= 100 * MIB
    assert "no more memory is free" in plan.notes[0]


def test_a_requested_context_is_cut_to_the_models_own():
    plan = planned(CONFIG, replace_options(max_seq_len=4096), "float32", 10**11)
    assert plan.max_seq_len == 2048 and "the model's own" in plan.notes[0]


def test_a_model_too_large_for_memory_is_refused_with_advice():
    large = replace(CONFIG, num_layers=400)
    between = large.num_params * 3 + WORKSPACE_BYTES
    with pytest.raises(ResourceError, match="--dtype bfloat16"):
        planned(large, OPTIONS, "float32", between)
    with pytest.raises(ResourceError, match="parameters would fit"):
        planned(large, OPTIONS, "bfloat16", WORKSPACE_BYTES + 20 * MIB)


def replace_options(**changes) -> EngineOptions:
    import msgspec

    return msgspec.structs.replace(OPTIONS, **changes)


@pytest.mark.parametrize(("usual", "tokens"), [(1, 2048), (64 * MIB, 64 * MIB // 4096)])
def test_the_default_pool_holds_at_least_one_full_context(usual, tokens):
    device = DeviceInfo("cpu", "stored", 10**11)
    plan = plan_memory(CONFIG.max_position, OPTIONS, device, MemoryNeeds(10**6, 4096, usual))
    assert tokens - 32 <= (plan.num_blocks - 1) * 16 <= tokens
    assert plan.max_seq_len == 2048


def test_a_framework_states_its_workspace_and_pool_share():
    device = DeviceInfo("cuda", "bfloat16", 10**9)
    options = replace_options(max_seq_len=2048, max_slots=4096)
    needs = dense_needs(CONFIG, device)
    usual = plan_memory(CONFIG.max_position, options, device, needs)
    shared = replace(needs, workspace_bytes=300 * MIB, pool_share=1.0)
    greedy = plan_memory(CONFIG.max_position, options, device, shared)
    assert usual.pool_bytes < greedy.pool_bytes
    assert greedy.weight_bytes + greedy.pool_bytes + 300 * MIB <= 10**9


def windowed(num_layers: int = 6, window: int = 512, full_every: int = 6) -> ModelConfig:
    """Gemma 3: five layers with a sliding window, then one without. 0: all have one."""
    rope = CONFIG.rope
    layers = tuple(
        LayerConfig(None if full_every and (i + 1) % full_every == 0 else window, rope, False)
        for i in range(num_layers)
    )
    return replace(CONFIG, num_layers=num_layers, layers=layers, max_position=32_768)


def plans(config: ModelConfig, **changes) -> tuple[MemoryPlan, MemoryPlan]:
    """The plan of a framework that keeps all blocks, and that of one that frees them."""
    options = replace_options(**changes)
    device = DeviceInfo("cpu", "float32", 10**11)
    needs = dense_needs(config, device)
    freeing = with_windows(needs, config, max_step_tokens=512)
    return tuple(
        plan_memory(config.max_position, options, device, each) for each in (needs, freeing)
    )


def test_the_same_memory_holds_more_tokens_if_windowed_blocks_are_freed():
    config = windowed()
    together, apart = plans(config, pool_bytes=200 * MIB, max_slots=4)
    assert apart.pool_bytes <= 200 * MIB
    assert together.num_window_blocks == 0
    assert apart.num_blocks > 4 * together.num_blocks
    per_block = config.kv_bytes_per_token(4) * 16 // 6
    assert apart.pool_bytes == per_block * (apart.num_blocks + 5 * apart.num_window_blocks)
    # Each of the four sequences has a window, a cached prefix has one, and a step has room.
    assert apart.num_window_blocks * 16 >= 4 * (512 + 512) + 2 * 512
    assert any("sliding window" in line for line in apart.lines())


def test_a_pool_for_one_context_keeps_fewer_windowed_blocks():
    together, apart = plans(windowed(), pool_bytes=100 * MIB, max_slots=64)
    assert together.max_seq_len < apart.max_seq_len == 32_768
    window_blocks = min_window_blocks(512, 16, 512)
    assert window_blocks < apart.num_window_blocks < 64 * 2 * min_window_blocks(512, 16, 1)


def test_the_default_pool_has_a_context_and_some_windows():
    config = windowed()
    options, device = replace_options(max_slots=64), DeviceInfo("cpu", "float32", 10**11)
    needs = with_windows(dense_needs(config, device), config, max_step_tokens=512)
    plan = plan_memory(config.max_position, options, device, replace(needs, usual_pool_bytes=1))
    assert plan.max_seq_len == 32_768 and plan.max_slots == 64
    assert 8 * 2 * 512 < plan.num_window_blocks * 16 < 12 * 2 * 512
    assert plan.pool_bytes < 32_768 * config.kv_bytes_per_token(4) // 2


def test_models_with_only_windowed_layers_serve_any_length():
    together, apart = plans(windowed(full_every=0), pool_bytes=64 * MIB, max_slots=4)
    assert apart.pool_bytes <= 64 * MIB and apart.num_window_blocks > 64
    assert together.max_seq_len < apart.max_seq_len == 32_768
    assert (apart.num_blocks - 1) * 16 >= 4 * 32_768


@pytest.mark.parametrize("changes", [{"max_seq_len": 512}, {"pool_bytes": 10 * MIB}])
def test_windows_that_save_nothing_share_one_pool(changes):
    together, apart = plans(windowed(), **changes)
    assert apart == together


@pytest.mark.parametrize("window", [1, 17, 512, 5000])
@pytest.mark.parametrize("pool", [20 * MIB, 60 * MIB, 300 * MIB, 2000 * MIB])
@pytest.mark.parametrize("full_every", [0, 2, 6])
def test_every_windowed_memory_plan_fits(window, pool, full_every):
    config = windowed(window=window, full_every=full_every)
    _, plan = plans(config, pool_bytes=pool, max_slots=16)
    assert plan.pool_bytes <= pool
    if plan.num_window_blocks:
        assert plan.num_window_blocks > min_window_blocks(window, 16, 512)
        assert plan.num_window_blocks <= plan.num_blocks


def test_training_on_the_same_gpu_gets_memory_beside_the_pool():
    def pool(free_bytes=16 * 2**30, **options):
        device = DeviceInfo("cuda", "bfloat16", free_bytes)
        changed = replace_options(max_slots=4096, **options)
        needs = on_gpu(dense_needs(CONFIG, device), CONFIG, changed, device)
        return plan_memory(CONFIG.max_position, changed, device, needs).pool_bytes

    alone, gib = pool(), 2**30
    assert pool(training_device="cuda:1") == alone
    asked = pool(training_device="cuda:0", training_bytes=8 * gib)
    assert alone - asked == pytest.approx(8 * gib, rel=0.01)
    usual = pool(training_device="cuda")
    assert alone - usual == pytest.approx(training_bytes(CONFIG), rel=0.01)
    assert pool(gib, training_device="cuda") < pool(gib) / 1.8  # at most half of the memory
    with pytest.raises(
        ResourceError, match="finetuning.memory_mb is 65,536, and the weights leave"
    ):
        pool(training_device="cuda", training_bytes=64 * gib)


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "is_large"),
    [(15_700, 12_288, True), (512, 12_288, True), (511, 12_288, False), (70_000, 17_152, True)],
)
def test_each_layer_of_a_large_native_kv_cache_starts_at_a_huge_page(
    num_blocks, block_bytes, is_large
):
    allocated = on_huge_pages(num_blocks, block_bytes)
    assert num_blocks <= allocated < 2 * num_blocks
    assert (allocated * block_bytes % HUGE_PAGE_BYTES == 0) == is_large
