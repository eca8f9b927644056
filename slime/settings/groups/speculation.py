"""Multi-token prediction and speculative decoding: what is trained of a draft, and which drafts engines may serve.

The draft of an engine is the checkpoint's own layer of multi-token prediction. Every weight sync brings it, where it is
trained, and compares it; a draft of another folder would grow stale unseen, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.settings.families import mtp_problem_of
from slime.settings.group import Passed, Rule
from slime.settings.groups.engine_rules import synced_engines

if TYPE_CHECKING:
    from slime.settings.args import Args

ALGORITHM = "speculative_algorithm"
"""SGLang's switch; these algorithms serve a layer of multi-token prediction."""
PLAIN_DRAFT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    ALGORITHM: ((None, "EAGLE", "NEXTN"), "drafts are layers of multi-token prediction; use NEXTN"),
    "speculative_draft_model_path": ((None,), "the draft is the checkpoint's own layer, which is synced; leave it out"),
    "speculative_draft_model_quantization": ((None, "unquant"), "a draft is verified unquantised; leave it out"),
    "speculative_token_map": ((None,), "the draft would hold a part of the output layer; leave it out"),
    "speculative_accept_threshold_single": (
        (None, 1.0),
        "tokens would not be sampled from the policy any more; leave it out",
    ),
    "speculative_accept_threshold_acc": (
        (None, 1.0),
        "tokens would not be sampled from the policy any more; leave it out",
    ),
    "enable_multi_layer_eagle": ((None, False), "several drafts are not synced; leave it out"),
    "enable_return_routed_experts": (
        (None, False),
        "experts under a draft are not verified; leave it out",
    ),
}
"""Settings of SGLang with a draft -> what they may be, and why."""


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """The layer of multi-token prediction. Engines serve it as a draft with SGLang's own --sglang-speculative-... ."""

    enable_mtp_training: bool = False
    """Train the checkpoint's layer of multi-token prediction beside the policy, whose gradients it leaves alone: hidden
    states, embedding and output layer are constants to it. Its loss is scaled by --mtp-loss-scaling-factor. Without the
    flag the layer stays as the checkpoint has it."""


def one_layer_predicts(args: Args) -> str | None:
    """The checkpoint says how many layers there are, and engines serve one."""
    if (given := args.megatron["mtp_num_layers"]) in (None, 1):
        return None
    return f"got mtp_num_layers {given}; one layer of multi-token prediction is trained and served: leave it out"


def mtp_can_be_trained(args: Args) -> str | None:
    """Every token of a packed row has one that follows it, and the layer is a part of the model."""
    if not args.enable_mtp_training:
        return None
    got = "got --enable-mtp-training"
    if (problem := mtp_problem_of(args.hf_checkpoint)) is not None:
        return f"{got} for a checkpoint {problem}; drop the flag"
    if args.use_prefix_sharing:
        return f"{got} with --use-prefix-sharing, where several tokens may follow one; drop one of them"
    if args.lora_rank:
        return f"{got} with --lora-rank, which trains adapters alone; drop one of them"
    return None


def drafts_are_synced(args: Args) -> str | None:
    """Engines propose tokens by what the trainer sends, and sample what the policy would."""
    for engines in synced_engines(args):
        if engines.sglang.get(ALGORITHM) is None:
            continue
        found = next(_against(args, engines.sglang), None)
        if found is not None:
            return engines.told(f"got {found[0]} with a draft: {found[1]}")
    return None


def _against(args: Args, sglang: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, (allowed, why) in PLAIN_DRAFT.items():
        given = sglang.get(name)
        if (str(given).upper() if name == ALGORITHM else given) not in allowed:
            yield f"--sglang-{name.replace('_', '-')} {given}", why
    if args.device == "cpu":
        yield "--device cpu", "SGLang's drafts attend with kernels of a GPU; leave --sglang-speculative-... out"
    if int(sglang.get("pp_size") or 1) > 1:
        yield f"sglang_pp_size {sglang['pp_size']}", "SGLang's drafts know no pipeline stages; leave it out"
    if args.pause_generation_mode != "abort":
        yield (
            f"--pause-generation-mode {args.pause_generation_mode}",
            "no engine labels each of several tokens that one pass samples; use abort",
        )
    if (problem := mtp_problem_of(args.hf_checkpoint)) is not None:
        yield "a checkpoint", f"{problem}; leave --sglang-speculative-... out"


def _keeps_draft(s: Any) -> bool | None:
    """SGLang forgets a draft whose memory is lent, and one that is not trained is not sent again."""
    serves_one = s.given(f"sglang.{ALGORITHM}") is not None
    return True if serves_one and s.offload_rollout and not s.enable_mtp_training else None


RULES: tuple[Rule, ...] = (one_layer_predicts, mtp_can_be_trained, drafts_are_synced)
PASSED: tuple[Passed, ...] = (
    Passed("sglang", "enable_draft_weights_cpu_backup", _keeps_draft, "it is not sent again"),
)
