-- Sends every row that is in the table through the WAL again, under its own id: one path for old rows and new ones.
-- In one statement, so no key is ever taken twice. `where` is empty, or limits it to the rows of a shard.
with moved as (
    delete from :"schema".:"outbox" :where returning :"columns"
), back as (
    insert into :"schema".:"outbox" (:"columns") overriding system value select :"columns" from moved returning 1
)
select count(*) from back;
