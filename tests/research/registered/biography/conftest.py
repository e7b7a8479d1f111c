from pathlib import Path

import pytest

from scripts.research.biography.config import BiographyConfig, PeopleConfig


@pytest.fixture
def small(tmp_path: Path) -> BiographyConfig:
    """Few people, a few steps, two methods."""
    return BiographyConfig.model_validate(
        {
            "output_dir": str(tmp_path / "out"),
            "people": PeopleConfig(pretraining=6, biographies_each=2, task_0=4, task_1=3),
            "model": {
                "vocab_size": 512,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
            "pretraining": {"max_steps": 3, "batch_size": 4},
            "task_0": {"max_steps": 12, "batch_size": 12, "lr": 1.0e-2},
            "task_1": {"max_steps": 5, "batch_size": 6},
            "measure_every_steps": 2,
            "methods": [
                {"name": "full", "lr": 1.0e-2, "method": {"variant": "full"}},
                {
                    "name": "route",
                    "lr": 1.0e-2,
                    "method": {"variant": "route", "collaboration": {"layers": "top:1"}},
                },
            ],
        }
    )
