-- What the examples' workers write to, beside the inbox (sql/inbox.sql).
create table receipts (customer text not null, order_id bigint not null);
create table parcels (label text not null);
