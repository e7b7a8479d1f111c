import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from scale_cli.errors import one_line


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (OSError("no route"), "it is not in the hub's cache, and the hub is not reached"),
        (OfflineModeIsEnabled("off"), "and HF_HUB_OFFLINE forbids to ask the hub"),
    ],
)
def test_a_long_message_of_the_hub_is_what_it_comes_to_and_is_not_cut(
    cause: Exception, told: str
) -> None:
    of_hub = LocalEntryNotFoundError("An error happened while trying to locate the file. " * 9)
    of_hub.__cause__ = cause
    of_transformers = OSError("We couldn't connect. " * 20)
    of_transformers.__cause__ = of_hub
    assert one_line(of_transformers).endswith(told)


def test_another_long_message_is_cut_after_a_word() -> None:
    assert one_line(ValueError("word " * 99)).endswith("word ...")
