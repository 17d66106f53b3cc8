"""The outbox as a Django app: put "cdc_outbox.contrib.django" into INSTALLED_APPS, and `migrate` makes the table."""
