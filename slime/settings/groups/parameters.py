"""Which parameters are trained, adapters, and copies of the policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParameterArgs:
    """Patterns are regexes (`re.search`) on a parameter's Megatron name or any HF name of its table row; docs/lora.md.

    They concern the policy; a critic trains all of its parameters.
    """

    only_train_params_name_list: tuple[str, ...] | None = None
    """Train the parameters that one of these patterns matches, and freeze all others."""
    freeze_params_name_list: tuple[str, ...] | None = None
    """Freeze the parameters that one of these patterns matches."""
    lora_rank: int | None = None
    """Freeze the model and train adapters of this rank on its linear layers (LoRA, arXiv:2106.09685). Exports and the
    weight sync merge them."""
    lora_alpha: float | None = None
    """Adapters are scaled by lora_alpha / lora_rank. Default: twice the rank, so by 2 whatever the rank is."""
    lora_target_modules: tuple[str, ...] | None = None
    """Linear layers that get an adapter. Default: all of attention and MLP, experts included. The routed experts of a
    layer get one each as soon as one of them matches."""
    ref_update_interval: int | None = None
    """Copy the policy into the reference every N rollouts. Default: the reference stays as it is."""
    keep_old_actor: bool = False
    """Old log-probs come from a copy of the weights that the batch was sampled under, which train_async.py has left
    behind. Default: from the weights before the update."""
