"""The README stays true."""

import re

from cdc_outbox import errors
from cdc_outbox.errors import OutboxError
from tests.readme_tables import README, with_tables


def test_its_tables_of_options_and_metrics_are_what_the_code_says() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == with_tables(text), "run: python -m tests.readme_tables"


def test_its_exit_codes_are_those_of_the_errors() -> None:
    text = README.read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d) \|", text, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutboxError)]
    assert documented == {kind.exit_code for kind in kinds}


def test_its_first_two_commands_exist() -> None:
    text = README.read_text(encoding="utf-8")
    commands = re.findall(r"^    (make \w+)", text, re.MULTILINE)
    assert commands == ["make demo", "make test"]
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    assert all(f"\n{command.removeprefix('make ')}:" in makefile for command in commands)
