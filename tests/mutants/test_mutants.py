"""Mutants do not rot: each can still be made, and names tests that are there."""

import ast

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import TREE, Mutant


def test_there_are_many_and_no_two_of_one_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_and_is_looked_for_by_tests_that_exist(mutant: Mutant) -> None:
    assert mutant.occurrences() == 1
    assert mutant.old != mutant.new
    if mutant.file.endswith(".py"):
        ast.parse(mutant.path().read_text(encoding="utf-8").replace(mutant.old, mutant.new))
    for name in mutant.tests:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (TREE / file).read_text(encoding="utf-8") if function else (TREE / file).exists()
