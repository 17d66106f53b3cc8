"""Apache Kafka in KRaft mode, one node on the loopback interface, for the tests and the benchmarks.

The jars come from Maven once, into a cache folder; Java 17 or newer runs them. No container.
"""

import contextlib
import hashlib
import logging
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from cdc_outbox.embedded import ServerProcess, free_port

POM = Path(__file__).with_name("kafka") / "pom.xml"
CLUSTER_ID = "cdcOutboxTestCluster_w"  # any 16 bytes in URL-safe base64

silent = logging.getLogger("librdkafka.silent")
silent.addHandler(logging.NullHandler())
silent.propagate = False


class KafkaUnavailable(Exception):
    """Why Apache Kafka cannot run on this machine."""


class KafkaServer(ServerProcess):
    """One Apache Kafka node, broker and controller in one; its data lives until `close()`.

    `bootstrap` is for everyone. `proxied_bootstrap` leads to the port `proxy_port`, where a test
    puts a proxy in front of `proxied_port`: a client that starts there stays there, since that
    listener advertises the proxy. Topics are not created automatically, and an authorizer allows
    whatever no ACL forbids (`User:ANONYMOUS` is everyone).
    """

    name = "Apache Kafka"

    def __init__(
        self,
        *,
        directory: Path | None = None,
        heap: str = "512m",
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._jars = jars()
        super().__init__(directory, None, die_with_parent=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._heap = heap
        self.port, self._controller_port = free_port(), free_port()
        self.proxied_port, self.proxy_port = free_port(), free_port()
        self.settings: dict[str, object] = {
            **self._listeners(),
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "log.dirs": self.directory / "data",
            "auto.create.topics.enable": "false",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
            "offsets.topic.num.partitions": 1,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            "log.cleaner.dedupe.buffer.size": 16 << 20,
            "broker.heartbeat.interval.ms": 500,
            "broker.session.timeout.ms": 2000,  # a killed broker comes back after this long
            **(settings or {}),
        }

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def proxied_bootstrap(self) -> str:
        return f"127.0.0.1:{self.proxy_port}"

    def start(self, deadline_seconds: float = 90) -> Self:
        """Returns when the broker answers; formats the log folder the first time."""
        properties = self.directory / "server.properties"
        properties.write_text("".join(f"{k}={v}\n" for k, v in self.settings.items()))
        if not (self.directory / "data" / "meta.properties").exists():
            self._format(properties)
        self._spawn(self._java("kafka.Kafka", properties), self._env(), signal.SIGKILL)
        self._wait_ready(self._answers, deadline_seconds)
        return self

    def stop(self, deadline_seconds: float = 30) -> None:
        """A clean shutdown; the data stay for the next `start()`."""
        self.send_signal(signal.SIGTERM)
        self._wait_end(deadline_seconds)

    def restart(self) -> None:
        self.stop()
        self.start()

    def _listeners(self) -> dict[str, object]:
        ports = {
            "PLAINTEXT": (self.port, self.port),
            "PROXIED": (self.proxied_port, self.proxy_port),
        }
        return {
            "listeners": ",".join(
                [f"{name}://127.0.0.1:{port}" for name, (port, _) in ports.items()]
                + [f"CONTROLLER://127.0.0.1:{self._controller_port}"]
            ),
            "advertised.listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, (_, port) in ports.items()),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in (*ports, "CONTROLLER")),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
        }

    def _format(self, properties: Path) -> None:
        tool = self._java("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", properties)
        done = subprocess.run(tool, capture_output=True, text=True, env=self._env(), check=False)
        if done.returncode:
            raise KafkaUnavailable(f"StorageTool failed: {(done.stderr or done.stdout).strip()}")

    def _java(self, main: str, *args: str | Path) -> list[str | Path]:
        java = shutil.which("java") or "java"
        options = [f"-Xmx{self._heap}", "-Xshare:auto", "-XX:+UseSerialGC"]
        return [java, *options, "-cp", f"{self._jars}/*", main, *args]

    def _env(self) -> dict[str, str]:
        return {name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ}

    def _answers(self) -> bool:
        admin = AdminClient({"bootstrap.servers": self.bootstrap}, logger=silent)
        with contextlib.suppress(KafkaException):
            return bool(admin.list_topics(timeout=2).brokers)
        return False


def jars() -> Path:
    """The folder of Kafka's jars, fetched by Maven when they are not in the cache yet."""
    for program in ("java", "mvn"):
        if not shutil.which(program):
            raise KafkaUnavailable(f"`{program}` is not installed")
    key = hashlib.sha256(POM.read_bytes()).hexdigest()[:12]
    target = _cache_directory() / f"kafka-{key}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent))
    args = ["mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies"]
    args.append(f"-DoutputDirectory={draft}")
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(draft)
        lines = [line for line in done.stdout.splitlines() if "ERROR" in line] or ["no message"]
        raise KafkaUnavailable(f"Maven failed: {lines[0]}")
    try:
        draft.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(draft)
    return target


def _cache_directory() -> Path:
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "cdc-outbox"
    home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    return Path(home) / ".cache" / "cdc-outbox"
