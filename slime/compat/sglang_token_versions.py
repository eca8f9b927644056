"""Labels each token of a response with its weight version, for `--pause-generation-mode retract` and `in_place`.

A request that continues across weight syncs has tokens of several versions, but SGLang 0.5.16 returns only the version
that its front end has when it responds. Forward passes and weight updates run on one thread of the scheduler. Hooks in
that thread record the version and label each pass. (Forward hooks of the model would not do, because CUDA graphs do not
run them.) The labels travel in SGLang's `customized_info`, one entry per output token. Remove the hooks when SGLang
reports which weights sampled each token.

Invariants
1. A label is the version of the last update before its forward pass was launched.
2. An update waits for launched passes, because with overlapped scheduling one may still be reading the weights.
3. If a hook has no effect, labels are missing or stay 0, and the client refuses the response.
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
"""The version that this process serves. 0 is the checkpoint that the engine loaded itself."""


def _label(result: Any, _scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Adds the version for each request of the batch after a forward pass was launched."""
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
