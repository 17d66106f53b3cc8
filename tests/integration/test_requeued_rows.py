"""A requeue changes nothing in a row: what an application remembers of it stays true."""

from tests.slot_rig import SlotRig


def test_a_row_that_is_requeued_keeps_its_id_and_all_of_its_columns(ready: SlotRig) -> None:
    ready.stage(count=2)
    ready.database.execute(
        """insert into outbox (task, args, key, headers, created_at)
        values ('mail', '{"n": 2, "price": 1.10}', 'k', '{"trace": "t"}', '2026-01-02 03:04:05.678901+00')"""
    )
    ready.database.execute("delete from outbox where id = 1")
    rows = "select to_jsonb(o)::text from outbox o order by id"
    before = ready.database.fetch(rows)
    ready.drop_slot()
    ready.init()
    assert ready.database.fetch(rows) == before
    ready.catch_up()
    assert [record.headers["id"] for record in ready.read()] == [b"2", b"3"]
    ready.stage("new")
    assert ready.database.fetch_value("select id from outbox where task = 'new'") == 4
