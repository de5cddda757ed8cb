"""What is broken, and which tests should see it: one line at a seam each.

An anchor is a text that occurs once in its file. Whoever changes that line changes the mutant with it.
"""

from __future__ import annotations

from tests.mutants.runs import Mutant

__all__ = ["MUTANTS"]

_BUS, _ENGINE, _SDK = "bus/tracewire_bus", "engine_adapter/tracewire_engine", "sdk/tracewire"

_CHAT = "tests/examples/test_chat_backend.py"
_EXAMPLES = "tests/examples/test_examples.py"
_CHECKER = "tests/faults/test_checker.py"
_TRACES_CONTROL = "tests/unit/tracewire/traces/test_control.py"
_ENDING = "tests/unit/tracewire/traces/test_ending.py"
_MODEL_CHECKS = "tests/unit/tracewire/traces/test_model_checks.py"
_PRESENCE = "tests/unit/tracewire/traces/test_presence.py"
_SUBSCRIPTION = "tests/unit/tracewire/traces/test_subscription.py"
_TRACE = "tests/unit/tracewire/traces/test_trace.py"
_HARVEST = "tests/unit/tracewire/harvest/test_"
_FOLD = "tests/unit/tracewire_bus/domain/test_fold.py"
_APPENDS = "tests/unit/tracewire_bus/events/test_appends.py"
_DEFERRED = "tests/unit/tracewire_bus/events/test_deferred.py"
_READER = "tests/unit/tracewire_bus/events/test_reader.py"
_RESTORE = "tests/unit/tracewire_bus/events/test_restore.py"
_EVENTS_SUBSCRIPTION = "tests/unit/tracewire_bus/events/test_subscription.py"
_WRITER = "tests/unit/tracewire_bus/events/test_writer.py"
_STORE_BLOBS = "tests/unit/tracewire_bus/store/test_blobs.py"
_DEAD_LETTERS = "tests/unit/tracewire_bus/store/test_dead_letters.py"
_STORE_INTAKE = "tests/unit/tracewire_bus/store/test_intake.py"
_STORE_LEASES = "tests/unit/tracewire_bus/store/test_leases.py"
_LIFECYCLE = "tests/unit/tracewire_bus/store/test_lifecycle.py"
_SNAPSHOTS = "tests/unit/tracewire_bus/store/test_snapshots.py"
_SUBMISSION_QUEUE = "tests/unit/tracewire_bus/store/test_submission_queue.py"
_TRACE_RECORDS = "tests/unit/tracewire_bus/store/test_trace_records.py"
_COLUMNS = "tests/unit/tracewire_bus/wire/test_columns.py"
_WATCH_GROUPS = "tests/unit/tracewire_bus/store/test_watch_groups.py"
_RECOVERY = "tests/unit/tracewire_bus/test_recovery.py"
_BLOCK_SOURCES = "tests/unit/tracewire_engine/adapter/test_block_sources.py"
_INTAKE = "tests/unit/tracewire_engine/adapter/test_intake.py"
_LEASES = "tests/unit/tracewire_engine/adapter/test_leases.py"
_LEASES_ENGINE_LOSS = "tests/unit/tracewire_engine/adapter/test_leases_engine_loss.py"
_LIVE_CHANGES = "tests/unit/tracewire_engine/adapter/test_live_changes.py"
_READ_DECODER = "tests/unit/tracewire_engine/adapter/test_read_decoder.py"
_SERVICE_REDIS_LOSS = "tests/unit/tracewire_engine/adapter/test_service_redis_loss.py"
_TRACE_LAG = "tests/unit/tracewire_engine/adapter/test_trace_lag.py"
_SPANS = "tests/unit/tracewire_engine/adapter/test_trace_spans.py::test_"
_STEP_LINK = "tests/unit/tracewire_engine/link/test_step_link.py"
_TRACE_END = "tests/unit/tracewire_engine/adapter/test_trace_end.py"
_TAPS = "tests/unit/tracewire_engine/worker/declared"
_TRACE_RUN = "tests/unit/tracewire_engine/adapter/test_trace_run.py"
_VALIDATION = "tests/unit/tracewire_engine/adapter/test_validation.py"
_VECTOR_FILES = "tests/unit/tracewire_engine/adapter/test_vector_files.py"
_VECTORS = "tests/unit/tracewire_bus/store/test_vectors.py"
_BATCHED_SERVING = "tests/unit/tracewire_engine/worker/blocks/test_batched_serving.py"
_DECLARED_PLAN = "tests/unit/tracewire_engine/worker/declared/test_plan.py"
_FINISHING = "tests/unit/tracewire_engine/worker/test_finishing.py"
_RUNNER = "tests/unit/tracewire_engine/worker/test_runner.py"
_SAVES = "tests/unit/tracewire_engine/worker/test_save_tracker.py"


def _of(path: str, name: str, old: str, new: str, *tests: str, engine: bool = False, hangs: bool = False) -> Mutant:
    return Mutant(name, path, old, new, tests, engine, hangs)


MUTANTS = (
    # --- what a consumer folds ----------------------------------------------------------------------------------------
    _of(
        f"{_BUS}/domain/fold.py",
        "a-delta-is-folded-twice",
        "target.extend([_copy(item) for item in delta.items])",
        "target.extend([_copy(item) for item in [*delta.items, *delta.items]])",
        _FOLD + "::test_a_whole_trace",
    ),
    _of(
        f"{_BUS}/domain/fold.py",
        "a-gap-is-folded-over",
        "event.seq != (0 if newer else self.seq + 1)",
        "event.seq < (0 if newer else self.seq + 1)",
        _FOLD + "::test_what_does_not_follow_is_refused",
    ),
    _of(
        f"{_BUS}/domain/fold.py",
        "a-save-that-never-came-is-not-missed",
        "wanted.keys() | held.keys()",
        "wanted.keys() & held.keys()",
        _FOLD + "::test_verifying_names_what_differs",
    ),
    _of(
        f"{_BUS}/domain/fold.py",
        "a-restart-keeps-the-lost-attempts-state",
        "    def _start_over(self) -> None:\n        self.choices = {}",
        "    def _start_over(self) -> None:\n        self.choices = self.choices",
        _FOLD + "::test_restarting_starts_over",
    ),
    _of(
        f"{_BUS}/wire/digests.py",
        "a-digest-skips-dtype-and-shape",
        '    state = hashlib.blake2b(b"a", digest_size=16)\n    state.update(msgspec.msgpack.encode((dtype, shape)))',
        '    state = hashlib.blake2b(b"a", digest_size=16)',
        _STORE_BLOBS + "::test_what_is_stored_is_loaded",
    ),
    # --- a trace's stream ---------------------------------------------------------------------------------------------
    _of(
        f"{_BUS}/wire/ids.py",
        "a-final-has-an-ordinary-id",
        "return FINAL_ID if final else f",
        "return f",
        _WRITER + "::test_a_stale_attempt_is_fenced_and_so_is_everything_after_the_final",
    ),
    _of(
        f"{_BUS}/lua/shared/append.lua",
        "a-stale-attempt-is-not-fenced",
        "> tonumber(attempt) then",
        "> 1e18 then",
        _TRACE_RECORDS + "::test_what_follows_a_refused_event_is_refused_too",
    ),
    _of(
        f"{_BUS}/lua/shared/stream.lua",
        "an-event-overtakes-one-that-was-refused",
        "return last and last[1] == id",
        "return true",
        _APPENDS + "::test_what_follows_an_event_that_is_not_there_is_refused",
    ),
    _of(
        f"{_BUS}/events/writer.py",
        "a-lost-answer-is-taken-for-a-refusal",
        "                    item.repeated = True",
        "                    item.repeated = False",
        _WRITER + "::test_an_append_whose_answer_was_lost_succeeds_once",
    ),
    _of(
        f"{_BUS}/lua/append_lost.lua",
        "a-redis-that-came-back-lacks-an-event",
        "for index = from, #ARGV, STEP do",
        "for index = from + STEP, #ARGV, STEP do",
        _SERVICE_REDIS_LOSS + "::test_what_a_killed_redis_lost_is_appended_again",
    ),
    _of(
        f"{_BUS}/events/batches.py",
        "what-waited-for-memory-comes-in-reverse",
        "stream.stuck.extendleft(reversed(items))",
        "stream.stuck.extendleft(items)",
        _DEFERRED + "::test_what_was_refused_together_comes_in_order",
    ),
    _of(
        f"{_BUS}/events/appends.py",
        "an-ended-trace-keeps-its-queue-entry",
        "                commands.append(item.settle)",
        "                pass",
        _SUBMISSION_QUEUE + "::test_an_entry_may_be_settled_with_its_final",
    ),
    _of(
        f"{_BUS}/lua/append_final.lua",
        "an-ended-traces-record-never-expires",
        "for _, name in ipairs({events, blobs, key, snapshot}) do",
        "for _, name in ipairs({events, blobs, snapshot}) do",
        _WRITER + "::test_the_final_lets_the_trace_expire",
    ),
    _of(
        f"{_BUS}/events/reader.py",
        "only-one-consumer-is-served",
        "        for subscription in stream.subscriptions():\n            if not subscription.take(entries):",
        "        for subscription in stream.subscriptions()[:1]:\n            if not subscription.take(entries):",
        _READER + "::test_replaying_then_tailing_leaves_no_gap_and_no_repeat",
    ),
    _of(
        f"{_BUS}/events/subscription.py",
        "an-entry-is-read-twice",
        "            if id_ <= last:\n",
        "            if id_ < last:\n",
        _READER + "::test_replaying_then_tailing_leaves_no_gap_and_no_repeat",
    ),
    _of(
        f"{_BUS}/events/subscription.py",
        "a-trimmed-stream-is-read-as-if-whole",
        "return number if _follows(self._reached, number) else None",
        "return number",
        _SNAPSHOTS + "::test_trimming_by_hand_is_told",
    ),
    _of(
        f"{_BUS}/events/subscription.py",
        "a-full-buffer-drops-what-comes",
        "        return not self._over and not self._full\n",
        "        return not self._over\n",
        _EVENTS_SUBSCRIPTION + "::test_a_buffer_that_is_full_takes_no_more_and_says_so",
    ),
    # --- the queue ----------------------------------------------------------------------------------------------------
    _of(
        f"{_BUS}/lua/queue_take.lua",
        "one-client-is-served-before-all-others",
        "    turn = turn + 1\n    own_turn = turn\n",
        "    own_turn = -1\n",
        _SUBMISSION_QUEUE + "::test_clients_take_turns",
    ),
    _of(
        f"{_BUS}/lua/shared/queue_join.lua",
        "a-priority-is-ignored",
        "queue.client_key(entry.client), entry.priority, queue.member(",
        "queue.client_key(entry.client), 0, queue.member(",
        _SUBMISSION_QUEUE + "::test_priorities_order_a_clients_own",
    ),
    _of(
        f"{_BUS}/domain/fold.py",
        "records-of-columns-are-counted-and-not-compared",
        "len(found) != entry.records or list_digest(found) != entry.digest:",
        "len(found) != entry.records:",
        _COLUMNS + "::test_a_record_that_is_missing_or_another_is_found",
    ),
    _of(
        f"{_ENGINE}/adapter/validation.py",
        "a-submission-is-compared-with-the-schema-of-events",
        "check_schema(schema, REQUEST_SCHEMA)",
        "check_schema(schema)",
        _VALIDATION + "::test_a_submission_of_a_later_major_schema_of_requests_is_refused",
    ),
    _of(
        f"{_BUS}/submitting.py",
        "a-trace-that-another-client-queued-counts-as-ended",
        "if created and has_left and await bus.records.forget",
        "if created and await bus.records.forget",
        _SUBMISSION_QUEUE + "::test_a_trace_that_two_submit_at_once_is_queued_by_one",
    ),
    _of(
        f"{_BUS}/lua/queue_put.lua",
        "a-trace-is-queued-twice",
        "if not call('SET', submitted, 1, 'EX', remember, 'NX') then return",
        "if not call('SET', submitted, 1, 'EX', remember) then return",
        _SUBMISSION_QUEUE + "::test_a_trace_is_queued_once_however_often_it_is_submitted",
    ),
    _of(
        f"{_BUS}/lua/queue_put.lua",
        "a-full-queue-takes-more",
        "  if waiting >= room then",
        "  if false then",
        _SUBMISSION_QUEUE + "::test_a_full_queue_refuses_but_not_who_has_less_than_its_share",
    ),
    _of(
        f"{_BUS}/lua/queue_take.lua",
        "a-late-take-takes",
        "if call('GET', valid_token) ~= token then",
        "if false then",
        _STORE_INTAKE + "::test_a_take_that_comes_too_late_takes_nothing",
    ),
    _of(
        f"{_BUS}/lua/queue_take.lua",
        "one-engine-takes-the-whole-burst",
        "count = math.max(0, math.min(count, level - load))",
        "count = math.max(0, count)",
        _STORE_INTAKE + "::test_a_take_is_an_engines_share_of_what_waits",
    ),
    _of(
        f"{_BUS}/lua/queue_withdraw_lease.lua",
        "a-withdrawn-lease-leaves-its-entries-waiting",
        "    queue_leave.order(trace, entry)\n",
        "",
        _STORE_LEASES + "::test_a_lease_takes_what_waits_under_it_along",
    ),
    _of(
        f"{_BUS}/lua/dead_letter_add.lua",
        "a-dead-letter-is-not-kept",
        "redis.call('XADD', letters, 'MAXLEN', '~', most, '*', unpack(ARGV, 3))",
        "",
        _DEAD_LETTERS + "::test_what_cannot_be_answered_is_kept_as_it_was",
    ),
    _of(
        f"{_BUS}/lua/queue_settle.lua",
        "an-entry-is-settled-by-who-does-not-hold-it",
        "if holder ~= '' and redis.call('HGET', taken, trace) ~= holder then return 0 end",
        "",
        _TRACE_RECORDS + "::test_a_refused_end_leaves_everything_as_it_is",
    ),
    # --- recovery -----------------------------------------------------------------------------------------------------
    _of(
        f"{_BUS}/lua/queue_put_back.lua",
        "a-poisonous-trace-is-tried-for-ever",
        "entry.lost = entry.lost + 1 end",
        "entry.lost = 0 end",
        _LEASES_ENGINE_LOSS + "::test_a_trace_that_is_not_to_be_restarted_fails",
        hangs=True,
    ),
    _of(
        f"{_BUS}/lua/queue_put_back.lua",
        "a-retry-is-lost",
        "entry.lost >= entry.tries then",
        "entry.lost + 1 >= entry.tries then",
        _SUBMISSION_QUEUE + "::test_what_waits_again_waits_where_it_did",
    ),
    _of(
        f"{_BUS}/lua/queue_take.lua",
        "suspects-share-an-engine",
        "if not suspect then\n",
        "if true then\n",
        _RECOVERY + "::test_a_suspect_that_takes_its_time_does_not_keep_the_others_waiting_for_ever",
    ),
    _of(
        f"{_BUS}/recovery.py",
        "a-poisonous-trace-leaves-no-dead-letter",
        "await self._bus.queue.dead_letter(self._model, taken, failure.message)",
        "await self._bus.queue.done(self._model, taken.trace)",
        _LEASES_ENGINE_LOSS + "::test_what_kills_its_engines_is_given_up_and_the_others_are_not",
    ),
    _of(
        f"{_BUS}/recovery.py",
        "an-engine-that-lives-is-robbed",
        "for name in names if name not in alive}",
        "for name in names}",
        _RECOVERY + "::test_what_an_engine_that_lives_has_taken_stays_its",
    ),
    _of(
        f"{_BUS}/events/restore.py",
        "claims-are-not-said-again",
        "        if claims := list(self.claims()):",
        "        if claims := []:",
        _SERVICE_REDIS_LOSS + "::test_what_a_killed_redis_lost_is_appended_again",
    ),
    _of(
        f"{_ENGINE}/adapter/refusals.py",
        "what-is-not-proven-ends-a-running-trace",
        "            return trace in self._claims.runs\n",
        "            return False\n",
        "tests/unit/tracewire_engine/adapter/test_refusals.py::test_what_cannot_run_ends_no_trace_that_runs",
    ),
    _of(
        f"{_BUS}/store/submission_queue.py",
        "a-late-refusal-removes-another-engines-entry",
        "            if taken_by is None or to_text(taken_by) != holder:",
        "            if False:",
        "tests/unit/tracewire_engine/adapter/test_refusals.py::"
        "test_an_engine_that_was_slow_leaves_the_entry_to_the_engine_that_has_it",
    ),
    # --- records ------------------------------------------------------------------------------------------------------
    _of(
        f"{_BUS}/lua/record_open.lua",
        "another-key-takes-a-trace",
        "if mark and submitter and submitter ~= signer",
        "if false and submitter ~= signer",
        "tests/unit/tracewire_engine/adapter/test_refusals.py::test_another_key_s_submission_does_not_take_a_trace",
    ),
    _of(
        f"{_BUS}/lua/record_open.lua",
        "a-stale-attempt-is-opened",
        "if attempt < last or attempt == last and (last_engine ~= engine or had) then return 'overtaken' end",
        "",
        _TRACE_RECORDS + "::test_an_attempt_is_one_engines",
    ),
    _of(
        f"{_BUS}/lua/record_steer.lua",
        "a-compare-and-set-does-not-compare",
        "if expected ~= '' and expected ~= present then return {'version', tonumber(present)} end",
        "",
        _CHAT + "::test_a_change_for_another_version_is_refused",
    ),
    _of(
        f"{_BUS}/lua/record_steer.lua",
        "a-change-of-another-form-is-accepted",
        "  if declared ~= form then return {'form', name, declared} end\n",
        "",
        _TRACES_CONTROL + "::test_a_change_that_does_not_fit_what_was_declared_is_refused_by_name",
    ),
    _of(
        f"{_BUS}/lua/record_steer.lua",
        "a-change-of-a-queued-trace-is-dropped",
        "redis.call('ZADD', changes, version, change)",
        "",
        _TRACES_CONTROL + "::test_a_queued_trace_starts_with_what_it_was_steered_to",
    ),
    _of(
        f"{_BUS}/lua/record_steer.lua",
        "a-change-is-made-twice",
        "if accepted then return {'accepted', tonumber(accepted)} end",
        "",
        _TRACES_CONTROL + "::test_a_change_whose_answer_was_lost_is_accepted_though_its_trace_has_ended_since",
    ),
    _of(
        f"{_BUS}/lua/record_create.lua",
        "a-deadline-is-not-kept",
        "  redis.call('ZADD', deadlines, at, trace)\n",
        "",
        _PRESENCE + "::test_a_deadline_passes_with_no_engine",
        hangs=True,
    ),
    _of(
        f"{_BUS}/lua/record_cancel.lua",
        "a-cancelled-trace-is-told-as-running",
        "finish(base, trace, schema, head, tail, retention, 'cancelled', 'Cancelled')",
        "",
        _TRACES_CONTROL + "::test_a_queued_trace_is_cancelled_at_once",
        hangs=True,
    ),
    _of(
        f"{_BUS}/store/control.py",
        "an-order-is-lost",
        "            for id_, flat in entries:\n",
        "            for id_, flat in entries[:1]:\n",
        _TRACES_CONTROL + "::test_orders_come_once_and_in_order_over_a_broken_way",
        hangs=True,
    ),
    # --- large values and snapshots -----------------------------------------------------------------------------------
    _of(
        f"{_BUS}/store/blobs.py",
        "a-chunk-of-a-blob-is-dropped",
        "range(chunk_count(len(raw)))",
        "range(chunk_count(len(raw)) - 1)",
        _STORE_BLOBS + "::test_what_is_stored_is_loaded",
    ),
    _of(
        f"{_BUS}/store/blobs.py",
        "a-blob-is-not-checked",
        "if not any(_digest_of(raw, take(ref.dtype, ref.shape)) == ref.digest for take in (array_hash, content_hash)):",
        "if False:",
        _STORE_BLOBS + "::test_bytes_that_are_not_those_of_the_reference_are_told",
    ),
    _of(
        f"{_BUS}/store/blobs.py",
        "blobs-are-not-written-again",
        "in list(self._kept or ()):",
        "in ():",
        _RESTORE + "::test_an_end_is_settled_again_and_its_large_values_are_there",
    ),
    _of(
        f"{_BUS}/lua/snapshot_commit.lua",
        "a-long-stream-is-not-trimmed",
        "  redis.call('XTRIM', events, 'MINID', attempt .. '-' .. number)\n",
        "",
        _SNAPSHOTS + "::test_a_restart_makes_an_old_snapshot_void",
    ),
    _of(
        f"{_BUS}/lua/snapshot_commit.lua",
        "an-old-snapshot-replaces-a-newer-one",
        "return present_number >= tonumber(number)",
        "return false",
        _SNAPSHOTS + "::test_an_engine_that_lost_its_claim_neither_replaces_nor_trims",
    ),
    _of(
        f"{_BUS}/lua/snapshot_commit.lua",
        "an-engine-that-was-overtaken-trims",
        "if tonumber(attempt) < (",
        "if tonumber(attempt) < 0 * (",
        _SNAPSHOTS + "::test_an_engine_that_lost_its_claim_neither_replaces_nor_trims",
    ),
    # --- the firehose -------------------------------------------------------------------------------------------------
    _of(
        f"{_BUS}/lua/shared/lifecycle.lua",
        "the-firehose-tells-everything-twice",
        "  redis.call('EXPIRE', key, SECONDS)\n",
        "  redis.call('XADD', key, '*', ...)\n",
        _LIFECYCLE + "::test_a_trace_from_its_submission_to_its_end",
    ),
    _of(
        f"{_BUS}/store/lifecycle.py",
        "a-watch-goes-on-at-the-wrong-place",
        "            self._returned[name] = id_\n",
        "",
        _LIFECYCLE + "::test_a_watch_goes_on_from_a_position_without_a_repeat",
    ),
    _of(
        f"{_BUS}/store/watch_groups.py",
        "what-a-member-had-is-never-acknowledged",
        """                await self._ask_until_answered(("XACK", name, self._group, entry_id(id_)))\n""",
        "",
        _WATCH_GROUPS + "::test_what_was_not_acknowledged_comes_again_under_the_same_name",
    ),
    _of(
        f"{_BUS}/store/watch_groups.py",
        "nobody-takes-over-from-a-dead-member",
        "                await self._take_over()\n",
        "                self._claim_at = now + 1e9\n",
        _WATCH_GROUPS + "::test_what_a_member_leaves_goes_to_the_others_soon",
        hangs=True,
    ),
    _of(
        f"{_BUS}/lua/finished_drop.lua",
        "a-running-trace-is-dropped",
        "if stream.ended(base .. 'events:' .. trace) then",
        "if true then",
        "tests/unit/tracewire_bus/store/test_finished.py::test_a_trace_that_runs_is_never_dropped_whatever_the_list_says",
    ),
    # --- standing interventions ---------------------------------------------------------------------------------------
    _of(
        f"{_BUS}/lua/edit_install.lua",
        "an-edit-replaces-any-version",
        "if expected ~= '' and edits.version(present) ~= expected then",
        "if false then",
        "tests/unit/tracewire_bus/store/test_edits.py::test_only_the_version_that_is_meant_is_replaced_or_removed",
    ),
    _of(
        f"{_BUS}/lua/shared/edits.lua",
        "an-edit-is-installed-twice",
        "    if by == operation then return tonumber(generation) end\n",
        "",
        "tests/unit/tracewire_bus/store/test_edits.py::test_an_edit_is_installed_once",
    ),
    _of(
        f"{_BUS}/store/edits.py",
        "a-disabled-edit-is-read-as-enabled",
        """reason = disabled.decode("utf-8", "replace")""",
        """reason = \"\"""",
        "tests/unit/tracewire_bus/store/test_edits.py::test_a_disabled_edit_stays_so_until_it_is_installed_anew",
    ),
    _of(
        f"{_BUS}/store/edits.py",
        "an-edit-runs-on-who-did-not-ask",
        """return scope == "all" or name in asked""",
        """return True""",
        "tests/unit/tracewire_bus/store/test_edits.py::test_what_runs_on_a_request",
    ),
    _of(
        f"{_ENGINE}/adapter/standing_edits.py",
        "a-good-request-does-not-end-a-row-of-failures",
        "                self._streaks.pop(key, None)\n",
        "",
        "tests/unit/tracewire_engine/adapter/test_standing_edits.py::test_one_that_raised_too_often_in_a_row_is_disabled",
    ),
    # --- the SDK ------------------------------------------------------------------------------------------------------
    _of(
        f"{_SDK}/traces/event_reader.py",
        "a-subscription-resumes-where-it-began",
        "            self.position, self.entry = entry.id, entry\n",
        "            self.entry = entry\n",
        _SUBSCRIPTION + "::test_a_subscription_goes_on_after_any_event",
    ),
    _of(
        f"{_SDK}/traces/event_reader.py",
        "a-gaps-state-is-not-folded",
        "                    fold.resume(gap.snapshot())\n",
        "                    pass\n",
        "tests/unit/tracewire_engine/adapter/test_retention.py::test_a_consumer_that_sleeps_while_its_stream_is_trimmed_under_it",
    ),
    _of(
        f"{_SDK}/traces/output.py",
        "names-that-nobody-asked-for-come-along",
        "return [[change for change in step if is_of(change, names)] for step in deltas]",
        "return deltas",
        _SUBSCRIPTION + "::test_names_limit_what_is_saved_and_nothing_else",
    ),
    _of(
        f"{_SDK}/traces/ending.py",
        "a-mismatch-is-not-told",
        "        if self.mismatch is not None:\n",
        "        if False:\n",
        _ENDING + "::test_a_state_that_differs_from_the_engine_s_is_an_error",
    ),
    _of(
        f"{_SDK}/traces/trace.py",
        "an-output-is-lost-beside-a-result",
        "            if self._iterating or self._keep_items:",
        "            if self._keep_items:",
        _TRACE + "::test_an_iteration_that_begins_while_a_result_is_waited_for_gets_all",
    ),
    _of(
        f"{_SDK}/traces/trace.py",
        "a-submission-in-doubt-is-forgotten",
        "                self._unconfirmed = sending.asked and not submission.detach\n",
        "                self._unconfirmed = False\n",
        "tests/unit/tracewire/traces/test_presence.py::test_a_submission_whose_reply_was_lost_is_cancelled_when_redis_answers",
        hangs=True,
    ),
    _of(
        f"{_SDK}/traces/trace.py",
        "leaving-a-trace-does-not-cancel-it",
        "if not self._submission.detach and not self._fold.finished and self._is_own:\n",
        "if False:\n",
        _TRACES_CONTROL + "::test_leaving_a_trace_cancels_it_unless_it_is_detached",
    ),
    _of(
        f"{_SDK}/traces/model_checks.py",
        "a-path-is-not-checked",
        "    for problem in problems:\n",
        "    for problem in ():\n",
        _MODEL_CHECKS + "::test_a_path_that_does_not_exist_is_refused_with_the_nearest",
    ),
    _of(
        f"{_SDK}/traces/tracer.py",
        "a-tracer-holds-its-callers-frame",
        "            self._submission = self._captured(body)\n",
        "            self._submission, self._body = self._captured(body), body\n",
        "tests/unit/tracewire/traces/test_with_blocks.py::test_it_holds_no_frame",
    ),
    _of(
        f"{_SDK}/traces/presence.py",
        "a-closed-client-keeps-its-lease",
        "                        await self._bus.leases.release(name)\n",
        "                        pass\n",
        _PRESENCE + "::test_a_closed_client_holds_no_lease",
    ),
    _of(
        f"{_SDK}/traces/presence.py",
        "a-lease-is-not-renewed",
        "await self._bus.leases.renew(name, self._lease_s * 2 / 3, link)",
        "pass",
        _PRESENCE + "::test_a_lease_is_renewed_beside_calls_that_hang",
    ),
    _of(
        f"{_SDK}/traces/presence.py",
        "a-forgotten-submission-is-not-repeated",
        "            await sending.send()\n",
        "            pass\n",
        _SERVICE_REDIS_LOSS + "::test_what_redis_forgot_before_an_engine_took_it_is_submitted_again",
    ),
    _of(
        f"{_BUS}/store/vectors.py",
        "two-arrays-of-one-xxh3-are-taken-for-one",
        "if found is None or found[0] != payload:",
        "if found is None:",
        _VECTORS + "::test_an_array_is_known_by_all_of_its_bytes",
    ),
    _of(
        f"{_BUS}/store/vectors.py",
        "a-vector-is-not-compared-with-its-name",
        "if len(raw) != ref.nbytes or state.digest() != ref.digest:",
        "if len(raw) != ref.nbytes:",
        _VECTORS + "::test_another_dtype_or_shape_than_was_stored_is_told",
    ),
    _of(
        f"{_BUS}/store/vectors.py",
        "vectors-are-not-stored-again-when-redis-was-away",
        "broken_at = max(self._shared.broken_at, self._connections.broken_at)",
        "broken_at = -math.inf",
        _VECTORS + "::test_after_redis_was_away_it_is_stored_again",
    ),
    _of(
        f"{_BUS}/events/writer.py",
        "a-timer-that-has-rung-early-is-waited-for",
        "self._loop.time() + _SHORT_S < self._rings_at",
        "self._loop.time() < self._rings_at",
        "tests/unit/tracewire_bus/events/test_writer.py::test_on_uvloop_a_check_that_is_due_at_once_stops_no_writer",
    ),
    # --- the adapter --------------------------------------------------------------------------------------------------
    _of(
        f"{_ENGINE}/adapter/vector_files.py",
        "a-reference-of-another-shape-gets-the-file-of-a-vector",
        "            elif file.content != (ref.dtype, ref.shape):",
        "            elif False:",
        _VECTOR_FILES + "::test_a_made_up_dtype_or_shape_does_not_reach_the_workers",
    ),
    _of(
        f"{_ENGINE}/adapter/vector_files.py",
        "a-file-in-use-may-be-removed",
        "            if not file.users:",
        "            if True:",
        _VECTOR_FILES + "::test_files_are_kept_within_a_budget_and_none_in_use_is_removed",
    ),
    _of(
        f"{_ENGINE}/adapter/pending.py",
        "two-deltas-change-places",
        "= [self._take(one, index) for index in wanted]",
        "= [self._take(one, index) for index in reversed(wanted)]",
        _TRACE_RUN + "::test_each_token_has_what_was_saved_in_its_step",
    ),
    _of(
        f"{_ENGINE}/worker/declared/tap_buffers.py",
        "a-kernel-reads-before-the-edit",
        "np.where(flags & ADD, READ | AFTER, READ)",
        "np.where(flags & ADD, READ, READ)",
        f"{_TAPS}/test_tap_buffers.py::test_half_precision_is_rounded_as_without_kernels",
    ),
    _of(
        f"{_ENGINE}/worker/declared/tap_buffers.py",
        "a-kernel-s-table-is-of-an-earlier-plan",
        "        if table is self._current:\n",
        "        if self._current is not None:\n",
        f"{_TAPS}/test_tap_buffers.py::test_the_table_is_written_when_the_plan_changes_and_only_then",
    ),
    _of(
        f"{_ENGINE}/worker/declared/graph_proof.py",
        "graphs-that-differ-are-relied-on",
        "            if apart > _TOLERANCE:\n",
        '            if apart == float("inf"):\n',
        f"{_TAPS}/test_graph_proof.py::test_graphs_that_differ_are_not_relied_on",
    ),
    _of(
        f"{_ENGINE}/worker/declared/hooks.py",
        "ranks-run-a-step-by-different-graphs",
        "        agreed = _GRAPHS[ranks.greatest(_GRAPHS.index(needed))]\n",
        "        agreed = needed\n",
        f"{_TAPS}/test_cuda_graphs.py::test_a_step_replays_the_graph_that_its_interventions_fit",
    ),
    _of(
        f"{_ENGINE}/adapter/trace_stream.py",
        "an-output-is-published-twice",
        "        acknowledgements.add(self._queue(events[-1], final=final))\n",
        "        for _ in range(2):\n            acknowledgements.add(self._queue(events[-1], final=final))\n",
        _LEASES_ENGINE_LOSS + "::test_an_engine_that_dies_under_its_adapter_is_replaced",
    ),
    _of(
        f"{_ENGINE}/worker/sampler_states.py",
        "a-sampler-takes-a-new-request-for-the-one-before",
        '        self._rows, self._known = b"", {}\n\n    def _answer',
        "        pass\n\n    def _answer",
        "tests/unit/tracewire_engine/worker/test_sampler_states.py::test_a_sampler_that_remembers_answers_as_one_that_asks",
    ),
    _of(
        f"{_ENGINE}/adapter/trace_run.py",
        "an-output-is-dropped",
        "        if not token_ids and not choice.text and finish_reason is None:\n            return\n",
        "        if first == 3:\n            return\n",
        _TRACE_RUN + "::test_each_token_has_what_was_saved_in_its_step",
    ),
    _of(
        f"{_ENGINE}/adapter/running_request.py",
        "the-end-of-a-block-comes-a-token-late",
        "keep = pending.ended_at + 1 - len(published)",
        "keep = pending.ended_at + 2 - len(published)",
        _TRACE_END + "::test_a_trace_ends_at_the_token_at_which_its_block_ended",
    ),
    _of(
        f"{_ENGINE}/adapter/digests.py",
        "what-came-with-the-end-has-no-digest",
        "entry.digest = entry.digest or self.of(entry.name)",
        "pass",
        _TRACE_RUN + "::test_each_token_has_what_was_saved_in_its_step",
    ),
    _of(
        f"{_ENGINE}/adapter/trace_run.py",
        "an-accepted-change-is-told-by-no-event",
        "            due += self.live.last_events() if final else ()\n",
        "",
        _LIVE_CHANGES + "::test_what_is_accepted_in_an_outage_at_the_end_is_told",
    ),
    _of(
        f"{_ENGINE}/adapter/trace_run.py",
        "a-change-is-told-a-step-late",
        "known = {(request, choice): index for request, choice, index in first}",
        "known = {(request, choice): index + 1 for request, choice, index in first}",
        _LIVE_CHANGES + "::test_a_change_is_not_told_as_applied_before_it_was_sent",
    ),
    _of(
        f"{_ENGINE}/adapter/pending.py",
        "a-lost-report-is-waited-for-for-ever",
        "            self.given_up = True\n",
        "            pass\n",
        "tests/unit/tracewire_engine/adapter/test_report_router.py"
        "::test_a_trace_whose_report_was_lost_ends_with_an_error_and_the_others_go_on",
        hangs=True,
    ),
    _of(
        f"{_ENGINE}/adapter/live_changes.py",
        "a-known-change-is-taken-again",
        "        if hash(data) in self._known:\n",
        "        if False:\n",
        _LIVE_CHANGES + "::test_a_change_that_reached_no_step_is_told_once",
    ),
    _of(
        f"{_ENGINE}/adapter/control.py",
        "an-adapter-ignores-a-cancel",
        """        elif order.kind == "cancel":\n""",
        """        elif order.kind == "never":\n""",
        _LEASES + "::test_the_reaper_outlives_a_call_that_fails",
        hangs=True,
    ),
    _of(
        f"{_ENGINE}/adapter/intake.py",
        "an-adapter-ignores-a-deadline",
        "call_later(opened.left_s, self._control.end,",
        "call_later(opened.left_s + 1e6, self._control.end,",
        _TRACE_RUN + "::test_a_trace_past_its_deadline_is_ended_by_its_engine",
    ),
    _of(
        f"{_ENGINE}/adapter/leases.py",
        "an-adapter-forgets-leases",
        "            if now - since >= _patience_of(lease):\n",
        "            if False:\n",
        _LEASES + "::test_an_outage_is_no_absence_of_a_client",
    ),
    _of(
        f"{_ENGINE}/adapter/refusals.py",
        "garbage-is-not-dead-lettered",
        "        await self._bus.queue.dead_letter(self._info.model, entry, failure.message, self._info.engine)\n",
        "        await self._bus.queue.done(self._info.model, entry.trace)\n",
        _INTAKE + "::test_what_names_no_trace_becomes_a_dead_letter",
    ),
    _of(
        f"{_ENGINE}/adapter/service.py",
        "a-leaving-adapter-keeps-what-it-took",
        "await self._bus.queue.put_back(model, engine, why, lost=False, which=which)",
        "pass",
        _LEASES_ENGINE_LOSS + "::test_an_engine_that_is_shut_down_hands_over",
    ),
    _of(
        f"{_ENGINE}/adapter/service.py",
        "nobody-hears-that-a-trace-waits-again",
        "            await self._bus.records.publish_waiting(which, why)\n",
        "",
        _LEASES_ENGINE_LOSS + "::test_an_engine_that_leaves_tells_that_its_traces_wait",
        hangs=True,
    ),
    _of(
        f"{_ENGINE}/adapter/block_sources.py",
        "an-adapter-does-not-check-paths",
        "problems = [problem for name in names for problem in check_block(tree, source, name)]",
        "problems = []",
        _BLOCK_SOURCES + "::test_a_block_with_a_path_that_there_is_not_is_refused_whoever_sent_it",
    ),
    _of(
        f"{_ENGINE}/adapter/retention.py",
        "streams-are-never-trimmed",
        "        beyond = 0 < self._events < tally.events or 0 < self._nbytes < tally.nbytes\n",
        "        beyond = False\n",
        "tests/unit/tracewire_engine/adapter/test_retention.py::test_a_consumer_is_killed_and_another_process_goes_on_from_its_last_id",
    ),
    # --- the worker ---------------------------------------------------------------------------------------------------
    _of(
        f"{_ENGINE}/worker/save_tracker.py",
        "a-new-item-is-sent-twice",
        "            deltas.append(Append(path=path, items=sent))\n",
        "            deltas.append(Append(path=path, items=[*sent, *sent]))\n",
        _SAVES + "::test_a_growing_list_sends_each_item_once",
    ),
    _of(
        f"{_ENGINE}/worker/save_tracker.py",
        "a-new-item-is-skipped",
        "for index in range(known, len(value)):",
        "for index in range(known + 1, len(value)):",
        _SAVES + "::test_a_save_that_cannot_travel_is_named_and_the_others_arrive",
    ),
    _of(
        f"{_ENGINE}/worker/save_tracker.py",
        "a-change-in-place-is-not-seen-at-the-end",
        "    if found != sent:\n",
        "    if False:\n",
        _SAVES + "::test_changes_in_place_arrive_with_the_final",
    ),
    _of(
        f"{_ENGINE}/worker/save_tracker.py",
        "a-lost-name-stays-in-the-fold",
        "            deltas.append(Delete(path=(name,)))\n",
        "            pass\n",
        _SAVES + "::test_a_save_that_cannot_travel_is_named_and_the_others_arrive",
    ),
    _of(
        f"{_ENGINE}/worker/save_tracker.py",
        "what-was-saved-behind-the-last-token-stays",
        "                box.cut(length)\n",
        "                pass\n",
        _SAVES + "::test_what_later_steps_saved_is_undone",
    ),
    _of(
        f"{_ENGINE}/adapter/read_decoder.py",
        "a-stop-condition-is-a-step-late",
        "self._streaks[place] >= stop.steps",
        "self._streaks[place] > stop.steps",
        _READ_DECODER + "::test_a_stop_condition_counts_steps_in_a_row",
    ),
    _of(
        f"{_ENGINE}/adapter/read_decoder.py",
        "a-read-goes-to-another-step",
        "return [(reads, reads.index + batch.step) for",
        "return [(reads, reads.index) for",
        _DECLARED_PLAN + "::test_plans_are_what_a_loop_over_requests_gives[0]",
    ),
    _of(
        f"{_ENGINE}/adapter/trace_lag.py",
        "a-lag-ends-a-client-s-pause",
        "            paused = bool(self._reasons)",
        "            paused = on",
        _TRACE_LAG + "::test_a_client_s_pause_outlasts_the_lag_and_the_lag_a_client_s_pause",
    ),
    _of(
        f"{_ENGINE}/adapter/trace_lag.py",
        "a-light-trace-is-held",
        "if nbytes > (2 * share if self.thinned or self.spilled else share) and not self.held:",
        "if not self.held:",
        _TRACE_LAG + "::test_a_heavy_trace_is_held_and_a_light_one_runs_on",
    ),
    _of(
        f"{_ENGINE}/link/step_link.py",
        "shared-memory-is-never-released",
        "                    self._ring.release(used)",
        "                    pass",
        _STEP_LINK + "::test_over_the_link_bytes_come_in_order_whichever_way_they_take",
    ),
    _of(
        f"{_ENGINE}/adapter/read_decoder.py",
        "a-declared-read-is-dropped",
        "            [item for item in items if self._in_records[item.name]],",
        "            [item for item in items[1:] if self._in_records[item.name]],",
        _DECLARED_PLAN + "::test_plans_are_what_a_loop_over_requests_gives[0]",
    ),
    _of(
        f"{_ENGINE}/worker/declared/groups.py",
        "two-requests-rows-change-places",
        "rows = [row for start, count in spans for row",
        "rows = [row for start, count in reversed(spans) for row",
        _DECLARED_PLAN + "::test_plans_are_what_a_loop_over_requests_gives[16]",
    ),
    _of(
        f"{_ENGINE}/worker/declared/spans.py",
        "the-last-position-is-the-first",
        "return (start + count - 1, 1) if end >= prompt",
        "return (start, 1) if end >= prompt",
        _DECLARED_PLAN + "::test_plans_are_what_a_loop_over_requests_gives[0]",
    ),
    _of(
        f"{_ENGINE}/worker/declared/plan.py",
        "a-plan-outlives-its-batch",
        "            or plan.req_ids != req_ids\n",
        "",
        _DECLARED_PLAN + "::test_plans_are_what_a_loop_over_requests_gives[1]",
    ),
    _of(
        f"{_ENGINE}/link/shared_ring.py",
        "the-ring-buffer-overwrites-what-nobody-took",
        "        if end - (taken + skipped if taken == self._put else taken) > self._size:\n            return None\n",
        "",
        "tests/unit/tracewire_engine/link/test_shared_ring.py::test_bytes_come_out_as_they_went_in_and_a_reader_that_is_behind_loses_none",
    ),
    _of(
        f"{_ENGINE}/worker/kv_offload.py",
        "kept-blocks-change-places",
        "values = copy[list(pairs.values())].to(cache.device)",
        "values = copy[list(pairs.values())[::-1]].to(cache.device)",
        "tests/unit/tracewire_engine/worker/test_kv_offload.py::test_what_is_kept_is_put_back_into_other_blocks",
    ),
    _of(
        f"{_ENGINE}/core/scheduler.py",
        "a-preempted-trace-is-computed-anew-over-what-was-kept",
        "            request.num_computed_tokens = computed\n            self.tracewire_kept",
        "            self.tracewire_kept",
        "tests/unit/tracewire_engine/core/test_scheduler_traced.py::test_a_preempted_trace_goes_on_where_it_was",
    ),
    _of(
        f"{_ENGINE}/core/scheduler.py",
        "a-traced-request-is-cached-for-others",
        "        if is_plain(request):\n            self._cache(",
        "        if True:\n            self._cache(",
        "tests/unit/tracewire_engine/core/test_scheduler_traced.py::test_plain_requests_share_prefixes_and_traced_ones_neither_read_nor_write",
    ),
    _of(
        f"{_ENGINE}/core/scheduler.py",
        "a-paused-request-runs-on",
        "        self.tracewire_paused |= alive\n",
        "",
        "tests/unit/tracewire_engine/core/test_scheduler.py::test_an_engine_of_paused_requests_idles_after_one_step_without_tokens",
    ),
    _of(
        f"{_ENGINE}/worker/blocks/shared_values.py",
        "shared-values-go-with-the-first-request",
        "        return not self._left\n",
        "        return True\n",
        "tests/unit/tracewire_engine/worker/blocks/test_shared_values.py::test_a_value_lives_from_the_first_request_to_the_last_in_whatever_order",
    ),
    _of(
        f"{_ENGINE}/worker/blocks/batched_serving.py",
        "blocks-are-handed-each-others-rows",
        "            return self._pieces[mediator.row]\n",
        "            return self._pieces[-1 - mediator.row]\n",
        _BATCHED_SERVING + "::test_blocks_are_handed_the_rows_that_nnsight_would_narrow",
    ),
    _of(
        f"{_ENGINE}/worker/finishing.py",
        "nothing-is-compared-with-nnsight",
        "entry.digest = digest(HostCopy()(plain(collected[entry.name], made)))",
        "pass",
        _FINISHING + "::test_where_it_is_checked_the_final_names_the_digests_of_what_nnsight_collected",
    ),
    _of(
        f"{_ENGINE}/worker/blocks/save_marks.py",
        "an-ended-blocks-marks-stay",
        "        nnsight_tracer._saves().difference_update(marked)\n",
        "        pass\n",
        "tests/unit/tracewire_engine/worker/blocks/test_save_marks.py::test_release_forgets_all",
    ),
    _of(
        f"{_ENGINE}/worker/parallel/merged_columns.py",
        "ranks-columns-change-places",
        "tensor.chunk(ranks, dim=-1)]",
        "tensor.chunk(ranks, dim=-1)[::-1]]",
        "tests/unit/tracewire_engine/worker/parallel/test_merged_columns.py::test_what_is_split_is_gathered_in_its_order",
    ),
    _of(
        f"{_ENGINE}/launch/supervisor.py",
        "an-adapter-that-died-is-not-started-again",
        "            if left == 0 or vain == _VAIN:\n",
        "            if True:\n",
        "tests/unit/tracewire_engine/launch/test_supervisor.py::test_no_more_often_than_it_was_told",
    ),
    _of(
        f"{_ENGINE}/worker/runner.py",
        "a-change-is-told-of-a-token-too-late",
        "first.append((request, choice, max(0, index)))",
        "first.append((request, choice, max(0, index) + 1))",
        _RUNNER + "::test_a_change_is_told_of_with_the_token_that_its_step_samples",
    ),
    _of(
        f"{_ENGINE}/worker/blocks/live_params.py",
        "a-change-never-reaches-a-block",
        "run.values = {**run.values, **values}",
        "run.values = {**values, **run.values}",
        _DECLARED_PLAN + "::test_plans_are_what_a_loop_over_requests_gives[1]",
    ),
    _of(
        f"{_ENGINE}/worker/declared/plan.py",
        "a-declared-intervention-keeps-its-first-scale",
        "                self.stale |= declaration.update_live(self.decoded.vectors)\n",
        "                declaration.update_live(self.decoded.vectors)\n",
        _DECLARED_PLAN + "::test_plans_are_what_a_loop_over_requests_gives[1]",
    ),
    # --- with an engine -----------------------------------------------------------------------------------------------
    _of(
        f"{_ENGINE}/adapter/http_requests.py",
        "an-edit-does-not-run-on-a-plain-request",
        "{DECLARED_ARG: declared, EDITS_ARG: chosen.blocks}",
        "{DECLARED_ARG: declared}",
        "tests/e2e/edits/test_openai.py::test_an_edit_changes_what_it_answers_until_it_is_removed",
        engine=True,
    ),
    # --- verdicts -----------------------------------------------------------------------------------------------------
    _of(
        "examples/chat_backend/stream.py",
        "a-browser-resumes-where-it-began",
        "yield encoded(*shown, self._subscription.position)",
        "yield encoded(*shown)",
        _CHAT + "::test_ids_are_those_of_the_bus",
    ),
    _of(
        "examples/chat_backend/conversations.py",
        "a-conversation-forgets-what-was-said",
        """return head + "".join(reversed(kept)) + said""",
        """return head + said""",
        _CHAT + "::test_a_message_goes_on_from_what_was_said_before",
    ),
    _of(
        "examples/demo/run.py",
        "the-demo-does-not-look-for-outputs",
        """        if not report["outputs"]:\n""",
        "        if False:\n",
        _EXAMPLES + "::test_the_demo_says_who_lacks_what",
    ),
    _of(
        "examples/demo/run.py",
        "the-demo-does-not-compare-with-nnsight",
        "if value != collected.get(save)",
        "if False",
        _EXAMPLES + "::test_the_demo_says_who_lacks_what",
    ),
    _of(
        "examples/demo/run.py",
        "the-demo-does-not-miss-a-consumer",
        """            found.append(f"{name}: no report")\n""",
        "",
        _EXAMPLES + "::test_the_demo_says_who_reported_nothing",
    ),
    _of(
        "examples/demo/run.py",
        "the-demo-agrees-whatever-was-found",
        """"agree": not wrong,""",
        """"agree": True,""",
        _EXAMPLES + "::test_the_demo_s_verdict_is_of_what_its_consumers_report",
    ),
    _of(
        "examples/demo/watch.py",
        "a-watcher-skips-an-output",
        "                    token_ids += event.token_ids\n",
        "                    token_ids += event.token_ids if outputs != 3 else []\n",
        _EXAMPLES + "::test_the_demo_s_verdict_is_of_what_its_consumers_report",
    ),
    _of(
        "tests/faults/harness/checker.py",
        "the-checker-misses-what-a-consumer-never-got",
        '    if missing:\n        found.append(Violation("lost", trace, f"{name} never got',
        '    if False:\n        found.append(Violation("lost", trace, f"{name} never got',
        _CHECKER + "::test_what_a_consumer_never_got_at_its_end_is_lost",
    ),
    _of(
        "tests/faults/harness/checker.py",
        "the-checker-does-not-compare-digests",
        "        if folded(entries).digest() != fold.digest():\n",
        "        if False:\n",
        _CHECKER + "::test_what_a_gap_came_to_is_compared",
    ),
    _of(
        "tests/faults/harness/checker.py",
        "the-checker-misses-a-dropped-change",
        "asked.steered - set(told)",
        "set()",
        _CHECKER + "::test_changes_are_told_of_once",
    ),
    _of(
        f"{_SDK}/harvest/journal.py",
        "a-harvest-commits-over-another-client-s-shard",
        "            self.store.create(_name(entry.number), msgspec.json.encode(entry)",
        "            self.store.put(_name(entry.number), msgspec.json.encode(entry)",
        _HARVEST + "journal.py::test_the_second_of_two_clients_cannot_commit",
    ),
    _of(
        f"{_SDK}/harvest/journal.py",
        "a-harvest-does-not-compare-digests",
        "    if not reason and found(data) != file.digest:\n",
        "    if False:\n",
        _HARVEST + "journal.py::test_a_file_that_is_not_what_was_written",
    ),
    _of(
        f"{_SDK}/harvest/run.py",
        "a-harvest-runs-what-is-in-a-shard",
        "            if item.key in skipped:\n",
        "            if False:\n",
        _HARVEST + "run.py::test_a_run_that_was_ended_is_gone_on_with",
    ),
    _of(
        f"{_SDK}/harvest/run.py",
        "a-harvest-leaves-the-last-shard-out",
        "            if len(shard):\n",
        "            if False:\n",
        _HARVEST + "run.py::test_each_prompt_is_harvested_once",
    ),
    _of(
        f"{_SDK}/harvest/rows.py",
        "a-harvest-s-positions-are-off-by-one",
        '{"last": prompt - 1,',
        '{"last": prompt,',
        _HARVEST + "rows.py::test_positions_are_those_that_the_engine_reads",
    ),
    _of(
        f"{_SDK}/harvest/shards.py",
        "an-index-names-the-rows-of-another-prompt",
        '            self._append("row", np.arange(row, row + count))\n',
        '            self._append("row", np.arange(count))\n',
        _HARVEST + "shards.py::test_the_index_says_what_each_row_is_of",
    ),
    _of(
        f"{_BUS}/bulk/reader.py",
        "bulk-is-not-verified",
        "        if found != where.digest:\n",
        "        if False:\n",
        "tests/unit/tracewire_bus/bulk/test_reader.py::test_what_differs_is_refused",
    ),
    _of(
        f"{_BUS}/bulk/segments.py",
        "half-a-write-stays-in-its-segment",
        "            os.ftruncate(self._file, start)\n",
        "            pass\n",
        "tests/unit/tracewire_bus/bulk/test_segments.py::test_what_a_disk_refuses_leaves_the_segment_as_it_was",
    ),
    _of(
        f"{_ENGINE}/adapter/bulk_writer.py",
        "a-full-store-loses-saves",
        "            self._writer.report(error)\n            return None\n",
        '            self._writer.report(error)\n            return msgspec.Raw(b"\\x90")\n',
        "tests/unit/tracewire_engine/adapter/test_bulk_writer.py::test_a_full_store_costs_no_save",
    ),
    _of(
        f"{_ENGINE}/adapter/bulk_writer.py",
        "segments-outlive-their-traces",
        "            store.forget(trace)\n",
        "            pass\n",
        "tests/unit/tracewire_engine/adapter/test_bulk_writer.py::test_a_segment_goes_with_its_trace",
    ),
    _of(
        f"{_SDK}/traces/trace.py",
        "a-submission-has-no-span-s-context",
        "submission = msgspec.structs.replace(submission, context=self._span.begin(submission))",
        "self._span.begin(submission)",
        "tests/unit/tracewire/traces/test_client_span.py::test_a_trace_has_a_span_and_sends_its_context",
    ),
    _of(
        f"{_ENGINE}/adapter/intake.py",
        "a-lost-attempt-s-span-is-no-error",
        '        return "EngineLost" if self._lifecycle.lost else "EngineShutdown"\n',
        '        return ""\n',
        _SPANS + "an_attempt_on_each_engine_has_a_span_below_the_same_one",
    ),
    _of(
        f"{_ENGINE}/adapter/trace_spans.py",
        "of-two-finals-the-first-counts",
        "            self._final = event\n",
        "            self._final = self._final or event\n",
        _SPANS + "of_two_finals_the_last_counts",
    ),
    _of(
        f"{_BUS}/span_export.py",
        "an-ending-process-waits-for-its-collector",
        "        ending.join(FLUSH_S)\n",
        "        ending.join()\n",
        "tests/unit/tracewire_bus/test_span_export.py::"
        "test_a_collector_that_does_not_answer_holds_up_neither_spans_nor_the_end",
        hangs=True,
    ),
)
