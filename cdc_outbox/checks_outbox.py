"""What `doctor` checks of table, publication and slot. To add a check, add a function: see finding.py."""

from __future__ import annotations

from cdc_outbox.event import Layout
from cdc_outbox.facts import Facts
from cdc_outbox.finding import Checks, Finding, fail, ok, skip, warn
from cdc_outbox.objects import WAY_BACK, require_slot
from cdc_outbox.row_filter import require as require_shard
from cdc_outbox.statements import identifier, literal
from cdc_outbox.status import TRANSACTIONS_SQL
from cdc_outbox.status_report import open_transactions
from cdc_outbox.status_text import size, transaction

check = Checks[Facts]()

LONG_SECONDS = 600
MUCH_WAL_BYTES = 64 * 1024**2
"""A transaction that holds back so little, for so short a time, is nobody's trouble."""


@check("table")
def table(facts: Facts) -> Finding:
    return ok(facts.table.outbox)


@check("columns")
def columns(facts: Facts) -> Finding:
    if facts.objects is None:
        return skip("no table")
    record_format = facts.settings.record_format()
    Layout(facts.relation, record_format)  # raises what `stream` would
    types = {name: kind for name, _, kind, _ in facts.columns}
    roles = {role: record_format.column(role) for role in ("id", "task", "args", "key", "headers")}
    found = ", ".join(f"{name} {types[name]}" for name in roles.values() if name in types)
    if types.get(roles["headers"], "jsonb") not in ("jsonb", "json", "text"):
        return fail(found, f"{roles['headers']} must hold a JSON object: map another with --column headers=NAME")
    if types[roles["args"]] not in ("jsonb", "json", "bytea", "text", "character varying", "xml"):
        return warn(found, f"{roles['args']} is sent as the text of its type")
    return ok(found)


_PRIVILEGES = """
select n, p from (values (1, $1, 'select'), (2, $1, 'delete'), (3, $1, 'update'), (4, $2, 'select'), (5, $2, 'update'),
                         (6, $3, 'select'), (7, $3, 'insert'), (8, $3, 'delete')) t (place, n, p)
where case when to_regclass(n) is null then true when p = 'update' then not has_any_column_privilege(n, p)
           else not has_table_privilege(n, p) end
order by place"""


@check("privileges")
def privileges(facts: Facts) -> Finding:
    """For checkpoint, purge and dead letters."""
    names = facts.objects
    if names is None:
        return skip("no table")
    missing = facts.ask(_PRIVILEGES, [names.outbox, names.checkpoint, names.dead_letter])
    if not missing:
        return ok("on table, checkpoint and dead letters")
    role = identifier(facts.role["rolname"])
    return fail(
        "not allowed, or not there: " + ", ".join(f"{privilege} on {name}" for name, privilege in missing),
        f"an owner of the table runs `cdc-outbox init-slot --relay-role {role}`; sql/role_relay.sql is what it grants",
    )


@check("publication")
def publication(facts: Facts) -> Finding:
    name = facts.settings.publication
    found = facts.publication
    if found is None:
        return fail(f"{name} does not exist", "run `cdc-outbox init-slot`")
    if found["puballtables"]:
        return warn(
            f"{name} publishes all tables", "another one with --publication: each table's WAL is sent for nothing"
        )
    if not found["listed"]:
        return fail(f"{name} does not publish {facts.table.outbox}", WAY_BACK)
    return ok(f"{name} publishes {facts.table.outbox}")


@check("published operations")
def published_operations(facts: Facts) -> Finding:
    found = facts.publication
    if found is None:
        return skip("no publication")
    published = [verb for verb in ("insert", "update", "delete", "truncate") if found[f"pub{verb}"]]
    if not found["pubinsert"]:
        return fail(f"inserts are not published, only {', '.join(published) or 'nothing'}", WAY_BACK)
    if published != ["insert"]:
        return warn(
            f"{', '.join(published)}: the purge's deletes are sent for nothing, and refused on a table without a key",
            "`cdc-outbox init-slot` sets publish = 'insert'",
        )
    return ok("insert only")


@check("row filter")
def row_filter(facts: Facts) -> Finding:
    if facts.publication is None:
        return skip("no publication")
    shard = facts.settings.shard
    if shard is not None and facts.objects is not None:
        require_shard(facts.look, facts.objects, shard, facts.settings.record_format())  # raises what `stream` would
        return ok(f"shard {shard}")
    if not facts.publication["row_filter"]:
        return ok("none")
    return fail(
        f"rows outside {facts.publication['row_filter']} never arrive",
        "a shard's name is --shard I/N, also here; else " + WAY_BACK,
    )


@check("shards")
def shards(facts: Facts) -> Finding:
    """All of a set, or some rows go nowhere."""
    shard = facts.settings.shard
    if shard is None:
        return skip("no --shard")
    base = facts.settings.slot.removesuffix(shard.name(""))
    known = {found["slot_name"]: found for found in facts.slots}
    missing = [str(one) for one in shard.siblings() if one.name(base) not in known]
    if missing:
        return fail(
            f"no slot for {', '.join(missing)}: their rows stay in the table, and go nowhere",
            f"run `cdc-outbox init-slot --shard {missing[0]}`",
        )
    idle = [str(one) for one in shard.siblings() if not known[one.name(base)]["active"]]
    if idle:
        return warn(f"no relay for {', '.join(idle)} of {shard.count}", f"`cdc-outbox stream --shard {idle[0]}`")
    return ok(f"{shard.count} slots, each with its relay")


@check("column list")
def column_list(facts: Facts) -> Finding:
    if facts.publication is None or not facts.publication["columns"]:
        return ok("none") if facts.publication else skip("no publication")
    return fail(f"only {', '.join(facts.publication['columns'])} are published", WAY_BACK)


@check("partitions")
def partitions(facts: Facts) -> Finding:
    if facts.publication is None:
        return skip("no publication")
    kind = facts.ask("select relkind from pg_class where oid = $1::oid", [facts.table.oid])[0][0]
    if kind == "p" and not facts.publication["pubviaroot"]:
        return fail("rows are published under their partitions' names", WAY_BACK)
    return ok("published as the table itself" if kind == "p" else "the table has none")


@check("slot")
def slot(facts: Facts) -> Finding:
    require_slot(facts.look, facts.settings.slot)  # raises what `stream` would
    found = facts.slot
    if found is None:
        return skip("it has just been dropped")
    held = f"{size(found['held_bytes'])} of WAL held"
    if found["wal_status"] == "unreserved":
        remedy = "start the relay, or raise max_slot_wal_keep_size, before the next checkpoint"
        return warn(f"about to be lost, {held}", remedy)
    return ok(f"{'held by pid ' + str(found['active_pid']) if found['active'] else 'free'}, {held}")


@check("publication before slot")
def publication_before_slot(facts: Facts) -> Finding:
    """Decoding looks at the catalogue as of each WAL position: for a change before it, a publication does not exist."""
    if facts.publication is None or facts.slot is None or facts.slot["catalog_xmin_age"] is None:
        return skip("no publication, or no slot")
    if facts.publication["age"] > facts.slot["catalog_xmin_age"] or facts.gap is None:
        return ok("yes")
    return fail(
        "the publication is younger than the slot's position: PostgreSQL 15 to 17 stop there, 18 skips rows", WAY_BACK
    )


@check("checkpoint guard")
def checkpoint_guard(facts: Facts) -> Finding:
    if facts.slot is None or facts.slot["wal_status"] == "lost":
        return skip("no slot to compare with")
    if facts.gap is not None:
        raise facts.gap
    return ok("the slot is the one that was set up, and covers the table")


@check("open transactions")
def transactions(facts: Facts) -> Finding:
    if facts.slot is None:
        return skip("no slot")
    rows = facts.ask(TRANSACTIONS_SQL, [1])
    for one in open_transactions(rows, facts.slot):
        held = facts.slot["held_bytes"]
        if one.holds and ((one.seconds or 0) > LONG_SECONDS or held > MUCH_WAL_BYTES):
            end = f"select pg_terminate_backend({one.pid})"
            if one.prepared is not None:
                end = f"commit or rollback prepared {literal(one.prepared)}, in database {one.database}"
            return warn(f"{transaction(one)}; {size(held)} of WAL held", end)
    return ok("none holds the slot back for long")
