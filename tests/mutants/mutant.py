"""A mutant: one place of what ships, broken on purpose, and the tests that should find it."""

from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`file` is in `cdc_outbox/` or `sql/`; `old` occurs in it once."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def path(self, tree: Path = TREE) -> Path:
        return tree / ("sql" if self.file.endswith(".sql") else "cdc_outbox") / self.file

    def occurrences(self, tree: Path = TREE) -> int:
        return self.path(tree).read_text(encoding="utf-8").count(self.old)

    def apply(self, tree: Path) -> None:
        path = self.path(tree)
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")
