"""The user's function in place of the importance weights: `--custom-tis-function-path`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slime.algorithms.off_policy import CORRECTIONS, MismatchCorrection, OffPolicyTokens
from slime.core.errors import HookError
from slime.settings.hooks import load_hook

if TYPE_CHECKING:
    from torch import Tensor

    from slime.settings import Args

FLAG = "--custom-tis-function-path"


@CORRECTIONS.register("custom_tis")
@dataclass(frozen=True, kw_only=True)
class CustomWeights(MismatchCorrection):
    """Lists per sample in; the changed loss, masks per sample and metrics [R] out."""

    switch: ClassVar[str] = FLAG
    asked_by: ClassVar[str] = "use_tis"
    place: ClassVar[int] = 10

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """It takes the place of `tis`."""
        return bool(settings.use_tis and settings.custom_tis_function_path)

    def check(self, args: Args) -> str | None:
        """There is a function to call."""
        if not args.custom_tis_function_path:
            return f"got --off-policy-corrections custom_tis without {FLAG}, which names its function; give both"
        return super().check(args)

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Correction`. Raises `HookError` if the function breaks its contract."""
        import torch

        assert tokens.args.custom_tis_function_path is not None, "`check` refuses it"
        result = load_hook(tokens.args.custom_tis_function_path, "tis")(
            args=tokens.args,
            pg_loss=loss,
            train_log_probs=list(tokens.trainer_log_probs.split(tokens.lengths)),
            rollout_log_probs=list(tokens.rollout_log_probs.split(tokens.lengths)),
            loss_masks=list(tokens.mask.split(tokens.lengths)),
            total_lengths=list(tokens.total_lengths),
            response_lengths=list(tokens.lengths),
        )
        if not isinstance(result, tuple) or len(result) != 3:
            raise HookError(f"{FLAG}: got {type(result).__name__}; it returns (pg_loss, masks, metrics)")
        changed, masks, metrics = result
        if changed.shape != loss.shape or [len(m) for m in masks] != list(tokens.lengths):
            raise HookError(f"{FLAG}: got a loss of shape {list(changed.shape)} for {list(loss.shape)} tokens")
        keep = torch.cat([torch.as_tensor(m) for m in masks]) if masks else torch.zeros_like(tokens.mask)
        kept = (keep.to(tokens.mask.device) > 0) & (tokens.mask > 0)
        changed = torch.where(kept, changed, torch.zeros_like(changed))
        return changed, {str(name): torch.as_tensor(value).float() for name, value in metrics.items()}
