"""The SQL in `sql/`, which a DBA reviews and psql can run, with the names of this installation filled in.

A file's placeholders are psql's own: `:"name"` for an identifier, `:'name'` for a literal, which psycopg quotes, and
`:name` for SQL as it stands, which must be a Fragment. A cast (`::"char"`) is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from psycopg import sql

_PLACEHOLDER = re.compile(r"""(?<!:):(["']?)(\w+)\1""")


class Fragment(str):
    """SQL that this program made."""

    __slots__ = ()


def identifier(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def literal(value: str) -> str:
    return sql.Literal(value).as_string(None)


def qualified(schema: str, name: str) -> str:
    return sql.Identifier(schema, name).as_string(None)


def fill(text: str, names: Mapping[str, str | Sequence[str]]) -> str:
    """`text` with each placeholder filled; a sequence becomes a list of identifiers. Raises KeyError."""

    def replacement(match: re.Match[str]) -> str:
        if not match[1]:
            plain = names.get(match[2])
            return plain if isinstance(plain, Fragment) else match[0]  # a slice, a time of day: no placeholder
        value = names[match[2]]
        if not isinstance(value, str):
            return ", ".join(identifier(name) for name in value)
        return identifier(value) if match[1] == '"' else literal(value)

    return _PLACEHOLDER.sub(replacement, text)


def statements(file: str, names: Mapping[str, str | Sequence[str]]) -> list[str]:
    """The statements of `sql/FILE`, filled in, without comments; `where` and `order` are empty unless given. A
    statement ends with `;` at the end of a line."""
    folder = Path(__file__).parent / "sql"
    if not folder.is_dir():
        folder = folder.parent.parent / "sql"  # a checkout: one source, which the wheel packs
    lines = (folder / file).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("--"))
    return [
        fill(statement.strip().removesuffix(";"), {"where": Fragment(), "order": Fragment(), **names})
        for statement in re.split(r"(?<=;)\n", text + "\n")
        if statement.strip()
    ]
