"""Both READMEs stay true, and say the same."""

import re
from pathlib import Path

import pytest

from cdc_outbox import errors
from cdc_outbox.errors import OutboxError
from tests.readme_blocks import Readme
from tests.readme_tables import READMES, ROOT, Say, untranslated, with_tables

ENGLISH, CHINESE = (Readme.read(path) for path in READMES)
CODE = re.compile(r"`[^`]+`(?:, `[^`]+`)*|G\d|\d|")
"""A cell that is the same in every language."""


@pytest.mark.parametrize(("path", "say"), READMES.items(), ids=[path.name for path in READMES])
def test_its_tables_of_options_and_metrics_are_what_the_code_says(path: Path, say: Say) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == with_tables(text, say), "run: python -m tests.readme_tables"


def test_each_text_of_these_tables_is_translated() -> None:
    assert untranslated() == set(), "add them to tests/readme_zh.toml, and run: python -m tests.readme_tables"


@pytest.mark.parametrize("readme", [ENGLISH, CHINESE], ids=["README.md", "README.zh-CN.md"])
def test_its_exit_codes_are_those_of_the_errors(readme: Readme) -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d) \|", readme.text, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutboxError)]
    assert documented == {kind.exit_code for kind in kinds}


def test_its_first_two_commands_exist() -> None:
    assert ENGLISH.indented == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{command.removeprefix('make ')}:" in makefile for command in ENGLISH.indented)
    before = ENGLISH.text[: ENGLISH.text.index("    make demo")]
    assert "```sh" not in before


def test_its_links_lead_somewhere() -> None:
    inside = [link for link in ENGLISH.links if not link.startswith("https://")]
    assert len(inside) > 10
    for link in inside:
        file, _, part = link.partition("#")
        assert (ROOT / file).exists(), link
        headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE) if part else []
        assert not part or part in [heading.lower().replace(" ", "-") for heading in headings], link


def test_the_translation_has_the_same_parts_in_the_same_order() -> None:
    assert CHINESE.headings == ENGLISH.headings
    assert CHINESE.commands == ENGLISH.commands
    assert [link.replace("README.md", "README.zh-CN.md") for link in CHINESE.links] == ENGLISH.links


def test_the_translation_has_the_same_code_but_for_comments() -> None:
    assert [(block.language, block.lines) for block in CHINESE.blocks] == [
        (block.language, block.lines) for block in ENGLISH.blocks
    ]


def test_the_translation_has_the_same_tables_with_the_same_code() -> None:
    for ours, theirs in zip(ENGLISH.tables, CHINESE.tables, strict=True):
        for row, translated in zip(ours, theirs, strict=True):
            assert len(row) == len(translated)
            same = [cell for cell in row if CODE.fullmatch(cell)]
            assert [cell for cell in translated if CODE.fullmatch(cell)] == same


def test_what_the_translation_says_is_chinese() -> None:
    """Each sentence, and each cell that is no code: a line that was forgotten would be English."""
    cells = [
        (cell, translated)
        for ours, theirs in zip(ENGLISH.tables, CHINESE.tables, strict=True)
        for row, translated_row in zip(ours, theirs, strict=True)
        for cell, translated in zip(row, translated_row, strict=True)
    ]
    untouched = {cell for cell, translated in cells if cell == translated and re.search(r"[a-z]{3,} [a-z]{3,}", cell)}
    assert {cell for cell in untouched if not cell.startswith("`")} <= {
        "bigint identity",
        "text, not null",
        "jsonb, not null",
    }
    paragraphs = re.split(r"\n\n+", re.sub(r"<!--.*?-->|<img[^>]*>", "", CHINESE.prose, flags=re.DOTALL))
    said = [
        text for text in paragraphs if text.strip() and not text.startswith(("|", "    ", "# cdc-outbox", "[English]"))
    ]
    assert [text for text in said if not re.search(r"[\u4e00-\u9fff]{2}", text)] == []
