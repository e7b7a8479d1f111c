"""The forgetting report: its figures are the documents' own, and what is measured is shown."""

import json
import math
import re
from dataclasses import replace
from html import unescape
from typing import Any

import numpy as np
import pytest

from scale_cli.commands.evaluate import check_forgetting, check_learned
from scale_cli.config.schema import RunConfig
from scale_cli.config.sources import EvaluationSource
from scale_cli.data.overlap import SharedText
from scale_cli.errors import CheckFailed, ConfigError
from scale_cli.evaluation.intervals import paired_differences
from scale_cli.evaluation.render import page, terminal_lines
from scale_cli.evaluation.results import (
    HEADS_AND_RULES,
    CorpusResult,
    HeadResult,
    Report,
    summarise,
)
from scale_cli.evaluation.scoring import DocumentLosses
from scale_cli.report import Interval, number, with_interval


def run_of(**method: Any) -> RunConfig:
    sections = {
        "model": {"base": "tiny"},
        "method": {"variant": "route", **method},
        "corpus": {"sources": [{"name": "petitions", "path": "petitions.txt", "language": "ko"}]},
        "train": {"max_steps": 1},
    }
    return RunConfig.model_validate({"output_dir": "runs/korean", **sections})


ROUTE = run_of()
KINDS = pytest.mark.parametrize(
    "of_losses", [{}, {"broken": True}, {"count": 1}], ids=["usual", "broken", "one document"]
)


def losses(seed: int, gain: float, count: int = 12, broken: bool = False) -> DocumentLosses:
    """Documents on which the trained head is `gain` nats a token better than the base."""
    rng = np.random.default_rng(seed)
    num_tokens = rng.integers(50, 500, count).astype(np.float64)
    base = num_tokens * rng.normal(4.0, 0.3, count)
    trained = base - num_tokens * rng.normal(gain, 0.1, count)
    if broken:
        trained[0] = math.inf
    posterior = np.minimum(base, trained) + math.log(2)
    served = {"posterior": num_tokens * [[0.25], [0.75]], "cosine": num_tokens * [[1.0], [0.0]]}
    nats = {"base": base, "trained": trained, "posterior": posterior, "cosine": base}
    return DocumentLosses(np.arange(count), num_tokens, 4.0 * num_tokens, nats, served)


def by_own_tokens(scored: DocumentLosses) -> DocumentLosses:
    """The same text by a base that cuts it into three times as many tokens, and is better by them.

    It scores one document more: one of a single token that holds a whole word.
    """
    return DocumentLosses(
        np.append(scored.places, len(scored.places)),
        np.append(3 * scored.num_tokens, 2.0),
        np.append(scored.num_bytes, 8.0),
        {"base": np.append(0.5 * scored.nats["base"], 9.0)},
        {},
    )


def summary(
    scored: DocumentLosses,
    own: DocumentLosses | None = None,
    *,
    name: str = "petitions",
    language: Any = "ko",
    role: Any = "acquisition",
) -> CorpusResult:
    source = EvaluationSource(name=name, path="unused.txt", language=language, role=role)
    return summarise(source, scored, own, num_resamples=200, seed=0)


def of_old_text(name: str = "tinystories", seed: int = 0, **of_losses: Any) -> CorpusResult:
    scored = losses(seed, -0.5, **of_losses)
    return summary(scored, name=name, language="en", role="retention")


def report(**of_losses: Any) -> Report:
    return report_of(
        of_old_text(**of_losses),
        of_old_text("novels-of-the-nineteenth-century", 1, **of_losses),
        summary(losses(2, 2.0, **of_losses)),
    )


def report_of(*corpora: CorpusResult, **more: Any) -> Report:
    made = Report("route", "posterior", 1200, 4_915_200, "0" * 64, [*corpora])
    return replace(made, **more)


def markdown(made: Report, config: RunConfig = ROUTE) -> str:
    return page(made, config, "md")


def read_back(made: Report) -> Report:
    return Report.from_json(json.loads(json.dumps(made.to_json(), allow_nan=False)))


@pytest.mark.parametrize("count", [5, 60])
def test_the_interval_is_that_of_a_bootstrap_over_whole_documents(count: int) -> None:
    rng = np.random.default_rng(0)
    units = rng.integers(20, 400, count).astype(np.float64)
    before = units * rng.normal(3.0, 0.5, count)
    after = before + units * rng.normal(0.2, 0.1, count) + rng.normal(0.0, 5.0, count)
    (measured,) = paired_differences(before, after[:, None], units, num_resamples=4000, seed=0)
    drawn = [rng.integers(0, count, count) for _ in range(4000)]
    low, high = np.quantile(
        [(after[at] - before[at]).sum() / units[at].sum() for at in drawn], [0.025, 0.975]
    )
    assert [measured.low, measured.high] == pytest.approx([low, high], abs=0.08 * (high - low))
    assert measured.value == pytest.approx((after.sum() - before.sum()) / units.sum())


def test_one_document_has_no_interval() -> None:
    for head in summary(losses(0, 2.0, count=1)).heads.values():
        difference = head.bits_per_byte_difference
        assert difference.value is not None
        assert (difference.low, difference.high) == (None, None)


def test_figures_are_the_documents_own() -> None:
    scored = losses(0, 2.0)
    result = summary(scored)
    assert result.num_tokens == scored.num_tokens.sum() and result.num_documents == 12
    for name, nats in scored.nats.items():
        head = result.heads[name]
        beside_base = nats - scored.nats["base"]
        assert head.nats_per_token == pytest.approx(nats.sum() / scored.num_tokens.sum())
        assert head.perplexity == pytest.approx(math.exp(nats.sum() / scored.num_tokens.sum()))
        assert head.bits_per_byte == pytest.approx(
            nats.sum() / scored.num_bytes.sum() / math.log(2)
        )
        assert head.worst_document_nats == pytest.approx(beside_base.max())
        difference = beside_base.sum() / scored.num_bytes.sum() / math.log(2)
        assert head.bits_per_byte_difference.value == pytest.approx(difference)
    assert [result.heads[name].base_share for name in HEADS_AND_RULES] == [None, None, 0.25, 1.0]


def test_a_loss_that_is_not_finite_is_no_figure_and_spoils_no_other() -> None:
    heads = summary(losses(0, 2.0, broken=True)).heads
    broken = heads["trained"]
    assert (
        broken.nats_per_token,
        broken.perplexity,
        broken.bits_per_byte,
        broken.worst_document_nats,
    ) == (None,) * 4
    assert broken.bits_per_byte_difference == Interval(None, None, None)
    assert heads["posterior"].bits_per_byte_difference.low is not None
    far = summary(losses(0, -1e4)).heads["trained"]
    assert far.nats_per_token == pytest.approx(1e4, rel=0.01) and far.perplexity is None, (
        "beyond floating point"
    )


@KINDS
def test_every_form_of_a_report_shows_every_corpus_and_rule(
    of_losses: dict[str, Any],
) -> None:
    made = report(**of_losses)
    assert read_back(made) == made
    text = markdown(made)
    as_html = page(made, ROUTE, "html")
    assert all("un korean: the base tiny, trained by" in told for told in (text, as_html))
    assert not re.search(r"(src|href)=\"(?!data:)", as_html) and "<script" not in as_html
    shown = " ".join(unescape(re.sub(r"<[^>]*>", " ", as_html)).replace("−", "-").split())
    for result in made.corpora:
        section = text.split(f"## {result.name}:")[1].split("\n## ")[0]
        rows = [
            line.replace("*", "").replace("−", "-")
            for line in section.splitlines()
            if line.startswith("|")
        ]
        assert (
            len(rows) == 2 + len(HEADS_AND_RULES)
            and "| routed, cosine |" in section
            and "routed, posterior, served" in rows[4]
        )
        for row in (*rows[:1], *rows[2:]):
            assert all(word.rstrip(",") in shown for word in row.replace("|", " ").split())
        (line,) = [line for line in terminal_lines(made) if line.startswith(f"  {result.name} ")]
        assert with_interval(result.heads["posterior"].bits_per_byte_difference, 4) in line
    assert "not finite" in text or not of_losses.get("broken")
    assert ("\n\n1 document, " in text) == (
        of_losses.get("count") == 1
    ) and "1 documents" not in text
    assert "“Routed, cosine” is the paper's rule" in text and "is at least 0.5 (" in text
    assert not re.search(r"\b(nan|inf|None)\b", text)
    assert terminal_lines(made)[-1] == "base head served 25.0 % of English, 25.0 % of Korean tokens"


@pytest.mark.parametrize(
    ("role", "served", "ends", "verdict"),
    [
        ("retention", 1.9, (-0.2, -0.05), "kept and improved"),
        (
            "retention",
            2.1,
            (0.05, 0.2),
            "worse than the base, by at most 0.693 nats in a document",
        ),
        ("acquisition", 1.9, (-0.2, -0.05), "learned"),
        ("acquisition", 1.9, (-0.2, 0.05), "no difference shown"),
        ("retention", 2.0001, (0.00005, 0.0002), "the same to three digits"),
        ("acquisition", 1.9, (None, None), "better, without an interval"),
    ],
)
def test_the_verdict_is_right_for_gains_losses_and_no_difference(
    role: str, served: float | None, ends: tuple[float | None, float | None], verdict: str
) -> None:
    measured = summary(losses(0, 2.0), language="en", role=role)
    change = Interval(None if served is None else served - 2.0, *ends)
    heads = measured.heads | {
        "base": replace(measured.heads["base"], bits_per_byte=2.0),
        "posterior": replace(
            measured.heads["posterior"],
            bits_per_byte=served,
            bits_per_byte_difference=change,
            worst_document_nats=0.6931,
        ),
    }
    made = report_of(replace(measured, heads=heads))
    assert f": {verdict}.**" in markdown(made)


WORSE = Interval(0.151, 0.12, 0.18)
BETTER = Interval(-0.5, -0.6, -0.4)
NO_CHANGE = Interval(0.0, -0.1, 0.1)
BROKEN = Interval(None, None, None)


def of_heads(name: str, role: str, trained: Interval, posterior: Interval) -> CorpusResult:
    """A corpus of 1.188 bits/byte on which heads differ from the base as asked."""
    measured = summary(losses(0, 2.0), name=name, language="en", role=role)

    def changed(head: str, change: Interval) -> HeadResult:
        bits = None if change.value is None else 1.188 + change.value
        return replace(measured.heads[head], bits_per_byte=bits, bits_per_byte_difference=change)

    changes = {"base": Interval(0.0, 0.0, 0.0), "trained": trained, "posterior": posterior}
    heads = measured.heads | {head: changed(head, change) for head, change in changes.items()}
    return replace(measured, heads=heads)


def first_sentence(made: Report) -> str:
    told = markdown(made).split("**")[1]
    assert told in unescape(page(made, ROUTE, "html")), "both forms say the same"
    return told.split(". ")[0]


@pytest.mark.parametrize(
    ("trained", "posterior", "told"),
    [
        (
            WORSE,
            NO_CHANGE,
            "English (new) was not learned: the trained head is worse than the base, 1.188 to 1.339 "
            "bits/byte (+0.1510 [+0.1200, +0.1800]); the served, routed model went from 1.188 to "
            "1.188 bits/byte",
        ),
        (BROKEN, NO_CHANGE, "English (new) was not learned: the loss of the trained head is not"),
        (BETTER, WORSE, "the served, routed model is worse than the base, 1.188 to 1.339"),
    ],
    ids=["worse", "not finite", "served worse"],
)
def test_what_was_to_be_learned_and_got_worse_is_said_first_and_fails_the_run(
    trained: Interval, posterior: Interval, told: str
) -> None:
    kept = of_heads("old", "retention", BETTER, BETTER)
    made = report_of(kept, of_heads("new", "acquisition", trained, posterior))
    assert told in first_sentence(made)
    assert "new) went from" not in markdown(made), "one sentence for each corpus"
    with pytest.raises(CheckFailed, match=re.escape(told)):
        check_learned(made)


def test_a_row_that_is_not_finite_is_not_the_same_to_three_digits() -> None:
    old = of_heads("old", "retention", BROKEN, Interval(0.0001, 0.00005, 0.0002))
    made = report_of(old)
    assert first_sentence(made).startswith("English (old) failed: the loss of the trained head")
    assert "three digits" not in markdown(made)
    with pytest.raises(CheckFailed, match="not finite"):
        check_learned(made)


def test_of_a_base_that_is_not_finite_nothing_is_called_learned_and_the_gate_fails() -> None:
    whole = losses(0, gain=1.0)
    whole.nats["base"][0] = math.inf
    source = EvaluationSource(name="old", path="x.txt", language="en", role="retention")
    made = report_of(summarise(source, whole, None, num_resamples=10, seed=0))
    assert first_sentence(made) == "English (old) failed: the loss of the base is not finite."
    with pytest.raises(CheckFailed, match="a loss that is not finite"):
        check_forgetting(made, 100.0)


def test_the_gate_is_refused_where_it_has_nothing_to_judge() -> None:
    made = report_of(of_heads("new", "acquisition", BETTER, BETTER))
    check_forgetting(made, None)
    with pytest.raises(ConfigError, match=r"^--fail-above: .*role retention"):
        check_forgetting(made, 0.0)


def test_a_kind_of_text_that_was_not_taught_may_get_worse_and_fails_no_run() -> None:
    talks = replace(of_heads("talks", "acquisition", WORSE, WORSE), taught=False)
    made = report_of(talks)
    check_learned(made)
    assert "talks) went from" in first_sentence(made) and "worse" in first_sentence(made)
    talk = EvaluationSource(
        name="talk", path="x.jsonl", language="ko", role="acquisition", messages_field="messages"
    )
    text = talk.model_copy(update={"messages_field": None})
    assert ROUTE.teaches(text) and not ROUTE.teaches(talk)
    taught = ROUTE.corpus.sources[0].model_copy(update={"messages_field": "messages"})
    corpus = ROUTE.corpus.model_copy(update={"sources": [taught]})
    assert ROUTE.model_copy(update={"corpus": corpus}).teaches(talk)


def test_where_nobody_looked_for_a_text_in_what_was_trained_on_it_is_not_called_learned() -> None:
    made = report_of(of_heads("new", "acquisition", BETTER, BETTER))
    assert "learned" in first_sentence(made)
    told = first_sentence(replace(made, searched_training_text=False))
    assert "better; the training text is gone" in told and "learned" not in told


@pytest.mark.parametrize(
    ("role", "change"),
    [("retention", WORSE), ("retention", BETTER), ("acquisition", NO_CHANGE)],
)
def test_what_the_base_lost_of_old_text_or_did_not_learn_for_sure_fails_no_run(
    role: str, change: Interval
) -> None:
    check_learned(report_of(of_heads("x", role, change, change)))


@pytest.mark.parametrize(
    ("role", "of_source", "also"),
    [
        ("retention", "replay", "retention, also replay"),
        ("retention", "new", "retention, also trained on"),
        ("acquisition", "new", "acquisition, also trained on"),
    ],
)
@pytest.mark.parametrize("change", [BETTER, NO_CHANGE, Interval(-0.0001, -0.0002, -0.00005)])
def test_text_that_is_also_trained_on_is_named_so_and_never_called_kept_or_learned(
    role: str, of_source: str, also: str, change: Interval
) -> None:
    shared = [SharedText("tales", of_source, 2, 12, 0.125)]
    measured = of_heads("x", role, change, change)
    made = report_of(replace(measured, shared=shared), texts=["x-0"])
    assert read_back(made) == made
    text = markdown(made)
    bold = text.split("**")[1]
    assert f"English (x, {also.partition(', ')[2]}) went from" in bold
    assert "kept" not in bold and "learned" not in bold
    assert f"## x: English, {also} (" in text
    assert "; 2 of its 12 documents (12.5 % of its text) are in tales, which is " in text
    assert terminal_lines(made)[0].startswith(f"English, {also}")


def test_a_worst_document_that_gained_is_not_shown_as_a_loss() -> None:
    result = summary(losses(0, 2.0))
    assert (result.heads["trained"].worst_document_nats or 0.0) < 0.0
    told = markdown(report_of(result))
    (row,) = (line for line in told.splitlines() if "| trained |" in line)
    assert "| none lost |" in row


def test_the_bound_is_that_of_the_routers_prior() -> None:
    assert "at most 0.105 nats (" in markdown(report(), run_of(router={"prior": 0.9}))


def test_a_report_says_where_prompts_start_unless_it_measured_that() -> None:
    """The figures weigh both heads evenly at the start, what is served asks the prompt's letters."""
    said = "starts with a weight\nof 0.02 (`method.router.script_prior`)"
    assert said in markdown(report())
    assert "script_prior" not in markdown(report(), run_of(router={"script_prior": None}))
    assert "script_prior" not in markdown(replace(report(), served="trained"))


def of_new_tokens() -> CorpusResult:
    scored = losses(0, 2.0)
    return summary(scored, by_own_tokens(scored))


def test_beside_new_tokens_every_difference_is_from_the_base_by_its_own_tokens() -> None:
    scored = losses(0, 2.0)
    usual = summary(scored)
    grown = of_new_tokens()
    assert grown.num_base_tokens == 3 * grown.num_tokens == 3 * usual.num_base_tokens
    base = grown.heads["base"]
    assert base.bits_per_byte == pytest.approx(0.5 * (usual.heads["base"].bits_per_byte or 0.0))
    assert base.nats_per_token == pytest.approx(
        0.5 * scored.nats["base"].sum() / (3 * scored.num_tokens.sum())
    )
    trained = grown.heads["trained"]
    assert trained.bits_per_byte == usual.heads["trained"].bits_per_byte
    lost = trained.bits_per_byte_difference
    assert lost.value == pytest.approx((trained.bits_per_byte or 0.0) - (base.bits_per_byte or 0.0))
    assert lost.low is not None and lost.high is not None and lost.low < 0.0 < lost.high
    assert trained.worst_document_nats == pytest.approx(
        (scored.nats["trained"] - 0.5 * scored.nats["base"]).max()
    )
    mixed = grown.base_of_new_tokens
    assert mixed is not None and mixed.bits_per_byte == usual.heads["base"].bits_per_byte
    assert usual.base_of_new_tokens is None


def test_a_languages_base_share_counts_the_runs_own_tokens() -> None:
    scored = losses(0, 2.0)
    by_base = replace(scored, served={"posterior": scored.num_tokens * [[1.0], [0.0]]})
    made = report_of(of_new_tokens(), summary(by_base, name="other"))
    assert made.base_share_by_language("posterior") == {"ko": pytest.approx((0.25 + 1.0) / 2)}


def test_a_report_of_new_tokens_says_which_base_a_row_is() -> None:
    corpus = of_new_tokens()
    grown = report_of(corpus)
    assert read_back(grown) == grown
    told = markdown(grown)
    usual = markdown(report())
    base = corpus.heads["base"]
    mixed = corpus.base_of_new_tokens
    assert mixed is not None
    assert f"| base, by its own tokens | {number(base.bits_per_byte)} |" in told
    assert f"| base, by the run's tokens, in the router | {number(mixed.bits_per_byte)} |" in told
    assert f"went from {number(base.bits_per_byte)} to" in told
    assert "base, its own tokens" in "\n".join(terminal_lines(grown))
    assert "own tokens" not in usual + "\n".join(terminal_lines(report()))
    for words in ("nats/token", "perplexity"):
        assert words not in told and words in usual


def test_a_report_whose_passes_showed_one_head_each_has_no_row_and_no_word_of_the_cosine_rule() -> (
    None
):
    both = report()
    corpora = [
        replace(of, heads={head: result for head, result in of.heads.items() if head != "cosine"})
        for of in both.corpora
    ]
    apart = report_of(*corpora)
    assert (both.rules, apart.rules) == (["posterior", "cosine"], ["posterior"])
    assert read_back(apart) == apart
    for form in ("md", "html"):
        assert "cosine" in page(both, ROUTE, form)
        assert "cosine" not in page(apart, ROUTE, form)
    assert terminal_lines(apart) == terminal_lines(both)
