-- Sends every row that is in the table through the WAL again, under its own id: one path for old rows and new ones.
-- In one statement, so no key is ever taken twice. `where` is empty, or limits it to the rows of a shard; `order` is empty,
-- or puts rows back in the order in which they were staged: where a vacuum has made room, younger rows stand in front.
with moved as (
    delete from :"schema".:"outbox" :where returning :"columns"
), back as (
    insert into :"schema".:"outbox" (:"columns") overriding system value select :"columns" from moved :order returning 1
)
select count(*) from back;
