"""On-policy distillation as a term of the advantage (Agarwal et al. 2023, GKD, arXiv:2306.13649; Lu et al. 2025,
"On-policy distillation"): each token is rewarded by the teacher's log-prob minus the student's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def distilled(
    advantages: npt.NDArray[Any],
    student_log_probs: npt.NDArray[Any],
    teacher_log_probs: npt.NDArray[Any],
    mask: npt.NDArray[Any],
    coef: float,
) -> Array:
    """A - coef * (log student - log teacher) at trained tokens, zero where masked; all [R]. Whiten after it."""
    trained = np.asarray(mask) > 0
    out = np.zeros(trained.shape)
    excess = np.asarray(student_log_probs, np.float64)[trained] - np.asarray(teacher_log_probs, np.float64)[trained]
    out[trained] = np.asarray(advantages, np.float64)[trained] - coef * excess
    return out
