"""cdc-outbox: relays committed rows of an outbox table from Postgres's WAL to Kafka.

Here is what an application and its workers import. It imports the standard library only.
"""

from cdc_outbox.inbox import Inbox
from cdc_outbox.stage import Job, NotInTransaction, stage, stage_many

__all__ = ["Inbox", "Job", "NotInTransaction", "__version__", "stage", "stage_many"]

__version__ = "0.1.0"
