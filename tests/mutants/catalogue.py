"""All of them."""

from tests.mutants import pure, served

MUTANTS = (*pure.MUTANTS, *served.MUTANTS)
