"""The lowest versions of the libraries that pyproject.toml allows, for pip: `python tests/lowest.py`."""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest() -> list[str]:
    """`psycopg[binary]>=3.3` becomes `psycopg[binary]==3.3`."""
    found: list[str] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    pinned = [re.sub(r">=([\d.]+)$", r"==\1", dependency) for dependency in found]
    assert all("==" in dependency for dependency in pinned), "a dependency without a floor of the form >=1.2"
    return pinned


if __name__ == "__main__":
    print("\n".join(lowest()))
