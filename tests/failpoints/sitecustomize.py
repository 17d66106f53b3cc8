"""kill -9 at a named place, the N-th time that a process comes there.

Python imports this module at its start if this folder is in PYTHONPATH; FAILPOINT is `NAME` or `NAME:N`. So the
package carries no hook, and what runs under test is what ships.
"""

import functools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from cdc_outbox import purge
from cdc_outbox.inflight import InFlight
from cdc_outbox.kafka import KafkaProducer
from cdc_outbox.query import Queries
from cdc_outbox.replication import Replication
from cdc_outbox.session import Session
from cdc_outbox.setup import Setup
from cdc_outbox.visibility import VisibilityGate

Condition = Callable[..., object]
left = 0


def die() -> None:
    global left
    left -= 1
    if left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, when: Condition = lambda *args, **named: True) -> None:
    """Die at a call of `owner.name` whose arguments are those of interest."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **named: Any) -> Any:
        if when(*args, **named):
            die()
        return function(*args, **named)

    setattr(owner, name, wrapper)


def after(owner: Any, name: str, when: Condition = lambda *args, **named: True) -> None:
    """The same once it has returned; `receive` and `advance` often have nothing."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **named: Any) -> Any:
        found = function(*args, **named)
        if when(*args, **named) and (found or name not in ("receive", "advance")):
            die()
        return found

    setattr(owner, name, wrapper)


def asking(doing: str) -> Condition:
    """A question of Queries.ask, by what it is for."""

    def is_it(queries: Queries, query: str, parameters: object, answered: object, what: str, *rest: object) -> bool:
        return what == doing

    return is_it


def calling(query: str, purpose: str) -> Condition:
    """A statement of Queries.call that begins so."""

    def is_it(queries: Queries, text: str, parameters: object = (), *, doing: str, seconds: float = 0.0) -> bool:
        return doing == purpose and text.lstrip().startswith(query)

    return is_it


def when_answered(doing: str) -> None:
    """Die when the answer is here and nobody has heard of it."""
    ask = Queries.ask

    def wrapper(
        self: Queries, query: str, parameters: Sequence[object], answered: Callable[..., None], what: str, *rest: float
    ) -> None:
        def heard(rows: object) -> None:
            if what == doing:
                die()
            answered(rows)

        ask(self, query, parameters, heard, what, *rest)

    Queries.ask = wrapper  # type: ignore[assignment]


def around_produce(place: Callable[..., None]) -> None:
    """`produce` is librdkafka's own, an attribute of each producer."""
    make = KafkaProducer.__init__

    def wrapper(self: KafkaProducer, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        place(self, "produce")

    KafkaProducer.__init__ = wrapper  # type: ignore[method-assign]


def in_execute(statement: str, place: Callable[..., None]) -> None:
    """At a statement of `init-slot` that begins so."""
    place(Setup, "_execute", lambda self, text, *, doing: text.lstrip().startswith(statement))


STORING, PURGING = "storing the checkpoint", "purging"
DELETE = "with relayed"

STREAM: dict[str, Callable[[], None]] = {
    "after the slot was taken": lambda: after(Session, "_take_slot"),
    "after a message was received": lambda: after(Replication, "receive"),
    "before a snapshot is learnt": lambda: before(VisibilityGate, "learn"),
    "before a row is produced": lambda: around_produce(before),
    "after a row was produced": lambda: around_produce(after),
    "after acknowledgements, before anything is confirmed": lambda: after(InFlight, "advance"),
    "before the checkpoint is written": lambda: before(Queries, "ask", asking(STORING)),
    "while the checkpoint is written": lambda: after(Queries, "ask", asking(STORING)),
    "after the checkpoint was written": lambda: when_answered(STORING),
    "before a status update": lambda: before(Replication, "send_status"),
    "after a status update": lambda: after(Replication, "send_status"),
}
DEAD_LETTER: dict[str, Callable[[], None]] = {
    "before a dead letter is stored": lambda: before(Queries, "ask", asking("storing a dead letter")),
    "after a dead letter was stored": lambda: when_answered("storing a dead letter"),
}
STOP: dict[str, Callable[[], None]] = {
    "at a stop, before the last goodbye": lambda: before(Replication, "finish"),
    "at a stop, before the producer is emptied": lambda: after(Session, "close"),
}
PURGE: dict[str, Callable[[], None]] = {
    "after the purge has looked": lambda: after(purge, "_look"),
    "before a batch is deleted": lambda: before(Queries, "call", calling(DELETE, PURGING)),
    "between a delete and its commit": lambda: before(Queries, "call", calling("commit", PURGING)),
    "between two batches": lambda: after(purge, "_transaction", lambda queries, text, values, doing: doing == PURGING),
}
INIT_SLOT: dict[str, Callable[[], None]] = {
    "before the publication is made": lambda: before(Setup, "_make_publication"),
    "before the slot is created": lambda: before(Setup, "_make_slot"),
    "while the slot is created": lambda: after(Queries, "ask", asking("creating the slot")),
    "after the slot was created": lambda: after(Setup, "_make_slot"),
    "before the requeue": lambda: in_execute("with moved", before),
    "amid the requeue": lambda: in_execute("with moved", after),
    "before the requeue is committed": lambda: in_execute("commit", before),
    "after the requeue was committed": lambda: in_execute("commit", after),
}

PLACES = STREAM | DEAD_LETTER | STOP | PURGE | INIT_SLOT

if place := os.environ.get("FAILPOINT"):
    name, _, count = place.partition(":")
    left = int(count or 1)
    PLACES[name]()
