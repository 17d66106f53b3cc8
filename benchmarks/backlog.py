"""Rows waiting for a relay: about 200 bytes of args each, which do not compress well."""

from dataclasses import dataclass

from tests.fix_postgres import Database

# 10 tasks, which become the keys. md5 stands for the tokens and ids of real jobs.
_ROW = """
'task_' || mod(i, 10), jsonb_build_object('order', i, 'customer', md5(i::text), 'token', md5((-i)::text),
    'address', md5(i || 'a') || '@example.org', 'callback', 'https://example.org/jobs/' || md5(i || 'b'))"""

_LOAD = f"""
create table neighbour (n int, content text);
create procedure load(total int, per_transaction int, tasks int, padding int, neighbours int) language plpgsql as $$
declare
    done int := 0;
begin
    while done < total loop
        insert into outbox (task, args)
            select 'task_' || mod(i, tasks), case when padding > 0 then args || jsonb_build_object('padding',
                (select string_agg(md5(i::text || j), '') from generate_series(1, padding / 32) j)) else args end
            from (select i, row_.args from generate_series(done + 1, least(done + per_transaction, total)) i,
                  lateral (select {_ROW}) row_ (task, args)) t;
        commit;
        if neighbours > 0 then
            insert into neighbour
                select i, repeat(md5(i::text), 8) from generate_series(1, neighbours * per_transaction) i;
            commit;
        end if;
        done := done + per_transaction;
    end loop;
end $$"""

INSERT = f"insert into outbox (task, args) select {_ROW} from (values (%s::int)) v (i) returning id"


@dataclass(frozen=True, slots=True)
class Shape:
    """What waits: `padding` bytes are added to each row's args; `neighbours` rows of another table go beside each."""

    rows: int
    rows_per_transaction: int
    tasks: int = 10
    padding: int = 0
    neighbours: int = 0


def load(database: Database, shape: Shape) -> str:
    """Ids 1 to `rows`, in commit order. Returns the WAL position after them, which is flushed."""
    with database.connect() as connection:
        connection.execute(_LOAD.encode())
        connection.execute("set synchronous_commit = off")
        connection.execute(
            "call load(%s, %s, %s, %s, %s)",
            (shape.rows, shape.rows_per_transaction, shape.tasks, shape.padding, shape.neighbours),
        )
        position = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()[0][0]
        connection.execute("checkpoint")  # writes and flushes beyond it, and nothing is left to be written later
        return str(position)
