"""On-policy distillation: a teacher's log-probs as a term of the advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.settings.conditions import ADVANTAGES
from slime.settings.fields import Need, derived, opt
from slime.settings.group import Rule
from slime.settings.groups.hooks import teacher_of_reward
from slime.settings.ranges import COEFFICIENT

if TYPE_CHECKING:
    from slime.settings.args import Args

_TEACHER = Need(lambda s: s.use_opd, "--use-opd")
_SERVER = Need(lambda s: s.opd_teacher_url is not None, "--opd-teacher-url")


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """The student samples, the teacher judges every token."""

    use_opd: bool = opt(False, needs=ADVANTAGES)
    """Subtract opd_kl_coef * (student - teacher log-prob) from every token's advantage."""
    opd_type: Literal["sglang", "megatron"] | None = opt(None, needs=(ADVANTAGES, _TEACHER))
    """Where the teacher's log-probs come from: sglang, the server --opd-teacher-url (or the generate function or sample
    hook that writes `sample.teacher_log_probs`); megatron, a forward pass of the trainer under --opd-teacher-load."""
    opd_teacher_url: str | None = derived(
        teacher_of_reward, "--rm-url, with the public reward function of distillation", needs=_TEACHER
    )
    """SGLang server or router of the teacher, which reads the student's token ids. Rewards are then optional."""
    opd_teacher_api_key: str | None = opt(None, secret=True, needs=_SERVER)
    """Bearer token that the server asks for."""
    opd_kl_coef: float = opt(1.0, needs=(ADVANTAGES, _TEACHER), within=COEFFICIENT)
    """Weight of the term."""
    opd_teacher_load: str | None = opt(None, needs=(ADVANTAGES, _TEACHER))
    """HF folder of the teacher, of the student's family and size."""


def distillation_has_a_teacher(args: Args) -> str | None:
    """The teacher is named, and only once."""
    if not args.use_opd:
        return None
    if args.opd_type is None:
        return "got --use-opd without --opd-type; say sglang (log-probs come with the samples) or megatron"
    if (args.opd_type == "megatron") != bool(args.opd_teacher_load):
        return (
            f"got opd_type {args.opd_type} with opd_teacher_load {args.opd_teacher_load}; the folder goes with "
            "megatron, and only with it"
        )
    if args.opd_teacher_url and (args.opd_type != "sglang" or args.rollout_temperature != 1.0):
        return (
            f"got opd_teacher_url with opd_type {args.opd_type}, rollout_temperature {args.rollout_temperature}; "
            "it goes with sglang, whose log-probs of given tokens are those at temperature 1"
        )
    return None


RULES: tuple[Rule, ...] = (distillation_has_a_teacher,)
