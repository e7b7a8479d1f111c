"""`make demo`: the whole workflow in two minutes, from a random seed alone.

It writes English and Korean biographies of synthetic people, and trains a tiny English base model on the English ones.
Then it runs configs/demo.yaml: upscale, train on the Korean ones, evaluate, export, and generate a few texts.
"""

# ruff: noqa: E402 (libraries are silenced before any is imported)
from __future__ import annotations

import time
from pathlib import Path

from scale_cli.console import quieten_libraries

quieten_libraries()

from transformers import LlamaConfig

from scale_cli.commands.run import run_pipeline
from scale_cli.config.load import load_config
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import CorpusSource
from scale_cli.config.training import TrainConfig
from scale_cli.data.batches import Batches
from scale_cli.data.corpora import cache_dir, windows_of
from scale_cli.data.tokens import TokenCache
from scale_cli.processes import cpu_precision
from scale_cli.report import aligned
from scale_cli.runs.folder import RunFolder
from scale_cli.storage.atomic import write_text
from scripts.from_scratch import train_base, train_tokenizer
from scripts.research.biography.people import Language, biography, generate_people
from scripts.three_answers import MODELS, three_answers

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
NUM_TRAIN, NUM_VALID = 5000, 200
ANSWER_WIDTH = 48  # characters
BASE_TRAIN = TrainConfig(
    max_steps=420,
    global_batch_size=16,
    micro_batch_size=16,
    lr=3.0e-3,
    warmup_steps=40,
    mixed_precision=cpu_precision(),
)


def write_biographies(folder: Path, seed: int) -> dict[str, list[str]]:
    """Write train and valid texts in both languages, all about different people; return them by file name."""
    people = generate_people(2 * (NUM_TRAIN + NUM_VALID), seed)
    texts: dict[str, list[str]] = {}
    start = 0
    languages: dict[str, Language] = {"english": "en", "korean": "ko"}
    for name, language in languages.items():
        for split, count in (("train", NUM_TRAIN), ("valid", NUM_VALID)):
            chosen = people[start : start + count]
            start += count
            texts[f"{name}-{split}"] = [
                biography(person, language, index) for index, person in enumerate(chosen)
            ]
    for name, biographies in texts.items():
        write_text(folder / f"{name}.txt", "\n\n".join(biographies) + "\n")
    return texts


def make_base(config: RunConfig, texts: dict[str, list[str]]) -> None:
    """Train the tiny English model that the demo widens.

    Its tokenizer is trained on both languages, so a token holds a few bytes of Hangul; the model reads only English.
    """
    folder = Path(config.model.base)
    tokenizer = train_tokenizer([*texts["english-train"], *texts["korean-train"]], vocab_size=2048)
    source = CorpusSource(
        name="english", path=str(folder.parent / "text" / "english-train.txt"), language="en"
    )
    corpus = TokenCache(cache_dir(config), tokenizer).open(source)
    batches = Batches(
        [windows_of(config.corpus, corpus)],
        [1.0],
        num_steps=BASE_TRAIN.max_steps,
        seed=config.seed,
        global_batch_size=BASE_TRAIN.global_batch_size,
        micro_batch_size=BASE_TRAIN.sequences_at_once(1),
    )
    architecture = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    train_base(architecture, tokenizer, batches, BASE_TRAIN, config.seed, folder)


def show_answers(config: RunConfig, texts: dict[str, list[str]]) -> None:
    """Print how the base, the trained head alone and the routed model continue unseen biographies."""
    export = RunFolder(config.output_dir).export("plain", config.export.dtype)
    prompts = [
        text.split(". ")[0] + "."
        for name in ("english-valid", "korean-valid")
        for text in texts[name][:2]
    ]
    rows = [["", *MODELS]]
    for number, answer in enumerate(three_answers(Path(config.model.base), export, prompts), 1):
        print(f"  {number}  {answer.prompt}")
        rows.append([f"  {number}", *(first_sentence(said) for said in answer.by_model.values())])
    print("\n".join(aligned(rows, "llll")))


def first_sentence(said: str) -> str:
    """Return the first sentence, or the beginning of a longer one."""
    sentence, end, _ = said.partition(".")
    return sentence[:ANSWER_WIDTH] + (end if len(sentence) <= ANSWER_WIDTH else "...")


def main() -> None:
    """Run the demo; keep what already exists."""
    started_s = time.monotonic()
    precision = cpu_precision()
    keys = [f"train.mixed_precision={precision}", f"evaluation.mixed_precision={precision}"]
    config = load_config(CONFIG, keys)
    texts = write_biographies(config.output_dir / "text", config.seed)
    print(f"== base: a tiny English model, in {config.model.base}")
    if not Path(config.model.base).is_dir():
        make_base(config, texts)
    # Again: a run's paths are absolute, and only what is there is known to be a path.
    config = load_config(CONFIG, keys)
    run_pipeline(config)
    print("== unseen people: how the base, the trained head alone and the routed model go on")
    show_answers(config, texts)
    print(f"{time.monotonic() - started_s:,.0f} s in all")


if __name__ == "__main__":
    main()
