"""What waits inside TLS is taken, though the socket has nothing more to show."""

import socket
from collections.abc import Iterator
from typing import cast

import pytest
from psycopg import pq

from cdc_outbox.query import TLS_READS, take_input


class Connection:
    """A TLS record of 16 kB is decrypted whole, and libpq takes at least 8 kB of it a call. The socket is real, and
    nothing is in it."""

    def __init__(self, reader: socket.socket, reads_needed: int, ssl_in_use: bool = True) -> None:
        self.socket = reader.fileno()
        self.ssl_in_use = ssl_in_use
        self.reads = 0
        self._reads_needed = reads_needed

    def consume_input(self) -> None:
        self.reads += 1

    def is_busy(self) -> bool:
        return self.reads < self._reads_needed

    def taken(self) -> bool:
        take_input(cast(pq.abc.PGconn, self))
        return not self.is_busy()


@pytest.fixture
def dry() -> Iterator[socket.socket]:
    reader, writer = socket.socketpair()
    with reader, writer:
        yield reader


def test_an_answer_inside_a_tls_record_is_taken_whole(dry: socket.socket) -> None:
    assert Connection(dry, 3).taken()
    assert TLS_READS >= 2


def test_an_answer_that_is_not_there_yet_is_not_waited_for(dry: socket.socket) -> None:
    connection = Connection(dry, 1000)
    assert not connection.taken()
    assert connection.reads <= 1 + TLS_READS


def test_without_tls_one_read_takes_what_the_socket_has_and_poll_tells_of_the_rest(dry: socket.socket) -> None:
    connection = Connection(dry, 3, ssl_in_use=False)
    assert not connection.taken()
    assert connection.reads == 1
