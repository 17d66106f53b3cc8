-- Exactly this table, inserts only: no other table's deletes or updates are touched by it, with or without a
-- replica identity. Made before the slot: decoding looks at the catalogue as of each WAL position.
create publication :"publication" for table :"schema".:"outbox"
    with (publish = 'insert', publish_via_partition_root = true);
