"""A trace of some steps changes nothing that is trained."""

from __future__ import annotations

import gzip
import json

from tests.training.conftest import MakeConfig, are_equal, finished, trained


def test_a_trace_has_the_steps_asked_for_and_the_run_the_same_bits(make_config: MakeConfig) -> None:
    short = ("train.max_steps=4", "train.save_every_steps=4")
    run = finished(make_config("traced", *short, "train.profile_steps=[2,3]"))
    (trace,) = run.profile.iterdir()
    assert trace.name == "steps-2-3.process-0.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#1", "ProfilerStep#2"}, "of the steps that this process has taken, from 0"
    assert are_equal(trained(run.final), trained(finished(make_config("plain", *short)).final))
