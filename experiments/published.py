"""Figures of arXiv 2607.12696 v1 that experiments print beside their own (docs/design.md section 5).

8 x H200, Hugging Face Transformers prototype, k=2, D=3, budget 4, batch 1, greedy. Not results of this project.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedMethod:
    """One method of one target: averages over seven data sets.

    Attributes:
        verify_seconds, total_seconds: of a step.
        gigabytes: estimated bytes of a verification.
        tau: published for one target only.
        overlap: share of the true experts that the predictor names, on held-out traces.
    """

    method: str
    speedup: float
    u: float
    verify_seconds: float
    total_seconds: float
    gigabytes: float
    tau: float = math.nan
    overlap: float = math.nan


PUBLISHED = {
    "qwen3-235b-a22b": (
        PublishedMethod("likelihood", 1.22, 23.7, 0.832, 0.840, 99.3, 2.41),
        PublishedMethod("ecospec", 1.36, 20.5, 0.730, 0.742, 88.1, 2.32, 0.82),
    ),
    "gpt-oss-120b": (
        PublishedMethod("likelihood", 1.14, 11.6, 0.113, 0.148, 6.0),
        PublishedMethod("ecospec", 1.31, 10.6, 0.090, 0.129, 5.5, overlap=0.93),
    ),
    "deepseek-v3.1": (
        PublishedMethod("likelihood", 1.10, 31.4, 0.980, 0.988, 97.3),
        PublishedMethod("ecospec", 1.15, 31.2, 0.930, 0.942, 96.8, overlap=0.80),
    ),
}
