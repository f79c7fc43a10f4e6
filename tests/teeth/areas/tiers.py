"""Mistakes in the tiers of the prefix cache: keys, checksums, order of writes, waiting."""

from tests.teeth.mutation import Mutation

TIERS = "engine.runtime.tiers"
ENGINE_TESTS = "tests/unit/runtime/tiers/test_tiers.py"
RECORD_TESTS = "tests/unit/runtime/tiers/test_tiers_records.py"
WRONG_RECORDS = f"{RECORD_TESTS}::test_ten_thousand_damaged_records_are_all_detected"
KEY_TESTS = f"{RECORD_TESTS}::test_every_part_of_a_block_key_changes_it"

MUTATIONS = [
    Mutation(
        "tiers: a stale key, which does not cover the model",
        f"{TIERS}.record",
        "hashlib.sha256(identity + text.encode())",
        "hashlib.sha256(text.encode())",
        KEY_TESTS,
    ),
    Mutation(
        "tiers: the tenant's salt is missing in the key",
        f"{TIERS}.record",
        'text = f"{len(salt)}:{salt}{adapter}"',
        'text = f"{adapter}"',
        f"{ENGINE_TESTS}::test_tenants_do_not_share_blocks",
    ),
    Mutation(
        "tiers: a key does not cover the tokens before its block",
        f"{TIERS}.record",
        "hashlib.sha256(parent + tokens)",
        "hashlib.sha256(tokens)",
        KEY_TESTS,
    ),
    Mutation(
        "tiers: a block has its name before it is written",
        f"{TIERS}.disk",
        'part = path.with_name(f"{path.name}.{os.getpid()}{PART_SUFFIX}")',
        "part = path",
        f"{RECORD_TESTS}::test_a_block_file_appears_only_when_it_is_complete",
    ),
    Mutation(
        "tiers: the last piece of a block has no checksum",
        f"{TIERS}.record",
        "for index, expected in enumerate(header.checksums):",
        "for index, expected in enumerate(header.checksums[:-1]):",
        WRONG_RECORDS,
    ),
    Mutation(
        "tiers: a record of another model is taken",
        f"{TIERS}.record",
        "if header.identity != identity:",
        "if False:",
        WRONG_RECORDS,
    ),
    Mutation(
        "tiers: a renamed record is taken",
        f"{TIERS}.record",
        "if header.place != place or",
        "if",
        WRONG_RECORDS,
    ),
    Mutation(
        "tiers: blocks are loaded although computing them is faster",
        f"{TIERS}.offload_worker",
        "if load_s < job.block_s * count:",
        "if True:",
        f"{ENGINE_TESTS}::test_blocks_are_recomputed_if_that_is_faster_than_loading",
    ),
    Mutation(
        "tiers: a tier that failed is read again at once",
        f"{TIERS}.health",
        "return not self._reading.is_open",
        "return True",
        f"{ENGINE_TESTS}::test_a_failing_tier_costs_only_its_blocks",
    ),
    Mutation(
        "tiers: the prefix that loaded blocks continue is evicted for them",
        "engine.runtime.kv_cache",
        "        self.pool.share(cached)\n        new",
        "        cached = []\n        new",
        f"{ENGINE_TESTS}::test_loading_blocks_does_not_evict_the_prefix_they_continue",
    ),
    Mutation(
        "tiers: a sequence waits for blocks that nobody takes",
        f"{TIERS}.kv_tiers",
        "if is_taken and (job.ready",
        "if (job.ready",
        f"{ENGINE_TESTS}::test_a_sequence_continues_if_the_one_loading_its_blocks_is_aborted",
    ),
    Mutation(
        "tiers: the blocks of done jobs are not counted",
        f"{TIERS}.offload_worker",
        "return sum(job.ahead_bytes for job in self._kept)",
        "return sum(job.ahead_bytes for job in self._reads)",
        f"{ENGINE_TESTS}::test_loaded_blocks_not_yet_used_are_bounded",
    ),
    Mutation(
        "tiers: more blocks than the queue has room for are never stored",
        f"{TIERS}.kv_tiers",
        "        if not new:\n            return\n        first",
        "        return\n        first",
        f"{ENGINE_TESTS}::test_blocks_that_do_not_fit_in_the_queue_are_stored_later",
    ),
    Mutation(
        "tiers: tiers that are given up keep their threads",
        "engine.runtime.tiers.kv_tiers",
        "            self._end_all(gives_up=True)\n",
        "            pass\n",
        f"{ENGINE_TESTS}::test_disabled_tiers_have_no_threads",
    ),
]
