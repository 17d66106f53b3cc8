"""An application with psycopg: an order and the job that follows from it, in one transaction."""

from __future__ import annotations

import os
from typing import Any

import psycopg

from cdc_outbox import stage


def place_order(db: psycopg.Connection[Any], customer: str, amount: int) -> int:
    """Raises ValueError for an amount that is none; then there is neither an order nor a job."""
    with db.transaction():
        insert = "insert into orders (customer, amount) values (%s, %s) returning id"
        ((order,),) = db.execute(insert, [customer, amount]).fetchall()
        # The key keeps the jobs of one customer in order.
        stage(db, "send_receipt", {"order": order, "customer": customer}, key=customer)
        if amount <= 0:
            raise ValueError(f"order {order} has no amount")
    return int(order)


def main() -> None:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as db:
        db.execute(
            "create table if not exists orders (id bigint generated always as identity primary key,"
            " customer text not null, amount int not null)"
        )
        print("placed order", place_order(db, "ann", 30))
        try:
            place_order(db, "bob", 0)
        except ValueError as error:
            print("rolled back:", error)
        print("placed order", place_order(db, "cid", 12))


if __name__ == "__main__":
    main()
