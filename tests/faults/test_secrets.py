"""A password is for whom it is meant: it stands in no log, no page and no process list, whatever goes wrong."""

import contextlib
import http.client
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.fix_command import get
from tests.relay_rig import metrics_url
from tests.secure_kafka import PASSWORD, USER
from tests.slot_rig import SlotRig

MARKER = "Marker-7f3a'%40"


@pytest.mark.kafka_only
@pytest.mark.parametrize("where", ["environment", "file"])
def test_a_kafka_password_is_shown_by_nothing_that_librdkafka_logs(ready: SlotRig, tmp_path: Path, where: str) -> None:
    """C58 (toncenter/ton-indexer#101, spotify/XCMetrics#98): everything logged that can be, by a relay that is let in
    and by one that is not."""
    kafka = ready.broker.secure
    properties = {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(kafka.authority.certificate),
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": PASSWORD,
        "debug": "all",
    }
    given = [f"{name}={value}" for name, value in properties.items()]
    dsn = f"postgresql://postgres:{quote(MARKER)}@127.0.0.1:{ready.database.server.port}/{ready.database.name}"
    path = tmp_path / "relay.toml"
    lines = ", ".join(f'"{one}"' for one in given)
    path.write_text(f'dsn = "{dsn}"\nproperty = [{lines}]\n')
    path.chmod(0o600)
    names = ["--slot", ready.slot, "--publication", ready.publication, "-t", ready.topic]
    options = [*names, "--metrics-address", "127.0.0.1:0", "--log-level", "debug", "--shutdown-timeout", "1s"]
    options += ["-b", f"127.0.0.1:{kafka.ports['SASL_TLS']}"]
    if where == "file":
        options, environment = ["--config", str(path), *options], {}
    else:
        environment = {"CDC_OUTBOX_DSN": dsn, "CDC_OUTBOX_PROPERTY": " ".join(given)}
    relay = ready.command.start("stream", *options, env=environment)
    ready.wait_for(ready.stage(count=3))
    pages = [get(f"{metrics_url(relay)}/{page}")[1] for page in ("", "status.json", "metrics", "readyz", "healthz")]
    listed = Path(f"/proc/{relay.pid}/cmdline").read_text()
    assert relay.terminate() == 0
    log = relay.stderr_text()
    assert "sasl" in log.lower()
    path.write_text(path.read_text().replace(f"sasl.username={USER}", "sasl.username=nobody"))
    environment = {name: value.replace(f"username={USER}", "username=nobody") for name, value in environment.items()}
    shut_out = ready.command.run("stream", *options, env=environment)
    assert shut_out.returncode == 3
    for text in (log, relay.stdout_text(), listed, shut_out.stderr, *pages):
        for secret in (MARKER, MARKER[:11], PASSWORD, PASSWORD[:12]):
            assert secret not in text


# An exception that nobody expected, and that quotes what it was given: raised by the line of code in each place.
CRASHES = {
    "the loop": ("session", "Session._account = boom", 1),
    "the connection": ("session", "Session.open = boom", 1),
    "a delivery report": ("reader", "Reader._report_for = lambda self, _: boom", 1),
    "the purge": ("purge", "Purge.round = boom", 1),
    "a page": ("metrics", "Figures.not_ready = boom", 0),
    "a reading of the slot": ("slot_watch", "SlotWatch._read = boom", 0),
}
BOOM = """
from pathlib import Path
from cdc_outbox import {module}
from cdc_outbox.{module} import *

def boom(*args, **kwargs):
    raise RuntimeError(Path(__file__).with_name("quoted").read_text())

{line}
"""


@pytest.mark.parametrize(
    ("where", "log_format"),
    [*((where, "text") for where in CRASHES), ("the loop", "json"), ("a reading of the slot", "json")],
)
def test_an_exception_that_quotes_the_passwords_shows_none_of_them(
    ready: SlotRig, tmp_path: Path, where: str, log_format: str
) -> None:
    """C58, the kind of it: at the level debug, with the traceback."""
    module, line, exit_code = CRASHES[where]
    kafka = 'Kafka-Marker "x" ä\''
    dsn = f"postgresql://postgres:{quote(MARKER)}@127.0.0.1:{ready.database.server.port}/{ready.database.name}"
    quoted = f"{dsn} password='{MARKER}' sasl.password={kafka}"
    (tmp_path / "sitecustomize.py").write_text(BOOM.format(module=module, line=line))
    (tmp_path / "quoted").write_text(quoted)
    path = tmp_path / "relay.toml"
    path.write_text(f"dsn = '''{dsn}'''\n[property]\n'ssl.key.password' = '''{kafka}'''\n")
    names = ["--slot", ready.slot, "--publication", ready.publication, "-b", ready.broker.bootstrap, "-t", ready.topic]
    options = ["--metrics-address", "127.0.0.1:0", "--log-level", "debug", "--log-format", log_format]
    more = ["--purge-every", "100ms", "--config", path]
    environment = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ready.stage(count=3)
    relay = ready.command.start("stream", *names, *options, *more, env=environment)
    pages = []
    if exit_code == 0:
        relay.wait_for_log("streaming ", 40)
        for page in ("readyz", "status.json", "metrics", ""):
            with contextlib.suppress(OSError, http.client.HTTPException):  # the page that crashes is cut short
                pages.append(get(f"{metrics_url(relay)}/{page}")[1])
        assert relay.terminate(30) == 0
    else:
        assert relay.wait(40) == exit_code
        assert "unexpected RuntimeError" in relay.stderr_text()
    for text in (relay.stderr_text(), relay.stdout_text(), *pages):
        for secret in (MARKER, MARKER[:11], quote(MARKER), kafka, kafka[:12]):
            assert secret not in text
