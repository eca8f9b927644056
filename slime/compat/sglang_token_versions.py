"""Labels each response token with its weight version, for `--pause-generation-mode retract` and `in_place`.

A request that continues across weight syncs has tokens from several versions, but SGLang 0.5.16 returns only the front
end's version at the time of the response. Forward passes and weight updates run on the same scheduler thread, so hooks
on this thread can track the version and label each pass. Forward hooks on the model would not work, because CUDA graphs
do not run them. Labels are returned in SGLang's `customized_info`, one per output token. Remove the hooks when SGLang
reports which weights sampled each token.

Invariants
1. A label is the version of the last update before the token's forward pass was launched.
2. An update waits for launched passes, because with overlapped scheduling one of them may still read the weights.
3. If a hook has no effect, labels are missing or stay 0, and the client rejects the response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.compat import Hook
from slime.core.engine_interface import TOKEN_VERSIONS_KEY

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = tuple(f"{MANAGER}.update_weights_from_{source}" for source in ("tensor", "distributed", "disk"))
"""The scheduler's methods that load weights."""
_served = {"version": 0}
"""The version served by this process. 0 is the checkpoint that the engine loaded at startup."""


def _label(result: Any, _scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Attaches the version to each request of a batch after launching its forward pass."""
    output = getattr(result, "logits_output", None)
    if output is not None:
        versions = [_served["version"]] * len(batch.reqs)
        output.customized_info = {**(output.customized_info or {}), TOKEN_VERSIONS_KEY: versions}


def _note(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    import torch

    torch.get_device_module().synchronize()
    answer = update(manager, request)
    _served["version"] = int(request.weight_version)
    return answer


HOOKS = (
    Hook("AFTER", "sglang.srt.managers.scheduler.Scheduler.run_batch", _label),
    *(Hook("AROUND", update, _note) for update in UPDATES),
)
