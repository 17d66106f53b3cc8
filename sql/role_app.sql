-- Least privilege for the application, a role that exists already (init-slot --app-role): it may add jobs, and be
-- told their ids (`returning id`), and nothing else.
grant usage on schema :"schema" to :"app_role";
grant insert, select (:"column") on :"schema".:"outbox" to :"app_role";
