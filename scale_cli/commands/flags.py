"""What the flags of `scale init` and `scale evaluate` name, checked before torch is imported."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Any

from scale_cli.config.load import checked
from scale_cli.config.schema import MethodConfig, ModelConfig
from scale_cli.config.sources import CorpusSource
from scale_cli.data.files import SourceFile, check_source
from scale_cli.data.formats import FORMATS
from scale_cli.errors import ConfigError, UsageError
from scale_cli.methods import METHODS
from scale_cli.runs.folder import RunFolder
from scale_cli.upscale.base_files import check_config_file, check_weight_files

_DATASET = re.compile(r"(?P<dataset>[\w.-]+/[\w.-]+)(:(?P<subset>[^:]*))?(:(?P<split>[^:]*))?")


def source_of(name: str, given: str, language: str, text_field: str = "text") -> dict[str, Any]:
    """Return a text's entry in the config: files, or a dataset of the hub if none exist."""
    about = {"language": language, **({} if text_field == "text" else {"text_field": text_field})}
    dataset = _DATASET.fullmatch(given)
    there = glob.glob(os.path.expanduser(given))  # noqa: PTH111 (a pattern)
    if dataset is None or SourceFile(given, 0).suffix in FORMATS or there:
        return {"name": name, "path": given, **about}
    place = {key: value for key, value in dataset.groupdict().items() if value}
    return {"name": name, **place, **about}


def first_output_dir(file: Path) -> Path:
    """Return where the run of a config that `scale init` writes will be."""
    return Path("runs") / file.stem


def check_init(file: Path, base: str, corpus: dict[str, Any], retention: dict[str, Any]) -> None:
    """Refuse a config that is there already, and a base or text that is not."""
    if file.exists():
        raise UsageError(f"{file}: already exists; give another name")
    run = RunFolder(first_output_dir(file))
    if there := next((folder for folder in run.newest_first if folder.exists()), None):
        raise UsageError(
            f"{file}: its run would be {run.root}, where {there.name}/ is already; give another name"
        )
    model = checked(ModelConfig, {"base": base}, "--base")
    check_config_file(model)
    check_weight_files(model)
    check_text(corpus, "--corpus")
    check_text(retention, "--retention")


def check_text(source: dict[str, Any], flag: str) -> None:
    """Refuse a text that is not there; errors name its flag, or that of its language."""
    try:
        text = checked(CorpusSource, source, flag)
    except ConfigError as error:
        own = {"--corpus": "--language", "--retention": "--retention-language"}[flag]
        raise UsageError(str(error).replace(f"{flag}: language:", f"{own}:")) from None
    if text.is_local:
        check_source(text.model_copy(update={"name": flag}))


def texts_to_measure(
    corpus: str | None, language: str | None, retention: str | None, retention_language: str
) -> dict[str, dict[str, Any]]:
    """Return the entries in a config of texts to measure on, by flag."""
    texts = {}
    if corpus is not None:
        if language is None:
            raise UsageError("--language: not given; the language of --corpus: ko, de, ...")
        texts["--corpus"] = source_of("acquisition", corpus, language)
    if retention is not None:
        texts["--retention"] = source_of("retention", retention, retention_language)
    for flag, source in texts.items():
        check_text(source, flag)
    return texts


def checked_method(name: str) -> MethodConfig:
    """Return the settings with which a method is tried first."""
    training = [method for method in METHODS if METHODS[method].trains]
    if name not in training:
        raise UsageError(f"--method: no method is called {name!r}; one of: {', '.join(training)}")
    return MethodConfig.model_validate({"variant": name, **METHODS[name].first_run})
