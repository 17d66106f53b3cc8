"""A TCP proxy that misbehaves on request: cuts, stalls, slows down, refuses."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Literal, Protocol, TypeVar

import pytest

Direction = Literal["both", "to_server", "to_client"]
T = TypeVar("T")
CHUNK = 65536


class _Flow:
    """How one direction behaves. Belongs to the proxy's event loop."""

    def __init__(self) -> None:
        self.moving = asyncio.Event()
        self.moving.set()
        self.bytes_per_second: float | None = None
        self.delay = 0.0
        self.forwarded = 0

    @property
    def chunk(self) -> int:
        if self.bytes_per_second is None:
            return CHUNK
        return max(1, min(CHUNK, int(self.bytes_per_second / 20)))

    async def admit(self, size: int) -> None:
        await self.moving.wait()
        wait = self.delay + (size / self.bytes_per_second if self.bytes_per_second else 0)
        if wait:
            await asyncio.sleep(wait)  # the slowness that the test asked for
            await self.moving.wait()


class Proxy:
    """Listens on 127.0.0.1:`port`, forwards to a server. Every method returns when it is done."""

    def __init__(self, host: str, port: int, listen_port: int = 0) -> None:
        self._server_address = (host, port)
        self._links: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = listen_port
        self._run(self._open())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._links)

    @property
    def bytes_to_server(self) -> int:
        return self._flows["to_server"].forwarded

    @property
    def bytes_to_client(self) -> int:
        return self._flows["to_client"].forwarded

    def cut(self) -> int:
        """Resets every connection (RST); new ones are taken. Returns how many were cut."""
        return self._run(self._cut())

    def refuse(self) -> None:
        """Cuts every connection and refuses new ones, until `accept()`."""
        self._run(self._refuse())

    def accept(self) -> None:
        """Takes connections again, on the same port."""
        self._run(self._listen())

    def stall(self, direction: Direction = "both") -> None:
        """Forwards nothing any more; connections stay open, new ones are taken and stall too."""
        self._each(direction, lambda flow: flow.moving.clear())

    def resume(self, direction: Direction = "both") -> None:
        """Ends `stall()`; nothing was lost."""
        self._each(direction, lambda flow: flow.moving.set())

    def slow(
        self,
        bytes_per_second: float | None = None,
        delay: float = 0,
        direction: Direction = "both",
    ) -> None:
        """Limits the throughput, delays each piece by some seconds, or (no argument) neither."""

        def set_pace(flow: _Flow) -> None:
            flow.bytes_per_second, flow.delay = bytes_per_second, delay

        self._each(direction, set_pace)

    def close(self) -> None:
        self._run(self._refuse())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _each(self, direction: Direction, change: Callable[[_Flow], None]) -> None:
        async def apply() -> None:
            for name, flow in self._flows.items():
                if direction in ("both", name):
                    change(flow)

        self._run(apply())

    async def _open(self) -> None:
        self._flows = {"to_server": _Flow(), "to_client": _Flow()}
        self._acceptor: asyncio.Task[None] | None = None
        await self._listen()

    async def _listen(self) -> None:
        if self._acceptor is not None:
            return
        listener = socket.create_server(("127.0.0.1", self.port), backlog=100)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._acceptor = self._loop.create_task(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                client, _ = await self._loop.sock_accept(listener)
                link = self._loop.create_task(self._serve(client))
                self._links.add(link)
                link.add_done_callback(self._links.discard)

    async def _serve(self, client: socket.socket) -> None:
        """One connection. Ends orderly when both sides did, else with a reset to both."""
        with client, socket.socket() as server:
            for side in (client, server):
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _reset_on_close(side, True)
            try:
                await self._loop.sock_connect(server, self._server_address)
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(client, server, self._flows["to_server"]))
                    pumps.create_task(self._pump(server, client, self._flows["to_client"]))
            except (OSError, ExceptionGroup):
                return
            _reset_on_close(client, False)
            _reset_on_close(server, False)

    async def _pump(self, source: socket.socket, sink: socket.socket, flow: _Flow) -> None:
        while piece := await self._loop.sock_recv(source, flow.chunk):
            await flow.admit(len(piece))
            await self._loop.sock_sendall(sink, piece)
            flow.forwarded += len(piece)
        await flow.moving.wait()
        sink.shutdown(socket.SHUT_WR)  # one side may end before the other

    async def _cut(self) -> int:
        links = list(self._links)
        await _cancel(links)
        return len(links)

    async def _refuse(self) -> None:
        if self._acceptor is not None:
            await _cancel([self._acceptor])
            self._acceptor = None
        await self._cut()


def _reset_on_close(side: socket.socket, reset: bool) -> None:
    # socket(7): a linger time of zero makes close() send RST and drop what was buffered.
    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class StartProxy(Protocol):
    def __call__(self, port: int, *, host: str = "127.0.0.1", listen_port: int = 0) -> Proxy: ...


@pytest.fixture
def proxy() -> Iterator[StartProxy]:
    """Starts proxies: `proxy(port)` listens on a free port; closed at the end of the test."""
    with ExitStack() as stack:

        def start(port: int, *, host: str = "127.0.0.1", listen_port: int = 0) -> Proxy:
            started = Proxy(host, port, listen_port)
            stack.callback(started.close)
            return started

        yield start
