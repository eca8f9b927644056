"""On-policy distillation: a teacher's log-probs as a term of the advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.settings.fields import opt


@dataclass(frozen=True, kw_only=True)
class TeacherArgs:
    """The student samples, the teacher judges every token."""

    use_opd: bool = False
    """Subtract opd_kl_coef * (student - teacher log-prob) from every token's advantage."""
    opd_type: Literal["sglang", "megatron"] | None = None
    """Where the teacher's log-probs come from: sglang, the server --opd-teacher-url (or the generate function or sample
    hook that writes `sample.teacher_log_probs`); megatron, a forward pass of the trainer under --opd-teacher-load."""
    opd_teacher_url: str | None = None
    """SGLang server or router of the teacher, which reads the student's token ids. Rewards are then optional."""
    opd_teacher_api_key: str | None = opt(None, secret=True)
    """Bearer token that the server asks for."""
    opd_kl_coef: float = 1.0
    """Weight of the term."""
    opd_teacher_load: str | None = None
    """HF folder of the teacher, of the student's family and size."""
