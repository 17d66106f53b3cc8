"""Mutants of what stands beside the relay, on plain SQL connections: found on real servers."""

from tests.mutants.mutant import Mutant

PURGE = "tests/faults/test_purge_faults.py::"
GAPS = "tests/faults/test_gaps.py::"
INIT_SLOT = "tests/integration/test_init_slot.py::"
SEEN = "where ctid = any($1::tid[]) and xmin = any($2::xid[])"

MUTANTS = (
    Mutant(
        "purge by id",
        "archive.py",
        SEEN,
        "where $2::xid[] is not null and id <= (select max(id) from {outbox} where ctid = any($1::tid[]))",
        (PURGE + "test_what_commits_after_the_look_stays_though_its_ids_are_lower",),
    ),
    Mutant(
        "purge by place, whoever is there now",
        "archive.py",
        SEEN,
        "where ctid = any($1::tid[]) and $2::xid[] is not null",
        (PURGE + "test_a_new_row_in_the_place_of_one_that_was_seen_stays",),
    ),
    Mutant(
        "wait for rows that others have locked",
        "archive.py",
        "for update skip locked",
        "for update",
        ("tests/integration/test_purge.py::test_locked_rows_are_skipped_and_purged_later",),
    ),
    Mutant(
        "purge without waiting for the slot",
        "purge.py",
        "if require_slot(queries, objects.slot).confirmed_flush_lsn >= fence:",
        "if True:",
        ("tests/integration/test_purge.py::test_without_a_relay_nothing_that_waits_is_purged",),
    ),
    Mutant(
        "purge up to the WAL that is flushed",
        "purge.py",
        "select pg_current_wal_insert_lsn(), count(*)",
        "select pg_current_wal_flush_lsn() - 16777216, count(*)",
        ("tests/integration/test_purge.py::test_without_a_relay_nothing_that_waits_is_purged",),
    ),
    Mutant(
        "believe the slot for the whole of a purge's wait",
        "purge.py",
        "                check_now(queries, objects)\n                deleted",
        "                deleted",
        ("tests/faults/test_slot_moved_under_a_purge.py",),
    ),
    Mutant(
        "delete what was to be archived",
        "purge.py",
        "deleting(objects, seen.columns if self._archive else None)",
        "deleting(objects, None)",
        ("tests/integration/test_after_the_send.py::test_the_archive_holds_rows_as_they_were_and_is_trimmed_by_age",),
    ),
    Mutant(
        "create a slot without waiting for those who wrote before",
        "setup.py",
        "        self._wait_for_writers(objects)\n",
        "",
        (INIT_SLOT + "test_a_writer_that_began_while_the_publication_lacked_the_table_is_waited_for",),
    ),
    Mutant(
        "requeue under new ids",
        "requeue.sql",
        "overriding system value",
        "overriding user value",
        ("tests/integration/test_requeued_rows.py",),
    ),
    Mutant(
        "requeue nothing",
        "setup.py",
        "        if fate.reason is not None:\n            try",
        "        if False:\n            try",
        (GAPS + "test_a_slot_dropped_with_rows_not_relayed",),
    ),
    Mutant(
        "keep a slot that somebody moved",
        "setup.py",
        "        if slot.confirmed_flush_lsn > stored.position:",
        "        if False:",
        (GAPS + "test_a_slot_re_created_by_hand",),
    ),
    Mutant(
        "leave a slot behind when interrupted",
        "setup.py",
        "                if not fate.keep and not self.dry_run:",
        "                if False:",
        (INIT_SLOT + "test_an_interrupt_leaves_no_slot_behind",),
    ),
    Mutant(
        "leave the rest of an answer inside TLS",
        "query.py",
        "TLS_READS = 4",
        "TLS_READS = 1",
        ("tests/unit/test_take_input.py",),
    ),
    Mutant(
        "stage a job that no rollback takes back",
        "clients.py",
        'if self._connection.autocommit and self._status not in ("INTRANS", "INERROR"):',
        "if False:",
        ("tests/ends/test_stage.py::test_outside_a_transaction_nothing_is_staged",),
    ),
    Mutant(
        "stand by for nobody",
        "session.py",
        "            except SlotInUse:\n",
        "            except SlotInUse:\n                raise\n",
        ("tests/faults/test_standby.py::test_the_second_relay_takes_over_when_the_first_is_killed",),
    ),
)
