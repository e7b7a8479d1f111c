"""What a borrowed machine needs beside its torch."""

from scripts.gpu.wheels import needed


def test_what_only_torch_needs_is_left_out() -> None:
    names = needed(["scale-cli"], ["lora"], has=["torch"])

    assert {"transformers", "tokenizers", "datasets", "pydantic-core", "peft"} <= names
    assert not any(
        name == "torch" or name.startswith("nvidia") or name == "sympy" for name in names
    )


def test_an_extra_is_that_of_the_packages_alone() -> None:
    assert "peft" not in needed(["scale-cli"], [], has=["torch"])
    assert "pytest" not in needed(["scale-cli"], ["lora"], has=["torch"])
