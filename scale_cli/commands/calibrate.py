"""The verb `scale calibrate`: which threshold the cosine rule should have, from small samples of both kinds of text.

The posterior rule needs none of this; it is what the paper's rule has to be given to be compared fairly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from scale_cli.config.schema import RunConfig
from scale_cli.data.corpora import open_sources
from scale_cli.data.tokens import TokenisedCorpus
from scale_cli.errors import ConfigError
from scale_cli.evaluation.scoring import Passes, score_documents
from scale_cli.model.heads import HeadedModel
from scale_cli.model.routing import cosine_serves_base
from scale_cli.processes import main_first, share
from scale_cli.upscale.method import two_headed
from scale_cli.upscale.session import open_final

Values = npt.NDArray[np.float64]

_NUM_THRESHOLDS = 21


@dataclass(frozen=True)
class Sample:
    """The tokens of one role's corpora, as both heads saw them."""

    base: Values  # (tokens,) nats of the base head
    adapted: Values  # (tokens,) nats of the trained head; infinite where it has broken
    cosine: Values  # (tokens,) of the two heads' logits; NaN where there is none

    def loss(self, threshold: float) -> float:
        """Return nats per token under the cosine rule."""
        serves_base = cosine_serves_base(torch.from_numpy(self.cosine), threshold).numpy()
        return float(np.where(serves_base, self.base, self.adapted).mean())


@dataclass(frozen=True)
class FrontierPoint:
    """What one threshold costs, nats per token over the better head of each role."""

    threshold: float
    retention: float
    acquisition: float


@dataclass(frozen=True)
class Calibration:
    """The frontier over thresholds, and the one with the smallest summed cost."""

    frontier: list[FrontierPoint]
    chosen: FrontierPoint

    def lines(self) -> list[str]:
        """Return the frontier as a table, and the key that sets the choice."""
        lines = [f"{'threshold':>9}  {'retention':>10}  {'acquisition':>11}   nats/token over the better head"]
        for point in self.frontier:
            mark = "  <- smallest sum" if point is self.chosen else ""
            lines.append(f"{point.threshold:>9.3f}  {point.retention:>+10.4f}  {point.acquisition:>+11.4f}{mark}")
        return [*lines, f"set: method.router.threshold={self.chosen.threshold:.3f}"]


def calibrate(config: RunConfig, num_documents: int) -> Calibration:
    """Measure the cosine rule over its thresholds on the first documents of every held-out corpus."""
    roles = [source.role for source in config.evaluation.perplexity]
    for role in ("retention", "acquisition"):
        if role not in roles:
            raise ConfigError(f"evaluation.perplexity: calibration needs a corpus of role {role}")
    session = open_final(config)
    model = two_headed(session.load(), config.model)
    corpora = main_first(lambda: open_sources(config, config.evaluation.perplexity, session.tokenizer))
    samples = {
        role: _sample(model, [c for c, r in zip(corpora, roles, strict=True) if r == role], config, num_documents)
        for role in ("retention", "acquisition")
    }
    return choose_threshold(samples["retention"], samples["acquisition"])


def _sample(model: HeadedModel, corpora: list[TokenisedCorpus], config: RunConfig, num_documents: int) -> Sample:
    said = [
        tokens
        for corpus in corpora
        for _, tokens in score_documents(model, corpus, Passes.of(config), max_documents=num_documents, share=share())
    ]
    base, adapted = torch.cat([tokens.log_probs_KBT[:, 0] for tokens in said], dim=1).double().neg().numpy()
    return Sample(base, adapted, torch.cat([tokens.cosine_BT[0] for tokens in said]).double().numpy())


def choose_threshold(retention: Sample, acquisition: Sample) -> Calibration:
    """Return the frontier over evenly filled thresholds, and the threshold with the smallest summed cost.

    The candidates are quantiles of the cosines met, and the two that serve one head alone.
    """
    cosines = np.concatenate([retention.cosine, acquisition.cosine])
    quantiles = np.nanquantile(cosines, np.linspace(0.0, 1.0, _NUM_THRESHOLDS)[1:-1])
    thresholds = sorted({-1.0, *(round(float(quantile), 3) for quantile in quantiles), 1.0})
    best = [min(sample.base.mean(), sample.adapted.mean()) for sample in (retention, acquisition)]
    points = [
        FrontierPoint(threshold, retention.loss(threshold) - best[0], acquisition.loss(threshold) - best[1])
        for threshold in thresholds
    ]
    costs = [point.retention + point.acquisition for point in points]
    chosen = min(range(len(points)), key=lambda index: costs[index] if math.isfinite(costs[index]) else math.inf)
    return Calibration(points, points[chosen])
