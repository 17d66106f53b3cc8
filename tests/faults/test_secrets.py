"""A password is for whom it is meant: it stands in no log, no page and no process list, whatever goes wrong."""

from pathlib import Path

import pytest

from tests.fix_command import get
from tests.relay_rig import metrics_url
from tests.slot_rig import SlotRig

MARKER = "Marker-7f3a'%40"


@pytest.mark.parametrize("where", ["environment", "file"])
def test_a_kafka_password_is_shown_by_nothing_that_librdkafka_logs(ready: SlotRig, tmp_path: Path, where: str) -> None:
    """C58 (toncenter/ton-indexer#101, spotify/XCMetrics#98): everything logged that can be, and a broker that does not
    understand us."""
    properties = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "user",
        "sasl.password": MARKER,
        "debug": "all",
    }
    given = [f"{name}={value}" for name, value in properties.items()]
    dsn = f"postgresql://postgres:{MARKER.replace('%', '%25')}@127.0.0.1:{ready.database.server.port}"
    dsn += f"/{ready.database.name}"
    path = tmp_path / "relay.toml"
    lines = ", ".join(f'"{one}"' for one in given)
    path.write_text(f'dsn = "{dsn}"\nproperty = [{lines}]\n')
    path.chmod(0o600)
    environment = {"CDC_OUTBOX_DSN": dsn, "CDC_OUTBOX_PROPERTY": " ".join(given)}
    names = ["--slot", ready.slot, "--publication", ready.publication, "-b", ready.broker.bootstrap, "-t", ready.topic]
    options = [*names, "--metrics-address", "127.0.0.1:0", "--log-level", "debug", "--shutdown-timeout", "1s"]
    if where == "file":
        relay = ready.command.start("stream", "--config", path, *options)
    else:
        relay = ready.command.start("stream", *options, env=environment)
    ready.stage(count=3)
    relay.wait_for_log("streaming ", 40)
    pages = [get(f"{metrics_url(relay)}/{page}")[1] for page in ("", "metrics", "readyz", "healthz")]
    listed = Path(f"/proc/{relay.pid}/cmdline").read_text()
    assert relay.terminate() == 0
    log = relay.stderr_text()
    assert "sasl" in log.lower()
    for text in (log, relay.stdout_text(), listed, *pages):
        assert MARKER not in text
        assert MARKER[:11] not in text
