"""All that can be known is known before the first write, whichever verb is asked."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from scale_cli.commands.evaluate import evaluate
from scale_cli.commands.prepare import prepare
from scale_cli.commands.run import run_pipeline
from scale_cli.commands.train import train
from scale_cli.commands.upscale import upscale
from scale_cli.config.load import dump_config, load_config
from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import training_sources
from scale_cli.data.encoding import num_ids
from scale_cli.errors import CorpusError, ScaleError
from scale_cli.runs.folder import RunFolder
from scale_cli.runs.opened import Run, open_folder
from scale_cli.runs.precision import with_precision
from scale_cli.storage.atomic import write_text
from scale_cli.upscale.base_tokenizer import load_tokenizer
from scripts.from_scratch import train_tokenizer, write_base
from tests.small_runs import export, write_config
from tests.vocabulary.tokenizers_at_hand import BROKEN, ENGLISH, KOREAN
from tests.widening import tiny_llama

Configured = Callable[..., RunConfig]


def say_nothing(_: str) -> None: ...


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    for name in ("trained", "held-out"):
        (root / f"{name}.txt").write_text("One, two, three.\n\nFour, five, six.\n")
    dataset = root / "rows"
    dataset.mkdir()
    (dataset / "train.jsonl").write_text('{"text": "One."}\n')
    tokenizer = train_tokenizer(["One, two, three."], 280)
    write_base(root / "base", tiny_llama(vocab_size=len(tokenizer)), tokenizer)
    return root


@pytest.fixture
def configured(inputs: Path, tmp_path: Path) -> Configured:
    """Return a function from overrides, in which {here} is the folder of the inputs, to a config."""

    one = f"{{name: one, path: {inputs}/trained.txt, language: en}}"
    kept = f"{{name: kept, path: {inputs}/held-out.txt, language: en, role: retention}}"
    new = f"{{name: new, path: {inputs}/held-out.txt, language: ko, role: acquisition}}"
    path = write_config(
        tmp_path,
        inputs / "base",
        corpus=f"{{cache_dir: {tmp_path}/cache, sources: [{one}]}}",
        train="{micro_batch_size: 1, eval_every_steps: 1}",
        evaluation=f"perplexity: [{kept}, {new}]",
    )
    (tmp_path / "news.txt").unlink()
    return lambda *overrides: load_config(path, [each.format(here=inputs) for each in overrides])


OF_THE_BASE = [
    ("corpus.sequence_length=129", "corpus.sequence_length: 129, but the base has 128 positions"),
    (
        "evaluation.sequence_length=129",
        "evaluation.sequence_length: 129, but the base has 128 positions",
    ),
    ("method.collaboration.layers=[3]", "but the base has 3 layers"),
    ("method={{variant: freeze, freeze: {{num_layers: 4}}}}", r"method\.freeze\.num_layers"),
    ("method={{variant: lora, lora: {{targets: [none]}}}}", r"method\.lora\.targets"),
]
OF_TRAINING = [
    ("corpus.sources.0.path={here}/nowhere.txt", r"one: no file matches .*nowhere\.txt"),
    (
        "corpus.sources.0={{name: rows, dataset: '{here}/none', language: en}}",
        "rows: the dataset .*none cannot be",
    ),
    (
        "corpus.sources.0={{name: rows, dataset: '{here}/rows', split: dev, language: en}}",
        r"no split 'dev'; it has train",
    ),
    (
        "corpus.sources.0.messages_field=m",
        "^one: messages_field: the tokenizer of .* has no chat template",
    ),
    ("corpus.cache_dir={here}/trained.txt", r"corpus\.cache_dir .*trained\.txt is not a folder"),
]
OF_WHAT_IS_HELD_OUT = [
    ("evaluation.perplexity.0.path={here}/nowhere.txt", r"kept: no file matches .*nowhere\.txt")
]
OF_THE_PIPELINE = [
    (
        "evaluation.benchmarks=[{{name: b, path: '{here}/no.yaml', language: en}}]",
        r"b: no such file: .*no\.yaml",
    )
]


VERBS: dict[str, Callable[[RunConfig], Any]] = {
    "upscale": upscale,
    "prepare": prepare,
    "run": run_pipeline,
}
OF_ALL = [*OF_THE_BASE, *OF_TRAINING, *OF_WHAT_IS_HELD_OUT]


@pytest.mark.parametrize(
    ("verb", "override", "message"),
    [
        *((list(VERBS)[number % len(VERBS)], *case) for number, case in enumerate(OF_ALL)),
        *(("run", *case) for case in OF_THE_PIPELINE),
    ],
)
def test_nothing_is_written_before_what_is_certain_to_fail(
    configured: Configured, tmp_path: Path, verb: str, override: str, message: str
) -> None:
    with pytest.raises(ScaleError, match=message):
        VERBS[verb](configured(override))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(("override", "message"), [*OF_THE_BASE[:2], *OF_WHAT_IS_HELD_OUT])
@pytest.mark.parametrize("verb", [evaluate, export])
def test_what_is_trained_is_not_loaded_before_what_is_certain_to_fail(
    configured: Configured, verb: Callable[[RunConfig], Any], override: str, message: str
) -> None:
    config = configured("export.format=plain", override)
    trained = config.model_copy(update={"evaluation": configured().evaluation})
    # A folder that is empty but for its config: loading it would be another error.
    trained = with_precision(trained)  # as every run writes it
    write_text(RunFolder(config.output_dir).final / "scale.yaml", dump_config(trained))
    with pytest.raises(ScaleError, match=message):
        verb(config)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_tokenizer_that_drops_a_script_is_found_before_anything_is_written(
    configured: Configured, tmp_path: Path, broken: Callable[[], Tokenizer]
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=broken(), eos_token="</s>")
    write_base(tmp_path / "base", tiny_llama(vocab_size=num_ids(tokenizer)), tokenizer)
    for name, text in (("ko", KOREAN), ("en", ENGLISH)):
        (tmp_path / f"{name}.txt").write_text(text)
    before = sorted(tmp_path.rglob("*"))
    places = (
        "corpus.sources.0.path",
        "evaluation.perplexity.0.path",
        "evaluation.perplexity.1.path",
    )
    for dropped in places:
        paths = (
            f"{place}={tmp_path / ('ko' if place == dropped else 'en')}.txt" for place in places
        )
        config = configured(f"model.base={tmp_path / 'base'}", *paths)
        with pytest.raises(
            CorpusError, match=r"(one|kept|new) \(.*ko\.txt\): the tokenizer loses .* '안녕하세요'"
        ):
            upscale(config)
    assert sorted(tmp_path.rglob("*")) == before


def test_training_does_not_begin_without_its_texts(configured: Configured, tmp_path: Path) -> None:
    upscale(configured())
    before = sorted(tmp_path.rglob("*"))
    for override, message in [*OF_TRAINING, *OF_WHAT_IS_HELD_OUT]:
        with pytest.raises(ScaleError, match=message):
            train(configured(override), None, say_nothing)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["upscaled", "export"])
def test_a_file_where_a_folder_is_to_be_is_found_first(configured: Configured, name: str) -> None:
    config = configured()
    write_text(config.output_dir / name, "")
    with pytest.raises(ScaleError, match=f"{name}: is not a folder"):
        Run(config).check(training_sources(config))


def test_what_was_trained_on_need_not_be_there_to_evaluate(configured: Configured) -> None:
    config = configured("corpus.sources.0.path={here}/nowhere.txt")
    Run(config).check(config.evaluation.perplexity)


def test_documents_are_not_isolated_where_no_mark_stands_between_them(
    configured: Configured, inputs: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(configured().model)
    tokenizer.bos_token = tokenizer.eos_token = None
    write_base(tmp_path / "base", tiny_llama(vocab_size=len(tokenizer)), tokenizer)
    for base in (inputs / "base", tmp_path / "base"):
        config = configured(f"model.base={base}", "corpus.isolate_documents=true")
        expected = (
            pytest.raises(ScaleError, match="neither BOS nor EOS")
            if base.parent == tmp_path
            else nullcontext()
        )
        with expected:
            Run(config).check(training_sources(config))


def test_a_folder_is_served_with_the_router_that_it_was_trained_with(
    configured: Configured,
) -> None:
    """The router may have changed since `scale upscale`."""
    upscale(configured("method.variant=route"))
    config = configured("method.variant=route", "method.router.prior=0.25")
    train(config, None, say_nothing)
    final = RunFolder(config.output_dir).final
    for opened in (open_folder(final), Run(config).open_final()):
        model = opened.load()
        assert model.config.router_prior == 0.25
