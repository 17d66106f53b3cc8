-- What a worker has done already, in the worker's own database (cdc_outbox.Inbox):
--   psql -v schema=public -v inbox=inbox -f inbox.sql
-- One row is a job, or a step of one, with the step's result: `json`, which gives back what was stored, as it was.
create table if not exists :"schema".:"inbox" (
    source text not null,
    id text not null,
    step text not null default '',
    result json,
    done_at timestamptz not null default now(),
    primary key (source, id, step)
);

-- For the trim by age.
create index if not exists :"inbox_done_at" on :"schema".:"inbox" (done_at);
