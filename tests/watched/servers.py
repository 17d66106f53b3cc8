"""Programs that stand beside Postgres and the relay: a pooler, and the monitoring. From Debian's packages."""

import json
import os
import shutil
import signal
import urllib.parse
from pathlib import Path
from typing import Any, Self

import pytest

from cdc_outbox.embedded import Account, PostgresServer, ServerProcess, accepts_connections, free_port
from tests.fix_command import get


def program(name: str, package: str) -> str:
    """Its path; skips the test where it is not installed, and fails there in CI."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")
    if found is None:
        assert os.environ.get("CI") != "true", f"CI needs `{name}`"
        pytest.skip(f"`{name}` is not installed (Debian package {package})")
    return found


class PgBouncer(ServerProcess):
    name = "PgBouncer"

    def __init__(self, postgres: PostgresServer, pool_mode: str) -> None:
        self._program = program("pgbouncer", "pgbouncer")
        super().__init__(None, Account.for_postgres(), die_with_parent=True)
        self.port = free_port()
        users = self.directory / "users"
        users.write_text('"postgres" ""\n')
        self._config = self.directory / "pgbouncer.ini"
        self._config.write_text(
            f"[databases]\n* = host=127.0.0.1 port={postgres.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {users}\npool_mode = {pool_mode}\ndefault_pool_size = 2\n"
        )

    def start(self) -> Self:
        self._spawn([self._program, self._config], {}, signal.SIGKILL)
        self._wait_ready(lambda: accepts_connections(self.port), 10)
        return self


class Prometheus(ServerProcess):
    """Scrapes one target each second."""

    name = "Prometheus"

    def __init__(self, target: str) -> None:
        self._program = program("prometheus", "prometheus")
        super().__init__(None, None, die_with_parent=True)
        self.port = free_port()
        (self.directory / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: cdc_outbox, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )

    def start(self) -> Self:
        options = {
            "config.file": self.directory / "prometheus.yml",
            "storage.tsdb.path": self.directory / "data",
            "web.listen-address": f"127.0.0.1:{self.port}",
        }
        self._spawn([self._program, *(f"--{name}={value}" for name, value in options.items())], {}, signal.SIGKILL)
        self._wait_ready(lambda: accepts_connections(self.port) and get(f"{self._url}/-/ready")[0] == 200, 30)
        return self

    def query(self, expression: str) -> dict[str, float]:
        """What each series of an instant vector, by its name or labels, has as its value now."""
        status, body = get(f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        assert status == 200, body
        result: list[dict[str, Any]] = json.loads(body)["data"]["result"]
        return {json.dumps(one["metric"], sort_keys=True): float(one["value"][1]) for one in result}

    def value(self, expression: str) -> float | None:
        found = list(self.query(expression).values())
        return found[0] if len(found) == 1 else None

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def promtool() -> Path:
    return Path(program("promtool", "prometheus"))
