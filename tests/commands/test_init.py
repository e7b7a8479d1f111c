"""`scale init`: what it writes runs as it is, fits what is there, and is never written over anything."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from lzma import decompress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from scale_cli import errors
from scale_cli.commands import init as verb_init
from scale_cli.commands import plan as verb_plan
from scale_cli.commands.flags import checked_method, source_of
from scale_cli.commands.init import SCHEMA_FILE, config_text
from scale_cli.config.load import checked, load_config, parse
from scale_cli.config.schema import ModelConfig, RunConfig
from scale_cli.config.sources import ReadingConfig
from scale_cli.config.training import TrainConfig
from scale_cli.data.documents import CorpusReader
from scale_cli.errors import BaseModelError, ConfigError
from scale_cli.methods import METHODS
from scale_cli.planning.device import Device
from scale_cli.planning.step import StepCost, step_cost
from scale_cli.starter import fitting, method_choice, offer, texts
from scale_cli.starter.fitting import Sizes, fit_sizes
from scale_cli.starter.offer import TokenOffer
from scale_cli.starter.parts import Parted
from tests.command_line import Scale
from tests.data.corpus_files import COMPRESSORS, as_jsonl, as_parquet, as_txt, kept, read
from tests.torture.attacker import edit_json
from tests.vocabulary.tokenizers_at_hand import ENGLISH
from tests.widening import TINY, lower_stories

SIZES = Sizes("bf16", 256, 16, 8, 200, 2**30, 2**34)
NO_NEW = TokenOffer("1.2 a character", 0.3)
SetSpeed = Callable[[float], None]


def cpu(flops: float) -> Device:
    return Device("cpu", flops, "measured on cpu")


@pytest.fixture(autouse=True)
def set_speed(monkeypatch: pytest.MonkeyPatch) -> SetSpeed:
    """A function from FLOP/s to a device that is found to have them."""

    def set_to(flops: float) -> None:
        monkeypatch.setattr(verb_init, "measure_device", lambda *_: cpu(flops))

    set_to(4e11)
    return set_to


@pytest.fixture
def little_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have less of a text looked into."""
    monkeypatch.setattr(texts, "BYTES_READ", 1 << 18)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


@pytest.fixture
def init(shared_data: Path, scale: Scale, file: Path) -> Scale:
    """`scale init` of a text in Korean; of a flag that is given again the last counts."""
    flags = (
        *("--base", lower_stories(shared_data)),
        *("--corpus", shared_data / "ko-petitions/valid.txt.xz"),
        *("--language", "ko"),
        *("--retention", shared_data / "en-tinystories/tinystories_val.txt"),
    )
    return lambda *more: scale("init", file, *flags, *more)


@pytest.fixture
def init_english(shared_data: Path, init: Scale) -> Scale:
    """`scale init` of the stories that the base was trained on, as the text to learn."""
    flags = (
        *("--base", shared_data / "ckpt-stories260K/hf"),
        *("--corpus", shared_data / "en-tinystories/tinystories_val.txt"),
        *("--language", "en"),
        *("--retention", shared_data / "ko-petitions/valid.txt.xz"),
        *("--retention-language", "ko"),
    )
    return lambda *more: init(*flags, *more)


@pytest.mark.usefixtures("little_read")
def test_a_size_far_above_what_is_asked_for_is_a_warning(
    init: Scale, shared_data: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(lower_stories(shared_data), tmp_path / "one-head")
    edit_json(base / "config.json", {"num_key_value_heads": 1})
    done = init("--base", base, "--method", "route")
    assert done.exit_code == 0
    assert "warning: method.expansion.ratio: 0.25 asks for 0.25 more key/value heads" in done.stdout


def test_few_held_out_documents_and_a_language_of_other_letters_are_warnings(
    init: Scale, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("One story that is known.", "utf-8")
    done = init("--retention", tmp_path / "one.txt", "--language", "de", "--method", "lora")
    assert (done.exit_code, done.stderr) == (0, "")
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert any("retention: only 1 document held out, too few" in line for line in warnings)
    assert any("--corpus: its language is de, but" in line for line in warnings)


@pytest.mark.usefixtures("little_read")
def test_what_is_written_offers_new_tokens_and_replay_and_is_never_written_over(
    init: Scale, file: Path
) -> None:
    done = init()
    assert (done.exit_code, done.stderr) == (0, "")
    assert ": it does not know it, so method.variant route" in done.stdout
    config = load_config(file)
    assert config.method.variant == "route"
    (corpus, _), (held_out, retention) = config.corpus.sources, config.evaluation.perplexity
    assert (held_out.role, retention.role) == ("acquisition", "retention")
    assert held_out.path == corpus.path and corpus.skip_documents == held_out.max_documents
    # A character of Hangul costs this tokenizer more than two tokens, and there is enough old text to replay.
    assert config.method.vocabulary is not None and config.method.vocabulary.script == "hangul"
    assert config.method.distils
    assert file.with_name(SCHEMA_FILE).is_file()
    before = file.read_bytes()
    assert init().error() == f"{file}: already exists; give another name"
    assert file.read_bytes() == before


@pytest.mark.usefixtures("little_read")
def test_new_tokens_are_a_comment_where_the_base_reads_the_script_by_its_own(
    init: Scale, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer, "_TAKEN_FROM", 10.0)
    done = init()
    assert done.exit_code == 0
    assert load_config(file).method.vocabulary is None
    assert "# vocabulary: {new_tokens: " in file.read_text()
    assert "; a comment in the config adds them" in done.stdout


def test_a_text_that_the_base_knows_gets_an_adapter_with_the_router_and_a_line_says_why(
    init_english: Scale, file: Path
) -> None:
    done = init_english()
    assert (done.exit_code, done.stderr) == (0, "")
    (why,) = re.findall("method +(.*)", done.stdout)
    said = re.fullmatch(
        r"the base reads en at (\S+) bits/byte, by the tokens' frequencies alone (\S+): it knows some, so "
        "method.variant lora",
        why,
    )
    assert said is not None and float(said[1]) < 2.0 < float(said[2])
    assert f"  # {why}\n  variant: lora\n  router: {{rule: posterior}}" in file.read_text()
    assert load_config(file).method.head == "routed"
    assert "cache_dir: runs/tokens" in file.read_text(), "other methods read it too"


def test_an_adapter_without_peft_is_refused_with_why_it_was_chosen(
    init_english: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "is_installed", lambda _: False)
    told = init_english().error()
    assert told.startswith("the base reads en at ")
    assert told.endswith("method.variant lora: needs peft: pip install 'scale-cli[lora]'")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_model: ModelConfig) -> None:
        raise BaseModelError("model.base: its weights are on the hub")

    monkeypatch.setattr(method_choice, "load_base", refuse)


@pytest.mark.usefixtures("unloaded")
def test_a_method_that_is_named_is_written_and_nothing_measured(init: Scale, file: Path) -> None:
    done = init("--method", "full")
    assert done.exit_code == 0 and "bits/byte" not in done.stdout
    assert load_config(file).method.variant == "full"


@pytest.mark.usefixtures("unloaded")
def test_weights_that_are_not_to_be_had_are_told_with_what_is_assumed_and_are_an_error_of_a_folder(
    init: Scale, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert init().error() == "model.base: its weights are on the hub"
    assert not file.exists()
    monkeypatch.setattr(method_choice, "looks_local", lambda _: False)
    assert (
        "what the base knows was not measured (model.base: its weights are on the hub); taken to know some of ko, so "
        "method.variant lora; if it never saw it, --method route"
    ) in init().stdout
    assert load_config(file).method.variant == "lora"


@pytest.mark.usefixtures("unloaded")
def test_a_base_that_does_not_fit_the_memory_is_not_loaded(
    init: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_memory_bytes", lambda _: 1 << 20)
    assert init().error().startswith("--base: training needs ")


@pytest.mark.parametrize("pattern", ["*.jsonl", "*.json*"])
def test_a_pattern_that_matches_what_init_writes_is_refused_and_nothing_is_written(
    init: Scale, shared_data: Path, tmp_path: Path, pattern: str
) -> None:
    text = decompress((shared_data / "ko-petitions/valid.txt.xz").read_bytes()).decode()
    (tmp_path / "petitions.jsonl").write_bytes(as_jsonl(text.split("\n\n")[:60]))
    (tmp_path / "old.md").write_text(
        ENGLISH * 40, "utf-8"
    )  # one document, of which parts are held out
    there = {*tmp_path.iterdir()}
    asked = ("--corpus", tmp_path / pattern, "--retention", tmp_path / "old.md")
    told = init(*asked, "--method", "lora").error()
    assert "matches " in told and "which this verb writes beside the config" in told
    assert {*tmp_path.iterdir()} == there


def test_a_run_that_is_there_already_is_not_planned_into(
    init: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mine/upscaled").mkdir(parents=True)
    assert (
        init()
        .error()
        .endswith("its run would be runs/mine, where upscaled/ is already; give another name")
    )


def test_documents_above_what_a_run_reads_by_default_are_read(
    init: Scale, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadingConfig.model_fields["max_document_bytes"], "default", 900)
    assert init("--method", "lora").exit_code == 0
    corpus = load_config(file).corpus
    assert corpus.max_document_bytes > 900
    reader = CorpusReader(corpus.sources[0], corpus.max_document_bytes)
    assert len(kept(list(reader))) > 0 and not reader.ledger.dropped


def test_what_no_flag_says_is_named_in_one_line_where_nobody_can_be_asked(
    scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    told = scale("init", "--base", "x", "--corpus", "x.txt", "--retention", "x.txt").error()
    assert told.startswith("--language: not given (language of that text: ko, de, ...)")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--corpus", "/absent/*.txt", "--corpus: no file matches /absent/*.txt"),
        ("--retention", "/absent/*.txt", "--retention: no file matches /absent/*.txt"),
        ("--corpus", "short.txt", "but a step takes 2,048"),
        ("--retention", "empty.txt", "--retention (empty.txt): no document with text"),
        ("--language", "korean", "--language: 'korean' is not an ISO 639 code; write ko"),
        ("--language", "zz", "--language: 'zz' is not an ISO 639 code; give the language's code"),
        (
            "--retention-language",
            "kr",
            "--retention-language: kr is a country code; the language code is ko",
        ),
        ("--method", "qlora", "--method: no method is called 'qlora'; one of: preserve, "),
    ],
)
def test_an_answer_that_cannot_be_is_refused_and_nothing_is_written(
    flag: str,
    value: str,
    said: str,
    init: Scale,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("짧다.", encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    before = sorted(tmp_path.iterdir())
    done = init(flag, value)
    assert done.exit_code == 2 and done.stderr.startswith("error: ")
    assert said in done.stderr.splitlines()[0]
    assert sorted(tmp_path.iterdir()) == before


def text_for(
    base: str,
    corpus: str,
    language: str,
    sizes: Sizes = SIZES,
    method: str = "route",
    new: TokenOffer = NO_NEW,
) -> str:
    """Return the config that is written for texts that nobody looks into."""
    trained, held, known = (
        {"name": name, "path": f"{corpus}.txt", "language": language} for name in ("a", "b", "c")
    )
    corpus_parts, retention = Parted(trained, held, "", []), Parted(known, known, "", [])
    return config_text(
        Path("mine.yaml"),
        base=base,
        method=checked_method(method),
        why="",
        corpus=corpus_parts,
        retention=retention,
        chats={},
        new=new,
        sizes=sizes,
        max_document_bytes=None,
    )


def written_for(*text: Any, **options: Any) -> Any:
    return parse(text_for(*text, **options), "mine.yaml")


@pytest.mark.parametrize("new", [{"number": 512}, {"offered": 512}])
def test_no_comment_depends_on_a_number_that_a_user_may_edit(new: dict[str, Any]) -> None:
    comments = []
    for factor, words in ((1, "4.1 bytes each"), (3, "5.2 bytes each")):
        sizes = Sizes("bf16", *(factor * size for size in (256, 16, 8, 200, 2**30, 2**34)))
        added = TokenOffer(words, 0.3, "hangul", **{key: factor * of for key, of in new.items()})
        written = text_for("b", "c", "ko", sizes, new=added).replace(str(factor * 512), "N")
        comments.append(re.findall(" *#.*", written))
    assert comments[0] == comments[1]


@settings(max_examples=50)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40))
def test_any_name_comes_back_out_of_the_yaml_as_it_was_given(name: str) -> None:
    assume("://" not in name)
    tree = written_for(name, name, "no")
    assert tree["model"]["base"] == name
    source, _ = tree["corpus"]["sources"]
    assert (source["path"], source["language"]) == (f"{name}.txt", "no")


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].trains])
def test_a_config_of_any_method_is_valid_and_takes_its_own_rate(method: str) -> None:
    tree = written_for("b", "c", "ko", method=method)
    config = checked(RunConfig, tree, "mine.yaml")
    assert config.method.variant == method
    assert config.method.distils == (method in ("preserve", "route"))
    assert config.export.format == [*config.method.definition.exports]
    assert "lr" not in tree["train"]


@cache
def tiny_step() -> StepCost:
    return step_cost(LlamaConfig(**TINY), checked_method("route"))


@settings(max_examples=12)
@given(
    flops=st.floats(1e6, 1e16),
    minutes=st.floats(0.1, 1e5),
    gib=st.floats(1e-3, 1e3),
    num_tokens=st.integers(2048, 10**12),
)
def test_sizes_fit_the_memory_the_positions_the_text_and_each_other(
    flops: float, minutes: float, gib: float, num_tokens: int
) -> None:
    base = LlamaConfig(**TINY)
    method = checked_method("route")
    step = tiny_step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_memory_bytes", lambda _: int(gib * 2**30))
        device = cpu(flops)
        try:
            asked: dict[str, Any] = {"training_s": 60 * minutes, "num_tokens": num_tokens}
            sizes = fit_sizes(
                step, base.max_position_embeddings, method, device, mixed_precision="no", **asked
            )
        except ConfigError as error:
            assert str(error).startswith("--base: training needs ")
            return
    assert sizes.memory_bytes <= sizes.available_bytes
    assert sizes.sequence_length <= base.max_position_embeddings
    assert sizes.global_batch_size % sizes.micro_batch_size == 0
    train = TrainConfig(max_steps=1, global_batch_size=sizes.global_batch_size, optimiser="muon")
    training_s = sizes.max_steps * device.step_s(step, train, sizes.sequence_length)
    if sizes.max_steps > 10:
        assert sizes.num_tokens <= 4 * num_tokens
        assert training_s <= 60 * minutes * (1 + 1e-9)
    tree = written_for("b", "c", "ko", sizes)
    assert checked(RunConfig, tree, "m").train.max_steps == sizes.max_steps


def as_novel(documents: list[str]) -> bytes:
    return " ".join(documents).replace("\n", " ").encode()


def as_lines(documents: list[str]) -> bytes:
    lines = dict.fromkeys("\n".join(documents).replace(". ", ".\n").splitlines())  # once each
    return "\n".join(line for line in lines if line.strip()).encode()


@pytest.mark.parametrize(
    ("name", "form", "told"),
    [
        ("*.txt", as_txt, "20 documents (text between blank lines): the first 2 held out"),
        ("novel.txt", as_novel, "1 document: its last tenth held out; written as mine.corpus"),
        ("comments.txt", as_lines, " documents (a line each): the first "),
        ("a.jsonl", as_jsonl, "60 documents: the first 6 held out, the rest to train on"),
        ("a.parquet", as_parquet, "60 documents: the first 6 held out, the rest to train on"),
        ("a.txt.gz", as_txt, "60 documents (text between blank lines): the first 6 held out"),
    ],
)
def test_what_is_written_runs_unedited_and_no_document_is_on_both_sides(
    name: str,
    form: Callable[[list[str]], bytes],
    told: str,
    shared_data: Path,
    scale: Scale,
    init: Scale,
    set_speed: SetSpeed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting, "MIN_STEPS", 2)
    set_speed(1e6)
    petitions = read(shared_data / "ko-petitions/valid.txt.xz", max_documents=60)
    documents = [re.sub(r"\s*\n\s*", "\n", text)[:1500] for text in petitions]
    Path("text").mkdir()
    parts = [[document] for document in documents[:20]] if "*" in name else [documents]
    compress = COMPRESSORS[".gz" if name.endswith(".gz") else ""]
    for index, part in enumerate(parts):
        Path("text", name.replace("*", f"{index:02}")).write_bytes(compress(form(part)))
    old = [ENGLISH[at : at + 300] for at in range(0, 3000, 300)]
    Path("old.txt").write_text("\n\n".join(old), encoding="utf-8")

    done = init("--retention", "old.txt", "--corpus", f"text/{name}")
    assert (done.exit_code, done.stderr) == (0, "")
    assert told in done.stdout
    config = load_config(Path("mine.yaml"))
    sources = config.evaluation.perplexity[0], config.corpus.sources[0]
    held_out, trained = (kept(list(CorpusReader(source, 1 << 28))) for source in sources)
    assert held_out and trained and not {*held_out} & {*trained}
    if name not in ("*.txt", "comments.txt"):
        of_sides, of_text = ("".join("".join(of).split()) for of in (held_out + trained, documents))
        assert sorted(of_sides) == sorted(of_text)
    verb = "run" if form is as_novel else "prepare"  # all of `run` but the reading is alike
    assert scale(verb, "mine.yaml").exit_code == 0
    assert Path("runs/mine/export/plain").is_dir() == (verb == "run")


@pytest.mark.usefixtures("little_read")
@pytest.mark.parametrize("number", [1, 6])
def test_of_few_documents_that_are_longer_than_what_is_read_the_ends_are_held_out(
    number: int, init: Scale, set_speed: SetSpeed, scale: Scale, shared_data: Path, tmp_path: Path
) -> None:
    set_speed(1e6)
    petitions = read(shared_data / "ko-petitions/valid.txt.xz", max_documents=400)
    novel = as_novel(petitions).decode()[:150_000]
    texts = tmp_path / "novels.txt"
    texts.write_text("\n\n".join([novel] * number), encoding="utf-8")
    done = init("--corpus", texts, "--minutes", "0.1")
    assert done.exit_code == 0 and "last tenth" in done.stdout
    assert scale("prepare", tmp_path / "mine.yaml").exit_code == 0


def test_a_config_in_another_folder_holds_from_there_and_its_name_can_be_pasted(
    scale: Scale, init: Scale, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    novel = as_novel(read(shared_data / "ko-petitions/valid.txt.xz", max_documents=60))
    Path("novel.txt").write_bytes(novel)
    Path("old.txt").write_text(ENGLISH, encoding="utf-8")
    flags = ("--base", lower_stories(shared_data), "--corpus", "novel.txt", "--language", "ko")
    done = scale("init", "sub/my run.yaml", *flags, "--retention", "old.txt")
    assert done.exit_code == 0 and "scale run 'sub/my run.yaml'" in done.stdout
    monkeypatch.chdir("sub")
    assert scale("prepare", "my run.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("given_text", "source"),
    [
        ("owner/words:kor_Hang", {"dataset": "owner/words", "subset": "kor_Hang"}),
        ("owner/words::test", {"dataset": "owner/words", "split": "test"}),
        ("data/*.jsonl", {"path": "data/*.jsonl"}),
        ("notes/absent.md", {"path": "notes/absent.md"}),
    ],
)
def test_a_text_is_files_or_a_dataset(given_text: str, source: dict[str, str]) -> None:
    assert source_of("corpus", given_text, "ko") == {"name": "corpus", **source, "language": "ko"}


def test_a_script_that_the_base_reads_gets_no_new_tokens(init_english: Scale, file: Path) -> None:
    assert init_english("--method", "route").exit_code == 0
    assert load_config(file).method.vocabulary is None


def test_init_and_plan_print_one_estimate_of_the_whole_run(
    init: Scale, scale: Scale, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb_plan, "measure_device", lambda *_: cpu(4e11))
    monkeypatch.setattr(offer, "_OFFERED_FROM", 10.0)
    monkeypatch.setattr(fitting, "MIN_STEPS", 2)
    # Told the method, `init` does not ask whether the base knows the text, which `plan` does not know either: then an
    # expansion would start with codes, and not search for its rate.
    of_init = init("--minutes", "0.1", "--method", "full").stdout
    (sentence,) = re.findall(r"time +(about .*)", of_init)
    assert " of training, " in sentence and "of start and export" in sentence
    assert sentence in " ".join(scale("plan", file).stdout.split())


def test_minutes_are_those_of_the_whole_run(init: Scale, set_speed: SetSpeed) -> None:
    set_speed(3e8)
    told = json.loads(init("--minutes", "60", "--json").stdout)["estimate"]
    assert sum(told[f"{part}_s"] for part in ("training", "evaluation", "start", "export")) <= 3600


def test_what_is_held_out_depends_on_the_text_alone(
    init: Scale, set_speed: SetSpeed, file: Path
) -> None:
    held_out = []
    for flops, minutes in ((3e8, "1"), (4e11, "60")):
        set_speed(flops)
        assert init("--minutes", minutes).exit_code == 0
        held_out.append(load_config(file).evaluation.perplexity)
        file.unlink()
    assert held_out[0] == held_out[1]
    assert [source.max_documents for source in held_out[0]] == [9, 80]


@pytest.mark.usefixtures("little_read")
def test_of_a_long_text_as_much_is_said_to_be_trained_on_as_the_config_reads(
    init: Scale, file: Path
) -> None:
    done = init()
    source = load_config(file).corpus.sources[0]
    said = f"the first {source.skip_documents} documents (text between blank lines) held out, the next "
    assert f"{said}{source.max_documents:,} to train on: " in " ".join(done.stdout.split())
