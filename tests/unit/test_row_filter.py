"""Which rows are a shard's, as SQL. That Postgres agrees is in integration/test_shards.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_outbox.config import MOST_SHARDS, Shard
from cdc_outbox.errors import PreconditionError
from cdc_outbox.event import RecordFormat
from cdc_outbox.objects import Column
from cdc_outbox.row_filter import row_filter, same

# As PostgreSQL 15 to 18 print it.
PRINTED = (
    '(mod((COALESCE(hashtextextended((key COLLATE "C"), (0)::bigint), hashtextextended((task COLLATE "C"),'
    " (0)::bigint), (0)::bigint) & '9223372036854775807'::bigint), (3)::bigint) = 1)"
)


def table(**types: str) -> list[Column]:
    return [Column(name, kind, False, False) for name, kind in types.items()]


def wanted(shard: str = "2/3", record_format: RecordFormat | None = None, **types: str) -> str:
    columns = table(**(types or {"task": "text", "key": "text"}))
    return row_filter(Shard.parse(shard), columns, record_format or RecordFormat())


@pytest.mark.parametrize(
    "text", ["0/3", "4/3", "1", "1/0", "-1/3", "+1/3", " 1/3", "1/3/5", "a/b", "1/257", "", "\u0661/\u0663"]
)
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a shard such as 1/3"):
        Shard.parse(text)


@given(st.integers(1, MOST_SHARDS).flatmap(lambda count: st.tuples(st.integers(1, count), st.just(count))))
def test_a_shard_is_what_it_is_written_as_and_one_of_its_set(pair: tuple[int, int]) -> None:
    shard = Shard(*pair)
    assert Shard.parse(str(shard)) == shard
    assert shard.siblings().count(shard) == 1
    assert len({sibling.name("cdc_outbox") for sibling in shard.siblings()}) == shard.count
    assert not {sibling.name("s") for sibling in Shard(1, shard.count + 1).siblings()} & {shard.name("s")}


def test_a_filter_is_recognised_as_postgres_prints_it_and_no_other_is() -> None:
    assert same(PRINTED, wanted())
    for other in (wanted("1/3"), wanted("2/4"), wanted(task="text"), wanted(key="text", task="uuid"), "true", ""):
        assert not same(PRINTED, other)
    mapped = RecordFormat(columns={"key": "customer"})
    assert not same(PRINTED, wanted(record_format=mapped, customer="text", task="text", key="text"))
    assert not same(PRINTED.replace("= 1", "= 2"), wanted())


def test_a_table_without_a_key_is_sharded_by_task() -> None:
    assert "key" not in wanted(task="text")


@pytest.mark.parametrize("kind", ["color", "jsonb", "numeric(10,2)", "bytea", "timestamp with time zone", "text[]"])
def test_a_type_that_no_filter_takes_is_named(kind: str) -> None:
    with pytest.raises(PreconditionError, match="column key is of type") as error:
        wanted(key=kind, task="text")
    assert kind in str(error.value)


def test_a_table_with_neither_is_refused() -> None:
    with pytest.raises(PreconditionError, match="no column task"):
        wanted(id="bigint")
