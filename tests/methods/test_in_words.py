"""What methods are called."""

from __future__ import annotations

from scale_cli.config.schema import MethodConfig


def test_methods_that_train_otherwise_are_told_apart() -> None:
    methods = [
        {"variant": "lora"},
        {"variant": "lora", "lora": {"rank_stabilised": True}},
        {"variant": "lora", "lora": {"embeddings": True}},
        {"variant": "osf"},
        {"variant": "osf", "osf": {"kept": 0.25}},
        {"variant": "route", "expansion": {"codes": "random"}},
        {"variant": "route", "expansion": {"codes": "cooccurrence"}},
    ]
    words = [MethodConfig.model_validate(method).in_words for method in methods]
    assert len(set(words)) == len(words)
    assert words[2] == "LoRA, rank 16, embeddings and head whole"
