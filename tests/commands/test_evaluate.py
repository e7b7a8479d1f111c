"""The forgetting report: what it judges a run by."""

import math
import re

import pytest

from scale_cli.commands.evaluate import evaluate
from scale_cli.evaluation.results import Report, finished_report
from scale_cli.report import number
from scale_cli.runs.opened import Run
from tests.export.conftest import TrainedRun
from tests.small_runs import changed


@pytest.mark.parametrize("variant", ["lora", "full"])
def test_a_rival_is_judged_routed_with_its_base_unless_it_has_no_router(
    variant: str, trained_run: TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained_run({"variant": variant})
    report = evaluate(config)
    assert report.served == "posterior"
    assert "trained  routed  routed - base [95 %]" in capsys.readouterr().out
    text = (config.output_dir / "evaluation" / "report.md").read_text(encoding="utf-8")
    for corpus in report.corpora:
        routed = corpus.heads["posterior"]
        before, after = (number(each.bits_per_byte) for each in (corpus.heads["base"], routed))
        assert f" went from {before} to {after} bits/byte: " in text.split("**")[1]
        assert (routed.worst_document_nats or 0.0) <= math.log(2) + 1e-6
    assert "As served, under the posterior rule, it loses at most 0.693 nats" in text
    assert re.search(r"routed, posterior\W+served", text)

    config = Run(config).config
    alone = changed(config, "method.router=null")
    assert finished_report(config) == Report.load(config.output_dir / "evaluation")
    assert finished_report(alone) is None
    assert evaluate(alone).served == "trained"
