"""A delivery report that is late: nothing is confirmed without it, whenever it comes."""

import pytest
from psycopg.conninfo import make_conninfo

from tests.fix_proxy import StartProxy
from tests.relay_rig import RelayRig, commit_lsn, metric, standard_check
from tests.waiting import eventually

pytestmark = pytest.mark.kafka_only


class Held:
    """A relay whose records reach Kafka, and whose acknowledgements do not come back."""

    def __init__(self, rig: RelayRig, proxy: StartProxy) -> None:
        kafka = rig.broker.kafka
        self.rig = rig
        self.kafka = proxy(kafka.proxied_port, listen_port=kafka.proxy_port)
        self.postgres = proxy(rig.database.server.port)
        self.relay = rig.stream(
            *("--bootstrap-servers", kafka.proxied_bootstrap),
            *("--dsn", make_conninfo(rig.database.dsn, port=self.postgres.port)),
        )
        self.rows = rig.stage(count=3)
        rig.wait_until_confirmed(commit_lsn(rig.wait_for(self.rows)[-1]))
        self.kafka.stall("to_client")
        self.held = rig.stage(count=5)
        records = rig.wait_for(self.held)  # Kafka has them, and the relay does not know
        self.commit_lsn = min(commit_lsn(record) for record in records[len(self.rows) :])
        self.rows += self.held + rig.stage("other", 5)
        eventually(lambda: metric(self.relay, "cdc_outbox_in_flight_rows") >= 10, 20, "ten rows are in flight")

    def terminate_walsender(self) -> None:
        """And let nobody connect, until `postgres.accept()`."""
        query = "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s"
        self.rig.database.fetch(query, (self.rig.slot,))
        self.postgres.refuse()
        self.relay.wait_for_log("starting over", 30)

    def nothing_is_confirmed(self) -> None:
        assert self.rig.confirmed <= self.commit_lsn

    def everything_arrives(self) -> int:
        self.rows += self.rig.stage(count=5) + self.rig.stage("other", 5)
        self.rig.wait_for(self.rows)
        assert self.relay.terminate() == 0
        self.rig.catch_up()
        return standard_check(self.rows, [], self.rig.read())


@pytest.fixture
def held(rig: RelayRig, proxy: StartProxy) -> Held:
    return Held(rig, proxy)


def test_a_report_that_comes_between_two_sessions_confirms_nothing(held: Held) -> None:
    held.terminate_walsender()
    held.kafka.resume()
    held.nothing_is_confirmed()
    held.postgres.accept()
    assert held.everything_arrives() >= len(held.held)


def test_a_report_that_comes_after_the_next_session_began_confirms_nothing(held: Held) -> None:
    held.terminate_walsender()
    held.postgres.accept()
    eventually(lambda: held.relay.stderr_text().count("streaming ") == 2, 30, "the next session")
    # It has read the rows again, and says so at each status update.
    eventually(lambda: metric(held.relay, "cdc_outbox_in_flight_rows") >= 10, 20, "its own rows are in flight")
    held.nothing_is_confirmed()
    held.kafka.resume()
    assert held.everything_arrives() >= len(held.held)
