import pytest

from tests.vocabulary.grown_run import prove_on_few


@pytest.fixture
def few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    prove_on_few(monkeypatch)
