"""One outbox through several slots (`--shard I/N`): every row from exactly one of them, and none lost on the way there,
on the way back, or from N to M. The steps of docs/scaling.md are those of the last tests."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.fix_command import Running
from tests.fix_kafka import CreateTopic, Record
from tests.fix_postgres import Database
from tests.relay_rig import Load, Row, row_of, rows_of, standard_check
from tests.slot_rig import SlotRig, refusal
from tests.waiting import eventually

TASKS = tuple(f"task {number}" for number in range(12))
"""As keys: of each of three shards there are some, and of two."""


class ManyKeys(Load):
    TASKS = TASKS
    PAUSE_SECONDS = 0.04


class ShardRig(SlotRig):
    """A shard's slot, and a topic that may be its own: what is in it came from this shard."""

    shard = ""

    @property
    def names(self) -> list[str]:
        base = self.database.name
        return ["--dsn", self.dsn, "--slot", base, "--publication", base, "--shard", self.shard, "--table", self.table]

    @property
    def ours(self) -> str:
        """The condition that the publication has."""
        query = """
            select pg_get_expr(prqual, prrelid) from pg_publication_rel r join pg_publication p on p.oid = r.prpubid
            where pubname = %s"""
        return str(self.database.fetch_value(query, (self.publication,)))

    def rows_in_table(self, condition: str = "true") -> list[Row]:
        return self.database.fetch(f"select task, (args->>'n')::int from outbox where {condition}")

    def requeued(self) -> int:
        done = self.run("init-slot", "--json")
        assert done.returncode == 0, done.stderr
        found = done.stdout.partition('"requeued_rows": ')[2].partition(",")[0]
        return int(found)


Shards = Callable[[int], list[ShardRig]]


@pytest.fixture
def shards(fresh: SlotRig, topic: CreateTopic) -> Shards:
    """`shards(3)`: three rigs, each with a topic of its own; nothing is set up."""

    def new(count: int) -> list[ShardRig]:
        return [shard_of(fresh, number, count, topic()) for number in range(1, count + 1)]

    return new


def shard_of(rig: SlotRig, number: int, count: int, topic: str) -> ShardRig:
    new = ShardRig(rig.database, rig.broker, rig.command, topic)
    new.slot = new.publication = f"{rig.database.name}_{number}_of_{count}"
    new.shard = f"{number}/{count}"
    new._counters = rig._counters
    return new


def init(shards: Sequence[ShardRig]) -> None:
    for shard in shards:
        shard.init()


def one_of_each(rig: SlotRig, times: int = 1) -> list[Row]:
    return [row for _ in range(times) for task in TASKS for row in rig.stage(task)]


def catch_up(*rigs: SlotRig) -> None:
    """At once, as in life."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rig: rig.catch_up(), rigs))


def arrived(shards: Sequence[ShardRig]) -> list[list[Record]]:
    return [shard.read() for shard in shards]


def exactly_one_each(records: Sequence[Sequence[Record]], rows: Sequence[Row]) -> None:
    """Each of `rows`, and no other, from one shard, and all rows of a task from the same; every shard had some."""
    sets = [set(rows_of(some)) for some in records]
    assert all(sets)
    assert sum(map(len, sets)) == len(rows)
    assert set().union(*sets) == set(rows)
    tasks = [{task for task, _ in found} for found in sets]
    assert sum(map(len, tasks)) == len(set().union(*tasks))


def check_each(shards: Sequence[ShardRig], load: Load) -> list[int]:
    """The standard check of each shard's topic; the repeats."""
    records = arrived(shards)
    exactly_one_each(records, load.committed)
    repeats = []
    for some in records:
        tasks = {task for task, _ in rows_of(some)}
        repeats.append(standard_check([row for row in load.committed if row[0] in tasks], load.rolled_back, some))
    return repeats


def first_arrivals(records: Sequence[Record]) -> list[Record]:
    found: dict[Row, Record] = {}
    for record in sorted(records, key=lambda record: (record.partition, record.offset)):
        found.setdefault(row_of(record), record)
    return list(found.values())


# -- every row from one shard ---------------------------------------------------------------------------------------


def test_every_row_arrives_from_exactly_one_shard_in_order_per_key(shards: Shards) -> None:
    three = shards(3)
    init(three)
    relays = [shard.stream() for shard in three]
    with ManyKeys(three[0], seed=1) as load:
        eventually(lambda: len(load.committed) > 300, 60, "rows are written")
    assert [relay.terminate() for relay in relays] == [0, 0, 0]
    catch_up(*three)
    assert check_each(three, load) == [0, 0, 0]


def test_a_key_goes_where_the_task_of_the_same_text_goes(shards: Shards) -> None:
    three = shards(3)
    init(three)
    for task in TASKS:
        three[0].database.execute(
            "insert into outbox (task, key, args) values (%s, null, '{\"n\": 1}'), ('other', %s, '{\"n\": 2}')",
            (task, task),
        )
    catch_up(*three)
    for shard in three:
        keys = [record.key for record in shard.read()]
        assert keys
        assert all(keys.count(key) == 2 for key in keys)


KEYS = {
    "text": "md5(n::text)",
    "char(40)": "md5(n::text)",
    "uuid": "md5(n::text)::uuid",
    "smallint": "n",
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_each_of_these_types_are_spread(shards: Shards, kind: str) -> None:
    three = shards(3)
    database = three[0].database
    database.execute(
        f"create table outbox (id bigserial primary key, kind varchar(10), payload jsonb, aggregate {kind})"
    )
    mapping = ["--column", "task=kind", "--column", "args=payload", "--column", "key=aggregate"]
    for shard in three:
        shard.init(*mapping)
    database.execute(
        f"insert into outbox (kind, payload, aggregate) select 'a', '{{}}', {KEYS[kind]} from generate_series(1, 300) n"
    )
    database.execute("insert into outbox (kind, payload) select 'a', '{}' from generate_series(1, 10)")
    for shard in three:
        shard.catch_up(*mapping)
    counts = [len(shard.read()) for shard in three]
    assert sum(counts) == 310
    assert min(counts) > 60  # of 300, evenly: 100 each; 60 would be a chance of one in a million


def test_a_key_whose_type_no_row_filter_takes_is_refused_by_name(shards: Shards) -> None:
    shard = shards(3)[0]
    shard.database.execute("create type color as enum ('red')")
    shard.database.execute("create table outbox (id bigserial primary key, task text, args jsonb, key color)")
    refusal(shard.run("init-slot"), 3, "column key is of type color", "--column key=NAME")
    assert not shard.slot_exists()


def test_what_is_no_shard_is_refused(ready: SlotRig) -> None:
    refusal(ready.run("init-slot", "--shard", "4/3"), 2, "--shard", "'4/3' is not a shard such as 1/3")


def test_a_dry_run_shows_the_row_filter_and_changes_nothing(shards: Shards) -> None:
    shard = shards(3)[1]
    before = shard.state()
    done = shard.run("init-slot", "--dry-run")
    assert done.returncode == 0
    assert "hashtextextended" in done.stdout
    assert shard.state() == before
    init([shard])
    before = shard.state()
    again = shard.run("init-slot")
    assert again.stdout.count("was there") == 7
    assert shard.state() == before


# -- purge ----------------------------------------------------------------------------------------------------------


def test_a_shard_that_stands_still_keeps_its_own_rows_in_the_table_and_no_others(shards: Shards) -> None:
    three = shards(3)
    init(three)
    relays = [shard.stream("--purge-every", "50ms") for shard in (three[0], three[2])]
    with ManyKeys(three[0], seed=2) as load:
        eventually(lambda: len(load.committed) > 300, 60, "rows are written")
    others = f"not ({three[1].ours})"
    eventually(lambda: not three[1].rows_in_table(others), 60, "the others' rows are purged")
    assert three[1].purge() == "0 rows purged; the slot is not there yet\n"
    catch_up(three[1])
    own = rows_of(three[1].read())
    assert own
    assert sorted(three[1].rows_in_table()) == sorted(own)
    relays.append(three[1].stream("--purge-every", "50ms"))
    eventually(lambda: three[1].backlog == 0, 60, "everything is purged")
    assert [relay.terminate() for relay in relays] == [0, 0, 0]
    catch_up(*three)
    assert check_each(three, load) == [0, 0, 0]


def test_a_purge_apart_and_its_dry_run_count_the_rows_of_their_shard(shards: Shards) -> None:
    three = shards(3)
    init(three)
    rows = one_of_each(three[0])
    relays = [shard.stream() for shard in three]
    counts = [len(shard.rows_in_table(shard.ours)) for shard in three]
    assert sum(counts) == len(rows)
    for shard, count in zip(three, counts, strict=True):
        assert shard.purge("--dry-run") == f"{count} rows would be purged\n"
    for left, (shard, count) in enumerate(zip(three, counts, strict=True)):
        assert shard.purge() == f"{count} rows purged\n"
        assert shard.backlog == sum(counts[left + 1 :])
    assert [relay.terminate() for relay in relays] == [0, 0, 0]


# -- what dies ------------------------------------------------------------------------------------------------------


def test_a_shard_killed_again_and_again_repeats_its_own_rows_and_loses_none(shards: Shards) -> None:
    three = shards(3)
    init(three)
    steady = [three[0].stream("--purge-every", "50ms"), three[2].stream("--purge-every", "50ms")]
    with ManyKeys(three[0], seed=3) as load:
        for _ in range(3):
            victim = three[1].stream("--purge-every", "50ms")
            before = len(load.committed)
            eventually(lambda before=before: len(load.committed) > before + 60, 60, "rows are written")  # type: ignore[misc]
            victim.kill9()
    steady.append(three[1].stream("--purge-every", "50ms"))
    eventually(lambda: three[1].backlog == 0, 60, "everything is purged")
    assert [relay.terminate() for relay in steady] == [0, 0, 0]
    repeats = check_each(three, load)
    assert (repeats[0], repeats[2]) == (0, 0)


def test_a_shard_whose_slot_was_lost_gets_its_own_rows_back_and_the_others_repeat_nothing(shards: Shards) -> None:
    three = shards(3)
    init(three)
    rows = one_of_each(three[0], 3)
    catch_up(three[0], three[2])
    own = three[1].rows_in_table(three[1].ours)
    three[1].drop_slot()
    three[1].refused("stream", 4, "does not exist", "init-slot")
    three[1].refused("purge", 4, "does not exist")
    rows += one_of_each(three[0])
    assert three[1].requeued() == len(own) + len(own) // 3
    catch_up(*three)
    records = arrived(three)
    exactly_one_each(records, rows)
    assert sum(map(len, records)) == len(rows)


def test_on_gap_recover_makes_the_shard_again(shards: Shards) -> None:
    three = shards(3)
    init(three)
    rows = one_of_each(three[0])
    three[1].drop_slot()
    three[1].catch_up("--on-gap", "recover")
    catch_up(three[0], three[2])
    exactly_one_each(arrived(three), rows)


def test_rows_that_two_shards_set_aside_from_one_transaction_are_both_kept(shards: Shards) -> None:
    """Both are the first of their shard's part of it."""
    three = shards(3)
    init(three)
    with three[0].database.connect(autocommit=False) as connection:
        for task in TASKS:
            three[0].stage(task, on=connection)  # a task with a space names no topic
        connection.commit()
    for shard in three:
        shard.catch_up("--topic", f"{shard.topic}.{{task}}", "--on-poison", "dead-letter")
    kept = three[0].database.fetch("select row_id, slot_name from outbox_dead_letter")
    assert len(kept) == len(TASKS)
    assert {slot for _, slot in kept} == {shard.slot for shard in three}


# -- what was changed behind our back -------------------------------------------------------------------------------

OTHER_FILTERS = {
    "no filter": "alter publication {publication} set table outbox",
    "another shard's": "alter publication {publication} set table outbox where (hashtextextended(task, 0) < 0)",
    "the same, put back": "alter publication {publication} drop table outbox; alter publication {publication} add table"
    " outbox where (SAME)",
}


@pytest.mark.parametrize("change", OTHER_FILTERS)
def test_a_filter_that_was_altered_stops_relay_and_purge_until_init_slot(shards: Shards, change: str) -> None:
    shard = shards(3)[1]
    init([shard])
    one_of_each(shard)
    shard.catch_up()
    own = shard.rows_in_table(shard.ours)
    shard.alter(*OTHER_FILTERS[change].replace("SAME", shard.ours).split("; "))
    shard.refused("stream", 4, "the table was taken out of the publication", "init-slot")
    shard.refused("purge", 4, "the table was taken out of the publication")
    assert shard.backlog == len(TASKS)
    assert shard.requeued() == len(own)
    shard.catch_up()
    assert len(shard.read()) == 2 * len(own)


def test_a_relay_whose_records_have_another_key_than_the_shard_is_refused(shards: Shards) -> None:
    shard = shards(3)[1]
    shard.database.execute(
        "create table outbox (id bigserial primary key, task text, args jsonb, key text, customer text)"
    )
    init([shard])
    refusal(shard.run("stream", "--column", "key=customer"), 4, "is not shard 2/3 by the key", "--column")
    done = shard.run("init-slot", "--column", "key=customer")
    assert "mended" in done.stdout
    shard.catch_up("--column", "key=customer")
    refusal(shard.run("stream"), 4, "is not shard 2/3 by the key")


def test_a_publication_without_a_filter_under_the_shard_s_name_is_refused(shards: Shards) -> None:
    shard = shards(3)[1]
    done = shard.command.run("init-slot", "--dsn", shard.dsn, "--slot", shard.slot, "--publication", shard.publication)
    assert done.returncode == 0
    shard.refused("stream", 4, "is not shard 2/3", "init-slot --shard 2/3")


# -- the commands beside it -----------------------------------------------------------------------------------------


def test_doctor_knows_the_shards_filter_and_says_which_of_its_set_are_missing(shards: Shards) -> None:
    three = shards(3)
    init(three[:2])
    done = three[0].run("doctor")
    assert done.returncode == 3
    assert "no slot for 3/3" in done.stdout
    assert "init-slot --shard 3/3" in done.stdout
    init(three[2:])
    relay = three[1].stream()
    done = three[0].run("doctor")
    assert done.returncode == 0, done.stdout
    assert "shard 1/3" in done.stdout
    assert "no relay for 1/3, 3/3" in done.stdout
    assert relay.terminate() == 0


def test_drop_slot_counts_what_its_shard_leaves_behind(shards: Shards) -> None:
    three = shards(3)
    init(three)
    one_of_each(three[0])
    own = len(three[1].rows_in_table(three[1].ours))
    done = three[1].run("drop-slot", "--yes")
    assert f": {own} rows not purged" in done.stdout
    assert not three[1].slot_exists()
    assert three[0].slot_exists()


def test_a_shard_without_rows_is_not_behind_because_another_is(shards: Shards) -> None:
    three = shards(3)
    init(three)
    catch_up(*three)
    task = next(
        task
        for task in TASKS
        if three[1].database.fetch_value(f"select {three[1].ours} from (values (%s, null)) t (task, key)", (task,))
    )
    three[1].stage(task)
    waiting = [shard.run("status", "--json").stdout.partition('"seconds": ')[2].partition("}")[0] for shard in three]
    assert float(waiting[0]) == float(waiting[2]) == 0
    assert float(waiting[1]) > 0


def test_a_replayed_row_goes_through_the_shard_of_its_key(shards: Shards) -> None:
    three = shards(3)
    init(three)
    one_of_each(three[0])
    relays = [shard.stream() for shard in three]
    for shard in three:
        shard.purge("--archive")
    assert three[0].backlog == 0
    done = three[0].run("replay", "--since", "1h")
    assert f"{len(TASKS)} rows staged again" in done.stdout
    assert [relay.terminate() for relay in relays] == [0, 0, 0]
    catch_up(*three)
    for shard in three:
        rows = rows_of(shard.read())
        assert rows
        assert all(rows.count(row) == 2 for row in rows)


# -- to shards, and from N to M -------------------------------------------------------------------------------------


def test_rows_written_while_the_shards_are_made_one_after_another_all_arrive(shards: Shards) -> None:
    """The first relays and purges before there is a second."""
    three = shards(3)
    relays: list[Running] = []
    three[0].init()
    with ManyKeys(three[0], seed=4) as load:
        for shard in three:
            before = len(load.committed)
            eventually(lambda before=before: len(load.committed) > before + 60, 60, "rows are written")  # type: ignore[misc]
            shard.init()
            relays.append(shard.stream("--purge-every", "50ms"))
    eventually(lambda: three[0].backlog == 0, 60, "everything is purged")
    assert [relay.terminate() for relay in relays] == [0, 0, 0]
    exactly_one_each(arrived(three), load.committed)


def move(old: Sequence[SlotRig], new: Sequence[ShardRig], running: Sequence[Running], load: Load) -> list[Running]:
    """docs/scaling.md, step by step, while rows are written."""
    init(new)
    more(load)
    assert [relay.terminate() for relay in running] == [0] * len(running)
    for rig in old:
        rig.catch_up()
    more(load)
    started = [shard.stream("--purge-every", "50ms") for shard in new]
    for rig in old:
        assert rig.run("drop-slot", "--yes").returncode == 0
    more(load)
    return started


def more(load: Load) -> None:
    before = len(load.committed)
    eventually(lambda: len(load.committed) > before + 60, 60, "rows are written")


def test_from_one_slot_to_three_shards_to_two_and_back_nothing_is_lost_and_keys_stay_in_order(
    ready: SlotRig, topic: CreateTopic
) -> None:
    three = [shard_of(ready, number, 3, ready.topic) for number in (1, 2, 3)]
    two = [shard_of(ready, number, 2, ready.topic) for number in (1, 2)]
    relays = [ready.stream("--purge-every", "50ms")]
    with ManyKeys(ready, seed=5) as load:
        more(load)
        relays = move([ready], three, relays, load)
        relays = move(three, two, relays, load)
    eventually(lambda: ready.backlog == 0, 60, "everything is purged")
    assert [relay.terminate() for relay in relays] == [0, 0]
    records = ready.read()
    standard_check(load.committed, load.rolled_back, first_arrivals(records))
    assert len(records) > len(load.committed)  # what two sets of slots carried
    left = ready.database.fetch("select slot_name from pg_replication_slots where database = current_database()")
    assert sorted(name for (name,) in left) == sorted(shard.slot for shard in two)


def test_a_move_while_the_old_relay_is_away_for_good_loses_nothing_either(ready: SlotRig) -> None:
    """Its slot lost, its rows in the table: the new shards find them there."""
    three = [shard_of(ready, number, 3, ready.topic) for number in (1, 2, 3)]
    rows = one_of_each(ready)
    ready.drop_slot()
    rows += one_of_each(ready)
    init(three)
    rows += one_of_each(ready)
    catch_up(*three)
    assert set(rows_of(ready.read())) == set(rows)


def test_two_shards_can_be_made_at_the_same_time(shards: Shards) -> None:
    three = shards(3)
    three[0].init()
    three[0].drop_slot()
    rows = one_of_each(three[0])
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda shard: shard.init(), three))
    catch_up(*three)
    exactly_one_each(arrived(three), rows)


def test_a_partitioned_table_is_sharded_as_a_whole(shards: Shards) -> None:
    three = shards(3)
    database: Database = three[0].database
    with psycopg.connect(database.socket_dsn, autocommit=True) as connection:
        connection.execute(
            "create table outbox (id bigint generated always as identity, task text not null, args jsonb, key text)"
            " partition by range (id)"
        )
        connection.execute("create table outbox_low partition of outbox for values from (1) to (20)")
        # Its columns stand in another order.
        connection.execute("create table outbox_high (key text, args jsonb, task text not null, id bigint not null)")
        connection.execute("alter table outbox attach partition outbox_high default")
    init(three)
    rows = one_of_each(three[0], 2)
    relays = [shard.stream("--purge-every", "50ms") for shard in three]
    eventually(lambda: three[0].backlog == 0, 60, "everything is purged")
    assert [relay.terminate() for relay in relays] == [0, 0, 0]
    exactly_one_each(arrived(three), rows)
