-- Least privilege for the application, a role that exists already (init-slot --app-role): it may add jobs and
-- nothing else.
grant usage on schema :"schema" to :"app_role";
grant insert on :"schema".:"outbox" to :"app_role";
