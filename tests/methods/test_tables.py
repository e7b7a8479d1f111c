"""Every choice that a config has is in its table, and the other way round."""

import ast
import re
from pathlib import Path
from typing import get_args

from scale_cli.config.schedule import SCHEDULES
from scale_cli.config.schema import ExportFormat, MethodConfig
from scale_cli.config.sources import TextSource
from scale_cli.config.training import Schedule
from scale_cli.data.files import COMPRESSIONS
from scale_cli.data.formats import FORMATS as CORPUS_FORMATS
from scale_cli.export.formats import FORMATS
from scale_cli.methods import METHODS
from scale_cli.methods.stream_kinds import STREAM_KINDS


def test_every_choice_of_a_config_is_in_its_table_and_nothing_else_is() -> None:
    assert {*get_args(ExportFormat)} == {one.name for one in FORMATS}
    assert {*get_args(Schedule)} == SCHEDULES.keys()


def test_the_key_of_a_source_names_every_format_of_corpus_files_and_no_other() -> None:
    described = TextSource.model_fields["path"].description or ""
    assert {*re.findall(r"\.[a-z]+", described)} == {*CORPUS_FORMATS, *COMPRESSIONS}


def test_every_kind_of_second_stream_has_a_class_in_vllm() -> None:
    # Its module imports vLLM, so it is read.
    plugin = Path(__file__).parents[2] / "scale_cli/serving/vllm_plugin.py"
    tables = [
        node.value
        for node in ast.parse(plugin.read_text()).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "STREAMS"
    ]
    (table,) = tables
    assert isinstance(table, ast.Dict)
    named = [ast.literal_eval(key) for key in table.keys if key is not None]
    assert {name or "expansion" for name in named} == STREAM_KINDS.keys()


def test_the_card_says_of_every_format_how_it_is_loaded() -> None:
    template = (Path(__file__).parents[2] / "scale_cli/templates/card.md.j2").read_text()
    assert not [name for name in {one.name for one in FORMATS} if f'"{name}"' not in template]


def test_methods_are_told_apart_by_name_label_colour_and_mark_and_each_has_its_own_section() -> (
    None
):
    assert len({method.label for method in METHODS.values()}) == len(METHODS)
    assert len({(method.colour, method.mark) for method in METHODS.values()}) == len(METHODS)
    sections = {
        method.section: method.settings for method in METHODS.values() if method.section is not None
    }
    assert sections.keys() < MethodConfig.model_fields.keys()
    for name, method in METHODS.items():
        given = {} if method.trains else {"model": "x", "kind": "copy"}
        config = MethodConfig.model_validate({"variant": name, **given})
        assert config.definition is method and isinstance(config.settings, method.settings)


def test_the_docs_name_every_method() -> None:
    concepts = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    assert not [name for name in METHODS if f"`{name}`" not in concepts]


def test_no_module_but_the_methods_asks_which_method_one_is() -> None:
    root = Path(__file__).parents[2]
    asks = re.compile(r"variant\s*(==|!=|in\b|not in\b)")
    files = [
        *root.glob("scale_cli/**/*.py"),
        *root.glob("scale_cli/**/*.j2"),
        *root.glob("scripts/**/*.py"),
    ]
    asking = [
        file
        for file in files
        if file.parent.name not in ("methods", "research") and asks.search(file.read_text())
    ]
    assert not asking


def test_methods_that_train_otherwise_are_told_apart() -> None:
    methods = [
        {"variant": "lora"},
        {"variant": "lora", "lora": {"rank_stabilised": True}},
        {"variant": "lora", "lora": {"embeddings": True}},
    ]
    words = [MethodConfig.model_validate(method).in_words for method in methods]
    assert len(set(words)) == len(words)
    assert words[2] == "LoRA, rank 16, embeddings and head whole"
