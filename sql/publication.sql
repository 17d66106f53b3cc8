-- Exactly this table, inserts only: no other table's deletes or updates are touched by it, with or without a
-- replica identity. Made before the slot: decoding looks at the catalogue as of each WAL position.
-- `where` is empty, or (init-slot --shard) the row filter of a shard: psql -v where= …
create publication :"publication" for table :"schema".:"outbox" :where
    with (publish = 'insert', publish_via_partition_root = true);
