"""What of `scripts/research/` takes longer than the suite may: `tests/research/test_registered.py` runs the rest."""

from tests.research.test_registered import LONG, run_registered


def test_the_benchmark_and_the_table_of_rivals_run_as_their_own_tests_say() -> None:
    run_registered(LONG)
