"""Mutations of the runtime and of its fault containment: one for each invariant and guard."""

from tests.teeth.areas import all_areas
from tests.teeth.edge_mutations import EDGE
from tests.teeth.mutation import MACHINE, Mutation

RUNTIME = "engine.runtime"


def runtime(name: str, module: str, right: str, wrong: str, caught_by: str = MACHINE) -> Mutation:
    return Mutation(name, f"{RUNTIME}.{module}", right, wrong, caught_by)


FAULTS = "tests/unit/core/test_faults.py"
SCHEDULER_TESTS = "tests/unit/runtime/test_scheduler.py"
SECURITY = "tests/security"
WATCHDOG = "tests/unit/ipc/test_engine_watchdog.py"

INVARIANTS = [
    runtime(
        "INV-01 blocks leak",
        "kv_cache",
        "        self.pool.drop(seq.blocks)\n",
        "        self.pool.drop(seq.blocks[1:])\n",
    ),
    runtime(
        "INV-01 a lost admission keeps its blocks",
        "scheduler",
        "            self.kv.release(seq)\n            raise SequenceFaultError(seq) from error\n",
        "            raise SequenceFaultError(seq) from error\n",
        f"{FAULTS}::test_blocks_of_a_failed_admission_are_released",
    ),
    runtime(
        "INV-02 a holder is not counted",
        "block_pool",
        "            self._refs[block] = refs + 1\n",
        "            self._refs[block] = refs\n",
    ),
    runtime(
        "INV-03 freed twice",
        "block_pool",
        "            if refs == 0:\n                self._free.append(block)\n",
        "            if refs == 0:\n                self._free += [block, block]\n",
    ),
    runtime(
        "INV-04 the null block is handed out",
        "block_pool",
        "list(range(num_blocks - 1, NULL_BLOCK, -1))",
        "list(range(num_blocks - 1, NULL_BLOCK - 1, -1))",
    ),
    runtime(
        "INV-05 release is not idempotent",
        "kv_cache",
        "        seq.blocks = []\n        for each in self.groups:\n",
        "        for each in self.groups:\n",
    ),
    runtime(
        "INV-06 a block is mentioned twice",
        "kv_cache",
        "        seq.blocks.extend(self.pool.take(needed))\n",
        "        seq.blocks.extend(self.pool.take(needed) * 2)\n",
    ),
    runtime(
        "INV-07 INV-17 all of a prompt is taken from the cache",
        "kv_cache",
        "self.radix.match(seq.namespace, seq.tokens[:-1])",
        "self.radix.match(seq.namespace, seq.tokens)",
    ),
    runtime(
        "INV-08 tokens go to the wrong place",
        "batch",
        "        offsets = positions % size\n",
        "        offsets = (positions + 1) % size\n",
    ),
    runtime(
        "INV-09 a table is not brought up to date",
        "batch",
        "if lives[slot] != life or rooms[slot] != seq.room:",
        "if lives[slot] != life:",
    ),
    runtime(
        "INV-10 blocks are published before they are confirmed",
        "kv_cache",
        "        self._publish(seq, seq.num_confirmed, only_own=False)\n",
        "        self._publish(seq, min(seq.num_computed, len(seq.tokens)), only_own=False)\n",
    ),
    runtime(
        "INV-10 a row that is not finite is confirmed",
        "scheduler",
        "            if not finite[index] and not draft:\n",
        "            if not finite[index] and not draft:\n"
        "                seq.num_confirmed = start + length\n",
    ),
    runtime(
        "INV-11 a split forgets what is above it",
        "radix_cache",
        "        upper.children[node.tokens[:size].tobytes()] = node\n",
        "        upper.children[upper.tokens[:size].tobytes()] = node\n",
    ),
    runtime(
        "INV-12 a match ends too soon",
        "radix_cache",
        "            yield node, common\n",
        "            yield node, max(1, common - 1)\n",
    ),
    runtime(
        "INV-12 a match goes too far",
        "radix_cache",
        "        return 1 + bisect_left(\n",
        "        return 2 + bisect_left(\n",
    ),
    runtime(
        "INV-13 published below another's block while running",
        "radix_cache",
        "            if only_own and child.blocks",
        "            if False and child.blocks",
        "tests/unit/runtime/test_radix_cache.py"
        "::test_a_running_sequence_is_not_inserted_below_anothers_block",
    ),
    runtime(
        "INV-14 evictable blocks are counted wrong",
        "block_pool",
        "                self.num_evictable -= 1\n            self._refs[block] = refs + 1",
        "                pass\n            self._refs[block] = refs + 1",
    ),
    runtime(
        "INV-14 held blocks are evicted",
        "radix_cache",
        "while freed < count and node.blocks and self._pool.refs(node.blocks[-1]) == 1:",
        "while freed < count and node.blocks:",
    ),
    runtime(
        "INV-14 a leaf that could not be published is never evicted",
        "kv_cache",
        "            self.radix.find_leaves()\n",
        "",
        f"{FAULTS}::test_blocks_of_a_sequence_that_failed_to_publish_can_be_evicted",
    ),
    runtime(
        "INV-15 inserted again",
        "radix_cache",
        "            if child is None:\n                break\n",
        "            if True:\n                break\n",
    ),
    runtime(
        "INV-16 tenants share",
        "kv_cache",
        "            self.radix.insert(seq.namespace, tokens, blocks",
        '            self.radix.insert("", tokens, blocks',
    ),
    runtime(
        "INV-18 the gone are remembered",
        "sequence_table",
        "        choices.remove(seq)\n        if not choices:\n            del",
        "        if not choices:\n            del",
    ),
    runtime(
        "INV-19 over the budget",
        "scheduler",
        "min(len(seq.tokens) - start, budget))",
        "len(seq.tokens) - start)",
    ),
    runtime(
        "INV-20 last come, first served",
        "sequence_table",
        "insort(line, seq, key=_urgency)",
        "insort(line, seq, key=lambda s: -s.arrival)",
        "tests/unit/runtime/test_fair_share.py::test_a_single_tenant_is_served_first_come_first_served",
    ),
    runtime(
        "INV-20 INV-21 held for ever",
        "sequence_table",
        "        seq.queue.held_by = None\n        return False\n",
        "        return owner is not None\n",
    ),
    runtime(
        "INV-22 what can't fit is queued",
        "kv_cache",
        "        return self._blocks_for(num_tokens) <= self.pool.num_usable\n",
        "        return True\n",
    ),
    runtime(
        "INV-23 never pinned",
        "sequence",
        "        return self.queue.num_preemptions >= MAX_PREEMPTIONS\n",
        "        return False\n",
        f"{SCHEDULER_TESTS}::test_after_max_preemptions_a_sequence_gets_all_blocks_it_can_need",
    ),
    runtime(
        "INV-24 a request is kept while its grammar compiles",
        "requests.admission",
        "        if not pending.choices:\n            del self.pending.requests[request_id]\n",
        "",
    ),
    runtime(
        "INV-25 a repeated step forgets the history of its rows",
        "batch",
        "        self._has_history = [False] * len(self._has_history)\n",
        "",
        f"{FAULTS}::test_a_failing_batch_stage_fails_no_request",
    ),
    runtime(
        "INV-25 a rollback keeps what was not confirmed",
        "scheduler",
        "            seq.num_sampling = 0\n            seq.num_computed = seq.num_confirmed\n",
        "            seq.num_sampling = 0\n",
    ),
    runtime(
        "INV-27 two endings",
        "scheduler",
        "            if seq.finish_reason is not None:\n                continue\n",
        "            if seq.finish_reason == 'x':\n                continue\n",
    ),
    runtime(
        "INV-28 draws depend on the slot",
        "batch",
        "        self._seed[slot] = seq.seed\n",
        "        self._seed[slot] = seq.seed + slot\n",
    ),
    runtime(
        "INV-29 a failing step fails all of its rows",
        "recovery",
        "            if len(granted) == 1:\n",
        "            if True:\n",
        "tests/unit/runtime/test_seam_toy.py::test_a_row_that_crashes_the_step_is_found_and_fails_alone",
    ),
    runtime(
        "INV-30 masks are ignored",
        "loop",
        "        sampling = self._builder.sampling(batch, mask)\n",
        "        sampling = self._builder.sampling(batch, None)\n",
    ),
]

GUARDS = [
    runtime(
        "FLT-02 a row's failure ends the step",
        "scheduler",
        "            except Exception:\n                deltas.append(self._fail_row(seq, now))\n",
        "            except ZeroDivisionError:\n                pass\n",
        f"{FAULTS}::test_a_failing_per_request_stage_fails_one_request",
    ),
    runtime(
        "FLT-02 a failed allocation ends the engine",
        "scheduler",
        "        except Exception as error:\n"
        "            raise SequenceFaultError(seq) from error\n\n",
        "        except ZeroDivisionError as error:\n"
        "            raise SequenceFaultError(seq) from error\n\n",
        f"{FAULTS}::test_a_request_whose_blocks_are_never_allocated_fails_alone",
    ),
    runtime(
        "FLT-02 a request that can't be taken in ends the engine",
        "loop",
        '        except Exception:\n            log.exception("request %s could not be submitted"',
        '        except ZeroDivisionError:\n            log.exception("request %s could not be"',
        f"{FAULTS}::test_a_failing_per_request_stage_fails_one_request",
    ),
    Mutation(
        "FLT-03 a frozen process counts as well",
        "engine.core.sandbox.liveness",
        "            silent_s=max(0, now_ns - tick_ns) / 1e9 if tick_ns else None,\n",
        "            silent_s=None,\n",
        f"{WATCHDOG}::test_an_idle_frozen_engine_is_detected_and_continues_after_sigcont",
    ),
    Mutation(
        "FLT-04 a slow step counts as frozen",
        "engine.core.sandbox.liveness",
        "    if vitals.silent_s is not None and vitals.silent_s > FROZEN_AFTER_S:\n",
        "    if (vitals.step_age_s or 0) > FROZEN_AFTER_S:\n",
        f"{WATCHDOG}::test_a_slow_step_raises_no_alarm",
    ),
    Mutation(
        "FLT-06 an engine that died is not started again",
        "engine.frontend.engine_link",
        "            self._restart_later()  # an engine",
        "            pass  # an engine",
        "tests/unit/ipc/test_engine_link.py::"
        "test_killing_the_engine_ends_its_requests_and_the_next_engine_works",
    ),
    Mutation(
        "FLT-06 open requests are not told of a death",
        "engine.frontend.request_recovery",
        "        opened.receiver.deliver(error)\n",
        "        pass\n",
        "tests/unit/ipc/test_engine_link.py::"
        "test_killing_the_engine_ends_its_requests_and_the_next_engine_works",
    ),
    Mutation(
        "FLT-08 a broken stream ends as if it were complete",
        "engine.servers.serving.sse",
        "            await writer.write(self._format.failure(opaque), more=False)\n",
        "            await writer.write(DONE, more=False)\n",
        f"{FAULTS}::test_a_stream_write_failure_ends_with_an_error_event",
    ),
    Mutation(
        "FLT-10 a place is not given back",
        "engine.servers.serving.admission",
        "        self.num_admitted -= count\n",
        "        self.num_admitted -= 0\n",
        "tests/unit/servers/serving/test_server_admission.py::test_a_failed_request_releases_its_admission_slot",
    ),
    runtime(
        "FLT-10 who can not begin waits for ever",
        "requests.admission",
        "if not entry.is_end and any(seq.has_started for seq in entry.choices):",
        "if not entry.is_end:",
        f"{SCHEDULER_TESTS}::test_queue_timeout_refuses_waiting_requests_and_not_started_ones",
    ),
    runtime(
        "FLT-10 a request's choices time out behind each other",
        "requests.admission",
        "any(seq.has_started for seq in entry.choices)",
        "entry.choices[-1].has_started",
        f"{SCHEDULER_TESTS}::test_a_request_has_started_with_its_first_choice",
    ),
    Mutation(
        "FLT-19 a tokenizer of another model is taken",
        "engine.frontend.text_model",
        "    _check_vocabulary(config, tokenizer)\n",
        "    pass\n",
        f"{SECURITY}/files/test_tokenizer_files.py::test_a_tokenizer_that_does_not_fit_the_weights_is_refused",
    ),
    Mutation(
        "FLT-23 a full disk tears a line",
        "engine.core.sandbox.private_files",
        "        os.ftruncate(handle, size)\n",
        "        pass\n",
        f"{SECURITY}/requests/test_full_disk.py",
    ),
    Mutation(
        "SEC-22 a user's key administers",
        "engine.servers.access.auth",
        '            raise ForbiddenError("This key is not the administrator\'s.")\n',
        "            return\n",
        f"{SECURITY}/access/test_admin_auth.py::test_a_client_key_opens_no_admin_route",
    ),
    Mutation(
        "SEC-27 a page deletes",
        "engine.servers.access.auth",
        '_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})\n',
        '_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})\n',
        f"{SECURITY}/access/test_admin_auth.py::test_cross_origin_requests_change_nothing_on_any_route",
    ),
    runtime(
        "SEC-31 a flood pushes out another's prefixes",
        "radix_cache",
        "        return self.by_tenant[tenant] * len(self._present) <= self._total\n",
        "        return False\n",
        f"{SECURITY}/access/test_tenant_cache.py::test_a_flood_leaves_another_tenant_its_cache_share",
    ),
    Mutation(
        "FLT-11 a client that does not read is kept",
        "engine.servers.serving.sse",
        "            self._task.cancel()\n",
        "            pass\n",
        "tests/unit/servers/test_server_sockets.py::test_a_client_that_stops_reading_is_disconnected",
    ),
    runtime(
        "FLT-14 what is not finite is drawn from",
        "scheduler",
        "            if not finite[index] and not draft:\n",
        "            if False:\n",
    ),
    runtime(
        "FLT-15 a step too large for memory stays as large",
        "budget",
        "        self._max_tokens = max(self._max_slots, self._max_tokens // 2)\n",
        "        pass\n",
        f"{FAULTS}::test_an_out_of_memory_step_is_halved_and_later_steps_stay_small",
    ),
    Mutation(
        "faults are armed without their guard",
        "engine.core.faults",
        "    if environ.get(GUARD_VARIABLE) != GUARD:\n",
        "    if environ.get(GUARD_VARIABLE) == 'x':\n",
        f"{FAULTS}::test_environment_faults_need_the_guard_variable",
    ),
    Mutation(
        "a plan ends and its wrappers stay",
        "engine.core.faults",
        "            setattr(owner, name, original)\n",
        "            pass\n",
        f"{FAULTS}::test_wrapped_functions_are_restored_when_the_fault_plan_ends",
    ),
    Mutation(
        "what is imported later is not wrapped",
        "engine.core.faults",
        "            execute(module)\n            self._wrap(fullname, module)\n",
        "            execute(module)\n",
        f"{FAULTS}::test_arming_faults_imports_nothing_and_wraps_later_imports",
    ),
]

MUTATIONS = {each.name: each for each in INVARIANTS + GUARDS + EDGE + all_areas()}
