"""The text in which `scale upscale` finds layers or learns tokens, by content, and whether a run has it still.

What was found lies in `upscaled/` and stays as it is; only the same text gives the same again.
"""

from __future__ import annotations

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import cache_dir
from scale_cli.data.tokens import content_name
from scale_cli.storage.layout import RunFolder
from scale_cli.storage.records import CORPORA, read_corpora
from scale_cli.upscale.tokenizer import load_tokenizer
from scale_cli.upscale.vocabulary import learned_on


def text_to_find_in(config: RunConfig) -> list[str]:
    """Return what names the content of every source that decides which layers or tokens are found; often none."""
    method = config.method
    read = learned_on(config) if method.vocabulary is not None and method.vocabulary.folder is None else []
    if method.variant == "adept" and method.adept.layers is None:
        read += [source for source in config.corpus.sources if source.role == "replay" and source not in read]
    if not read:
        return []
    tokenizer = load_tokenizer(config.model)
    return [content_name(source, tokenizer, cache_dir(config), config.corpus) for source in read]


def other_text_warnings(config: RunConfig) -> list[str]:
    """Return a line where what a run begins with was found in other text than its config names now."""
    upscaled = RunFolder(config.output_dir).upscaled
    if not (upscaled / CORPORA).is_file():  # nothing was looked for, or by an earlier version
        return []
    before, now = read_corpora(upscaled), text_to_find_in(config)
    gone, come = [name for name in before if name not in now], [name for name in now if name not in before]
    if not gone and not come:
        return []
    return [
        f"{upscaled}: its layers or tokens were found in other text: {', '.join(gone) or 'none'} -> "
        f"{', '.join(come) or 'none'} (a source and its hash); they stay, and `scale upscale` finds them anew"
    ]
