-- As slot.sql, for a slot that is kept on standbys too (PostgreSQL 17 and later).
set client_connection_check_interval = '1s';
set statement_timeout = :'limit';
select pg_create_logical_replication_slot(:'slot', 'pgoutput', failover => true);
