"""What `doctor` checks of the Postgres server. To add a check, add a function: see finding.py."""

from __future__ import annotations

import re

from cdc_outbox.errors import ConnectionLost
from cdc_outbox.facts import Facts
from cdc_outbox.finding import Checks, Finding, fail, ok, skip, warn
from cdc_outbox.replication import Replication
from cdc_outbox.statements import identifier
from cdc_outbox.status_text import duration, size

check = Checks[Facts]()

SMALL_KEEP_MB = 256
SHORT_SENDER_TIMEOUT_MS = 5000
SHORT_IDLE_TIMEOUT_SECONDS = 24 * 3600


@check("server")
def server(facts: Facts) -> Finding:
    version = facts.parameters["server_version"]
    if facts.version < 15:
        return fail(f"PostgreSQL {version}", "PostgreSQL 15 or later is needed")
    if facts.parameters["in_hot_standby"] == "on":
        return fail("this server is a standby", "give the primary's address with --dsn")
    return ok(f"PostgreSQL {version}, a primary")


@check("pooler")
def pooler(facts: Facts) -> Finding:
    """A pooler makes up the process id that it tells its clients."""
    told, real = facts.look.backend_pid, int(facts.ask("select pg_backend_pid()")[0][0] or 0)
    if told != real:
        return warn(
            "a pooler stands between", "connect directly for `stream`: give the server's own address with --dsn"
        )
    return ok("the connection is direct")


@check("wal_level")
def wal_level(facts: Facts) -> Finding:
    """From PostgreSQL 19 on replica is enough: the first logical slot raises effective_wal_level."""
    level = facts.parameters["wal_level"]
    effective = facts.parameters.get("effective_wal_level", level)
    if effective == "logical" or (facts.version >= 19 and level != "minimal"):
        return ok(level if effective == level else f"{level}, in effect {effective}")
    return fail(level, "alter system set wal_level = logical, then restart the server")


@check("replication slots")
def replication_slots(facts: Facts) -> Finding:
    used, most = len(facts.slots), int(facts.parameters["max_replication_slots"])
    if used >= most and facts.slot is None:
        return fail(
            f"all {most} are in use",
            f"alter system set max_replication_slots = {most + 5}, then restart the server; or drop one",
        )
    return ok(f"{used} of {most} in use")


@check("walsenders")
def walsenders(facts: Facts) -> Finding:
    used, most = len(facts.senders), int(facts.parameters["max_wal_senders"])
    if used < most:
        return ok(f"{used} of {most} in use")
    remedy = f"alter system set max_wal_senders = {most + 5}, then restart the server"
    if facts.slot is not None and facts.slot["active"]:
        return warn(f"all {most} are in use: there is none for a second relay", remedy)
    return fail(f"all {most} are in use", remedy)


@check("replication privilege")
def replication_privilege(facts: Facts) -> Finding:
    """Tried: a managed service may grant it by a role's membership, and a pooler or pg_hba.conf may take it away."""
    try:
        Replication(facts.conninfo, facts.wakeup).close()
    except ConnectionLost as error:
        name = facts.role["rolname"]
        if not (facts.role["rolreplication"] or facts.role["rolsuper"]):
            return fail(str(error), f"alter role {identifier(name)} replication")
        return fail(str(error), error.hint)
    return ok("a replication connection works")


@check("max_slot_wal_keep_size")
def max_slot_wal_keep_size(facts: Facts) -> Finding:
    limit = int(facts.parameters["max_slot_wal_keep_size"])
    remedy = "alter system set max_slot_wal_keep_size = '10GB' (what the disk can spare); select pg_reload_conf()"
    if limit < 0:
        return warn("-1: while no relay runs, the WAL fills the disk", remedy)
    if limit < SMALL_KEEP_MB:
        return warn(f"{limit} MB: the slot is lost soon after the relay stops", remedy)
    return ok(size(limit * 1024**2))


@check("wal_sender_timeout")
def wal_sender_timeout(facts: Facts) -> Finding:
    limit = int(facts.parameters["wal_sender_timeout"])
    remedy = "alter system set wal_sender_timeout = '60s'; select pg_reload_conf()"
    if limit == 0:
        return warn("0: the server never notices a dead relay, which then holds the slot for ever", remedy)
    if limit < SHORT_SENDER_TIMEOUT_MS:
        return warn(f"{limit} ms: a short stall of the network ends the stream", remedy)
    return ok(duration(limit / 1000))


@check("idle_replication_slot_timeout")
def idle_replication_slot_timeout(facts: Facts) -> Finding:
    if facts.version < 18:
        return skip("PostgreSQL 18 and later")
    seconds = int(facts.parameters["idle_replication_slot_timeout"])
    if 0 < seconds < SHORT_IDLE_TIMEOUT_SECONDS:
        return warn(
            f"{duration(seconds)}: a relay that is down for longer finds its slot lost",
            "alter system set idle_replication_slot_timeout = 0; select pg_reload_conf()",
        )
    return ok(duration(seconds) if seconds else "off")


@check("failover")
def failover(facts: Facts) -> Finding:
    """Does the slot outlive the primary?"""
    if facts.version < 17:
        return skip("PostgreSQL 17 and later")
    if facts.slot is None:
        return skip("no slot")
    if facts.slot["failover"]:
        if facts.parameters["synchronized_standby_slots"]:
            return ok("standbys keep the slot")
        return warn(
            "standbys keep the slot, but the relay can be ahead of them",
            "alter system set synchronized_standby_slots = '<slots of the standbys>'; select pg_reload_conf()",
        )
    if any(not sender["logical"] for sender in facts.senders):
        return warn(
            "there are standbys, and they do not keep the slot",
            "`cdc-outbox drop-slot`, then `cdc-outbox init-slot --failover`; without it, init-slot after a failover",
        )
    return ok("off, and there are no standbys")


@check("synchronous_standby_names")
def synchronous_standby_names(facts: Facts) -> Finding:
    """A logical walsender counts as a standby if its application_name is listed. The relay confirms a commit only
    once it is visible, and such a commit would become visible only once the relay has confirmed it."""
    names = facts.parameters["synchronous_standby_names"]
    listed = [name.strip('"').lower() for name in re.findall(r'"(?:[^"]|"")*"|[^\s,()]+', names)]
    own = facts.parameters["application_name"]
    if "*" in listed:
        return fail(
            f"{names!r} counts the relay: commits would wait for it, and it for them",
            "alter system set synchronous_standby_names = '<the standbys, by name>'; select pg_reload_conf()",
        )
    if own.lower() in listed:
        return fail(
            f"{names!r} names the relay: commits would wait for it, and it for them",
            "give the relay another name: application_name in --dsn",
        )
    return ok(repr(names) if names else "none")
