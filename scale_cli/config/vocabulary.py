"""The section `method.vocabulary`: tokens that are added to the base's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from scale_cli.config.scripts import Script
from scale_cli.config.values import Name, PathText, Section

# llama.cpp takes models of so many tokens for others (CodeLlama, Granite), and changes how their text begins or ends.
TAKEN_FOR_OTHERS = (32_016, 49_152)
ROWS_MULTIPLE = 64  # of all tokens together: products by the vocabulary head are quicker so


class VocabularyConfig(Section):
    """New tokens for a script that the base's tokenizer splits into bytes; no old one changes."""

    new_tokens: int = Field(
        default=4096, ge=1, le=2**18, description="how many; a few more, so that all together are a multiple of 64"
    )
    script: str = Field(
        default="hangul", description="whose letters they are made of: a name, or ranges of code points as AC00-D7A3"
    )
    sources: list[Name] = Field(
        default=[], description="of corpus.sources, by name, that they are learned on; []: all with the role new"
    )
    min_count: int = Field(default=50, ge=1, le=10**9, description="what is rarer in those becomes no token")
    folder: PathText | None = Field(
        default=None, description="a tokenizer that has them already, the base's ids first; null: they are learned"
    )
    init: Literal["subword"] = Field(
        default="subword", description="rows they start with: those of the old tokens that they are made of"
    )

    @field_validator("script")
    @classmethod
    def _known(cls, name: str) -> str:
        Script.named(name)
        return name
