"""Django finds the app by this class."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):
    name = "cdc_outbox.contrib.django"
    label = "cdc_outbox"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"
