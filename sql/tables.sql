-- The outbox and what stands beside it. Run by `cdc-outbox init-slot`; psql runs it too:
--   psql -v schema=public -v outbox=outbox -v checkpoint=outbox_checkpoint -v dead_letter=outbox_dead_letter \
--        -v archive=outbox_archive -v archived_at=outbox_archived_at -f tables.sql

-- One row is one job. An application needs only: insert into outbox (task, args) values (…)
create table if not exists :"schema".:"outbox" (
    id bigint generated always as identity primary key,
    task text not null,
    args jsonb not null default '{}',
    key text,
    headers jsonb check (jsonb_typeof(headers) = 'object'),
    created_at timestamptz not null default now()
);

-- What the relay has promised to Postgres, one row a slot, and what the slot covered when it was set up. Written
-- before each promise: a slot that is further than its row was moved or re-created by someone else.
create table if not exists :"schema".:"checkpoint" (
    slot_name text primary key,
    position pg_lsn not null,
    system_identifier text not null,
    table_oid oid not null,
    publication_oid oid not null,
    publication_xmin text not null,
    publication_rel_oid oid not null,
    publication_rel_xmin text not null,
    stored_at timestamptz not null default now()
) with (fillfactor = 50);

-- Rows that Kafka will never take, committed here before their position is confirmed (--on-poison dead-letter).
-- (commit_lsn, ordinal) is a row's identity in the stream of its slot: a repeat adds nothing.
create table if not exists :"schema".:"dead_letter" (
    id bigint generated always as identity primary key,
    slot_name text not null,
    commit_lsn pg_lsn not null,
    ordinal integer not null,
    row_id text,
    task text,
    "row" jsonb not null,
    topic text,
    error text not null,
    size bigint,
    size_limit bigint,
    created_at timestamptz not null default now(),
    unique (slot_name, commit_lsn, ordinal)
);

-- Where `--archive` moves relayed rows: the outbox's columns, without its constraints, and when each row came.
create table if not exists :"schema".:"archive" as
    select *, now() as archived_at from :"schema".:"outbox" with no data;

-- For the trim by age (--archive-retain) and for replay --since.
create index if not exists :"archived_at" on :"schema".:"archive" (archived_at);
