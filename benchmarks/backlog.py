"""Rows waiting for a relay: about 200 bytes of args each, which do not compress well."""

from tests.fix_postgres import Database

# 10 tasks, which become the keys. md5 stands for the tokens and ids of real jobs.
_ROW = """
'task_' || mod(i, 10), jsonb_build_object('order', i, 'customer', md5(i::text), 'token', md5((-i)::text),
    'address', md5(i || 'a') || '@example.org', 'callback', 'https://example.org/jobs/' || md5(i || 'b'))"""

_LOAD = f"""
create procedure load(total int, per_transaction int) language plpgsql as $$
declare
    done int := 0;
begin
    while done < total loop
        insert into outbox (task, args)
            select {_ROW} from generate_series(done + 1, least(done + per_transaction, total)) i;
        commit;
        done := done + per_transaction;
    end loop;
end $$"""

INSERT = f"insert into outbox (task, args) select {_ROW} from (values (%s::int)) v (i) returning id"


def load(database: Database, rows: int, rows_per_transaction: int) -> str:
    """Ids 1 to `rows`, in commit order. Returns the WAL position after them, which is flushed."""
    with database.connect() as connection:
        connection.execute(_LOAD.encode())
        connection.execute("set synchronous_commit = off")
        connection.execute("call load(%s, %s)", (rows, rows_per_transaction))
        position = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()[0][0]
        connection.execute("checkpoint")  # writes and flushes beyond it, and nothing is left to be written later
        return str(position)
