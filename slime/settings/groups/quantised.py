"""Engines that serve quantised weights, and what the trainer computes with beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime.core.hf_config import quantisation_of, read_hf_config
from slime.settings.fields import Need, opt
from slime.settings.group import Rule

if TYPE_CHECKING:
    from slime.settings.args import Args

NOT_LOADED = frozenset({("fp8", "llama")})
"""(quantisation, model) whose scales SGLang looks for under another name, and leaves undefined."""


def _is_quantised(s: Any) -> bool:
    return s.hf_checkpoint is not None and quantisation_of(read_hf_config(s.hf_checkpoint)) is not None


_QUANTISED = Need(_is_quantised, "a quantised --hf-checkpoint (quantization_config in its config.json)")


@dataclass(frozen=True, kw_only=True)
class QuantisedSettings:
    """--hf-checkpoint says whether engines serve quantised weights, and in which format; see docs/quantised.md."""

    trainer_weights: Literal["plain", "fake-quantised"] = opt("plain", asks=lambda v: v != "plain", needs=_QUANTISED)
    """What the trainer's linear layers compute with. plain: its weights in the training dtype. fake-quantised: what
    engines will make of them, quantised and dequantised in each forward pass (QAT); gradients go to the weights as they
    are."""


def engines_take_quantised_weights(args: Args) -> str | None:
    """Engines serve --hf-checkpoint in its own format, which needs kernels of a GPU and loaders that know it."""
    config = read_hf_config(args.hf_checkpoint)
    found = quantisation_of(config)
    if args.debug_train_only or found is None:
        return None
    method, family = found.get("quant_method"), config.get("model_type")
    plain = "do: slime convert IN OUT --to bf16, and give OUT"
    if args.device == "cpu":
        return (
            f"got hf_checkpoint {args.hf_checkpoint}, which is quantised ({method}), on a CPU, for which SGLang has no "
            f"such kernels; {plain}"
        )
    if args.sglang["dtype"] != "bfloat16":
        return (
            f"got sglang_dtype {args.sglang['dtype']} with hf_checkpoint {args.hf_checkpoint}, which is quantised "
            f"({method}): engines then compute in bfloat16; give --sglang-dtype bfloat16"
        )
    if (method, family) in NOT_LOADED:
        return (
            f"got hf_checkpoint {args.hf_checkpoint}, a {family} in {method}, of which SGLang 0.5.16 does not load the "
            f"scales; {plain}"
        )
    if args.rollout_external_engine_addrs:
        return (
            f"got hf_checkpoint {args.hf_checkpoint}, which is quantised ({method}), with engines that run already, "
            f"which do not report codes and scales; let slime start them, or {plain}"
        )
    return None


def fake_quantised_weights_are_trained(args: Args) -> str | None:
    """Adapters are added behind a layer: engines quantise the sum."""
    if args.trainer_weights == "plain" or args.lora_rank is None:
        return None
    return (
        f"got --trainer-weights {args.trainer_weights} with --lora-rank {args.lora_rank}: engines quantise weights "
        "with their adapters in them, the trainer adds these behind; leave one of them out"
    )


RULES: tuple[Rule, ...] = (engines_take_quantised_weights, fake_quantised_weights_are_trained)
