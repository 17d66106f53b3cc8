"""cdc-outbox: relays committed rows of an outbox table from Postgres's WAL to Kafka."""

__version__ = "0.1.0"
