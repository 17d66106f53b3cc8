-- Waits for every transaction that is older. Both settings end the wait on the server too, should this client die:
-- a backend left waiting would leave a slot behind that nobody reads, and WAL would pile up.
set client_connection_check_interval = '1s';
set statement_timeout = :'limit';
select pg_create_logical_replication_slot(:'slot', 'pgoutput');
