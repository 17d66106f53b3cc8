"""A worker with FastStream and SQLAlchemy.

NACK_ON_ERROR commits the offset after the function has returned, and goes back to the record if it raised; the default
commits before the work is done, and a crash would lose it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker, KafkaMessage
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from cdc_outbox import Inbox

inbox = Inbox()
engine = create_async_engine(os.environ["DATABASE_URL"].replace("postgresql:", "postgresql+asyncpg:", 1))
broker = KafkaBroker(os.environ["KAFKA_BOOTSTRAP_SERVERS"])
app = FastStream(broker, on_shutdown=[engine.dispose])


@broker.subscriber(
    os.environ.get("WORKER_TOPIC", "outbox"),
    group_id=os.environ.get("WORKER_GROUP", "receipts"),
    auto_offset_reset="earliest",
    ack_policy=AckPolicy.NACK_ON_ERROR,
)
async def send_receipt(args: dict[str, Any], message: KafkaMessage) -> None:
    """The effect and its claim, in one transaction."""
    async with engine.begin() as db:
        if await inbox.once(db, message):
            await db.execute(text("insert into receipts (customer, order_id) values (:customer, :order)"), args)


if __name__ == "__main__":
    asyncio.run(app.run())
