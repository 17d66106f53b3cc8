-- Least privilege for the relay, a role that exists already (init-slot --relay-role). It needs the attribute
-- REPLICATION besides (alter role … replication): use a role for this only, since a role with it could read any
-- table of the database through a slot of its own.
-- Purge: select and delete; Postgres asks for update on one column before it lets a delete skip locked rows.
grant usage on schema :"schema" to :"relay_role";
grant select, delete, update (:"column") on :"schema".:"outbox" to :"relay_role";
grant select, update on :"schema".:"checkpoint" to :"relay_role";
grant select, insert, delete on :"schema".:"dead_letter" to :"relay_role";
grant select, insert, delete on :"schema".:"archive" to :"relay_role";
