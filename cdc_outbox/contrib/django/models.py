"""The outbox of `sql/tables.sql` as a model: to look at, and to stage with where `cdc_outbox.stage` does not suit."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Outbox(models.Model):
    """One row is one job; it disappears once Kafka has it. Django 5 and later."""

    id = models.BigAutoField(primary_key=True)
    task = models.TextField()
    args = models.JSONField(default=dict)
    key = models.TextField(null=True)
    headers = models.JSONField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "outbox"
        verbose_name_plural = "outbox"

    def __str__(self) -> str:
        return f"{self.task} {self.pk}"
