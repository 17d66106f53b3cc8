"""An application with SQLAlchemy's ORM. `outbox_table` puts the outbox into its metadata, where alembic sees it."""

from __future__ import annotations

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cdc_outbox import stage
from cdc_outbox.contrib.sqlalchemy import outbox_table


class Base(DeclarativeBase):
    pass


outbox_table(Base.metadata)


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int]


def place_order(session: Session, customer: str, amount: int) -> int:
    """Raises ValueError for an amount that is none; then there is neither an order nor a job."""
    with session.begin():
        order = Order(customer=customer, amount=amount)
        session.add(order)
        session.flush()  # the id
        stage(session, "send_receipt", {"order": order.id, "customer": customer}, key=customer)
        if amount <= 0:
            raise ValueError(f"order {order.id} has no amount")
        return order.id


def main() -> None:
    engine = create_engine(os.environ["DATABASE_URL"].replace("postgresql:", "postgresql+psycopg:", 1))
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        print("placed order", place_order(session, "ann", 30))
        try:
            place_order(session, "bob", 0)
        except ValueError as error:
            print("rolled back:", error)
        print("placed order", place_order(session, "cid", 12))
    engine.dispose()


if __name__ == "__main__":
    main()
