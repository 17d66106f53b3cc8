"""What stands in a README: its code blocks, the commands a reader may type, its headings, tables and links."""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    (make .+)$", re.MULTILINE)
_INLINE = re.compile(r"`((?:make|cdc-outbox|pip|psql|curl|docker|python) [^`\n]+)`")
_HEADING = re.compile(r"^(#+) ", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)]+)\)|src=\"([^\"]+)\"")
_COMMENT = re.compile(r"\s+#.*$|^#.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        """What is typed, without the comments behind it."""
        return [line for line in _COMMENT.sub("", self.text).splitlines() if line.strip()]


@dataclass(frozen=True, slots=True)
class Readme:
    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> "Readme":
        return cls(path, path.read_text(encoding="utf-8"))

    @property
    def blocks(self) -> list[Block]:
        return [Block(language, text) for language, text in _FENCE.findall(self.text)]

    @property
    def prose(self) -> str:
        return _FENCE.sub("", self.text)

    @property
    def indented(self) -> list[str]:
        return [_COMMENT.sub("", line) for line in _INDENTED.findall(self.prose)]

    @property
    def commands(self) -> set[str]:
        """Each command, wherever it stands: in a block, on a line of its own, or in a sentence."""
        typed = {line for block in self.blocks if block.language == "sh" for line in block.lines}
        return typed | set(self.indented) | set(_INLINE.findall(self.prose))

    @property
    def headings(self) -> list[int]:
        """The levels, in order."""
        return [len(marks) for marks in _HEADING.findall(self.prose)]

    @property
    def links(self) -> list[str]:
        return [link or source for link, source in _LINK.findall(self.prose)]

    @property
    def tables(self) -> list[list[list[str]]]:
        """Each a list of rows, each a list of cells; the line of dashes left out."""
        found: list[list[list[str]]] = []
        before = ""
        for line in self.prose.splitlines():
            if line.startswith("|") and not before.startswith("|"):
                found.append([])
            if line.startswith("|") and not set(line) <= set("|- "):
                found[-1].append([cell.strip() for cell in line.split("|")[1:-1]])
            before = line
        return found
