from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_outbox.statements import Fragment, fill, identifier, literal, qualified, statements

TRICKY = [
    "plain",
    "Capital",
    "a b",
    "50%",
    "%s",
    "{x}",
    'qu"ote',
    "apo'strophe",
    "back\\slash",
    "größe ✓",
    ":x",
    ':"x"',
    "semi;colon",
    "--",
]
TABLES = {
    "schema": "public",
    "outbox": "outbox",
    "checkpoint": "c",
    "dead_letter": "d",
    "archive": "a",
    "archived_at": "i",
}
FILES = sorted(path.name for path in (Path(__file__).parents[2] / "sql").glob("*.sql"))


def unquote(text: str) -> str:
    assert text[0] == text[-1] == '"'
    return text[1:-1].replace('""', '"')


@pytest.mark.parametrize("name", TRICKY)
def test_a_tricky_name_is_quoted_and_keeps_every_character(name: str) -> None:
    assert unquote(identifier(name)) == name
    assert qualified(name, "t") == f'{identifier(name)}."t"'
    assert fill('from :"t" x', {"t": name}) == f"from {identifier(name)} x"


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_any_name_is_quoted_and_keeps_every_character(name: str) -> None:
    assert unquote(identifier(name)) == name


def test_quotes_are_doubled() -> None:
    assert identifier('a"b') == '"a""b"'
    assert literal("a'b") == "'a''b'"
    assert literal("100%") == "'100%'"
    assert qualified('s"', "T") == '"s"""."T"'


def test_a_value_that_looks_like_a_placeholder_is_not_filled_again() -> None:
    assert fill(""":"a" :"b" """, {"a": ':"b"', "b": "x"}) == '":""b""" "x" '
    assert fill(""":'a' :'b'""", {"a": ":'b'", "b": "x"}) == """':''b''' 'x'"""


def test_a_sequence_becomes_a_list_of_identifiers() -> None:
    assert fill('(:"columns")', {"columns": ["id", 'a"b', "C"]}) == '("id", "a""b", "C")'


def test_casts_and_unfinished_placeholders_stay_as_they_are() -> None:
    text = """select 1::text, x::"char", ':', :name, :"a'"""
    assert fill(text, {}) == text


def test_sql_of_our_own_is_filled_in_as_it_stands_and_nothing_else_is() -> None:
    text = "select a[1:b] from t :where -- 12:30:where"
    assert fill(text, {"where": Fragment("where x")}) == "select a[1:b] from t where x -- 12:30where x"
    assert fill(text, {"where": "where x", "b": "y"}) == text


def test_without_a_shard_there_is_no_row_filter() -> None:
    names = {**TABLES, "publication": "p", "columns": ["id"]}
    for file in ("publication.sql", "requeue.sql"):
        (statement,) = statements(file, names)
        assert "where" not in statement


def test_a_placeholder_without_a_value_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="missing"):
        fill(""":"missing" """, {})


def test_the_files_statements_come_without_comments_and_in_order() -> None:
    found = statements("tables.sql", TABLES)
    assert [statement.split("(")[0].strip() for statement in found] == [
        'create table if not exists "public"."outbox"',
        'create table if not exists "public"."c"',
        'create table if not exists "public"."d"',
        'create table if not exists "public"."a" as\n    select *, now',
        'create index if not exists "i" on "public"."a"',
    ]
    assert not any("--" in statement for statement in found)
    assert not any(statement.endswith(";") for statement in found)


def test_a_name_with_a_semicolon_or_a_newline_does_not_end_a_statement() -> None:
    (publication,) = statements("publication.sql", {**TABLES, "publication": "a;\n--b", "outbox": "drop;\n"})
    assert publication.startswith('create publication "a;\n--b" for table "public"."drop;\n"')


@pytest.mark.parametrize("file", FILES)
def test_every_file_fills_with_tricky_names(file: str) -> None:
    names = dict.fromkeys([*TABLES, "publication", "slot", "limit", "column", "inbox", "inbox_done_at"], 'Ä"%s')
    names |= dict.fromkeys(["app_role", "relay_role"], "Role 'x'")
    text = ";".join(statements(file, {**names, "columns": ["id", 'Ä"%s']}))
    assert text
    assert ':"' not in text
    assert ":'" not in text
