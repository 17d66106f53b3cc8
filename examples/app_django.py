"""An application with Django, in one file. "cdc_outbox.contrib.django" brings the table with `migrate`."""

from __future__ import annotations

import os

import django
from django.conf import settings
from django.core.management import call_command
from django.db import connection, models, transaction
from psycopg.conninfo import conninfo_to_dict

from cdc_outbox import stage

names = {"dbname": "NAME", "host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
given = conninfo_to_dict(os.environ["DATABASE_URL"])
database = {names[name]: value for name, value in given.items() if name in names}
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}},
    INSTALLED_APPS=["cdc_outbox.contrib.django"],
    USE_TZ=True,
)
django.setup()


class Order(models.Model):
    customer = models.TextField()
    amount = models.IntegerField()

    class Meta:
        app_label = "shop"
        db_table = "orders"

    def __str__(self) -> str:
        return f"order {self.pk}"


def place_order(customer: str, amount: int) -> int:
    """Raises ValueError for an amount that is none; then there is neither an order nor a job."""
    with transaction.atomic():
        order = Order.objects.create(customer=customer, amount=amount)
        stage(connection, "send_receipt", {"order": order.pk, "customer": customer}, key=customer)
        if amount <= 0:
            raise ValueError(f"{order} has no amount")
    return int(order.pk)


def main() -> None:
    call_command("migrate", verbosity=0)
    if Order._meta.db_table not in connection.introspection.table_names():
        with connection.schema_editor() as editor:  # in one file there are no migrations of its own
            editor.create_model(Order)
    print("placed order", place_order("ann", 30))
    try:
        place_order("bob", 0)
    except ValueError as error:
        print("rolled back:", error)
    print("placed order", place_order("cid", 12))


if __name__ == "__main__":
    main()
