"""Makes an engine answer for all its pipeline stages: weight updates and digests with `--sglang-pp-size`.

In SGLang 0.5.16 the first stage handles a request of the control plane, answers it, and then sends it on to the next
stage. So `/weights_checker` reports the first stage alone; an update counts as done while later stages have not begun
to read what the sender is about to fill again; and the first stage would wait for ever for a later one to join a group
that this one has not heard of. A rank's payload of an update and its place in the group of the sender go by its number
in its stage, as if there were one stage.

`register` puts that right through SGLang's own plugin registry. A request of the control plane of weights or memory
goes on to the next stage before it is handled. The later stages send what they have to say to the first one, which
answers with all of it. To be removed when SGLang answers for all stages.

Consumes: such requests, in every scheduler. Produces: one answer for all stages. Waits for: on the first stage, the
answers of the others, without a limit: whoever asked has one, and a stage that ends takes the server down. Is woken by:
their messages, over SGLang's own group of all ranks on the host side.

Invariants
1. The first stage answers after all others have: what an answer says holds for all.
2. A request goes to a stage once, in the order of the stage before.
3. Messages to the first stage meet no others: SGLang sends from a stage to the next one alone, but where prefill and
   decoding are apart (refused).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

FLAG = "--pp-size"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
_SENDER = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin._pp_send_pyobj_to_next_stage"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_tensor"
_JOIN = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.init_weights_update_group"
JOINT = {
    "UpdateWeightsFromTensorReqInput": "update_weights_from_tensor",
    "UpdateWeightsFromDistributedReqInput": "update_weights_from_distributed",
    "UpdateWeightFromDiskReqInput": "update_weights_from_disk",
    "InitWeightsUpdateGroupReqInput": "init_weights_update_group",
    "DestroyWeightsUpdateGroupReqInput": "destroy_weights_update_group",
    "CheckWeightsReqInput": "check_weights",
    "ReleaseMemoryOccupationReqInput": "release_memory_occupation",
    "ResumeMemoryOccupationReqInput": "resume_memory_occupation",
}
"""Requests that all stages handle at the same time -> the method that handles one."""
_SENT = "_slime_sent_ahead"


def register() -> None:
    """Call before SGLang's scheduler loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SCHEDULER, _send_ahead, HookType.BEFORE)
    HookRegistry.register(_SENDER, _send_once, HookType.AROUND)
    for method in JOINT.values():
        HookRegistry.register(f"{_MANAGER}.{method}", _answer_for_all, HookType.AROUND)
    HookRegistry.register(_WORKER, _own_payload, HookType.BEFORE)
    HookRegistry.register(_JOIN, _own_place, HookType.AROUND)


def _send_ahead(scheduler: Any, requests: Sequence[Any]) -> None:
    """Before a stage handles requests: the next stage gets those that it must handle at the same time."""
    if scheduler.ps.pp_rank + 1 >= scheduler.ps.pp_size:
        return
    if any(type(request).__name__ in JOINT for request in requests):
        scheduler._pp_commit_comm_work(scheduler.send_req_work)
        scheduler.send_req_work = scheduler._pp_send_pyobj_to_next_stage(requests, async_send=True)
        setattr(scheduler, _SENT, requests)


def _send_once(send: Callable[..., list[Any]], scheduler: Any, data: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Around sending to the next stage: not what was sent ahead."""
    if data is getattr(scheduler, _SENT, None):
        setattr(scheduler, _SENT, None)
        return []
    return send(scheduler, data, *args, **kwargs)


def _answer_for_all(handle: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around handling a request: the first stage collects the answers of all."""
    answer = handle(manager, request)
    scheduler = manager.scheduler
    ps = scheduler.ps
    if ps.attn_tp_rank or ps.attn_cp_rank:  # those that SGLang lets speak for a stage are the others
        return answer
    from sglang.srt.utils import point_to_point_pyobj

    group = scheduler.world_group.cpu_group
    first = ps.attn_dp_rank * ps.attn_cp_size * ps.attn_tp_size
    if ps.pp_rank:
        own = ps.pp_rank * ps.tp_size + first
        point_to_point_pyobj([answer], own, group, own, first)
        return answer
    others = [
        point_to_point_pyobj([], first, group, stage * ps.tp_size + first, first)[0] for stage in range(1, ps.pp_size)
    ]
    return merged([answer, *others])


def merged(answers: Sequence[Any]) -> Any:
    """The first answer, which now says what all say: a failure of one, and the digests of all."""
    whole = answers[0]
    failures = [answer for answer in answers if getattr(answer, "success", True) is False]
    if failures:
        whole.success, whole.message = False, " | ".join(str(answer.message) for answer in failures)
    if any(getattr(answer, "payload", None) for answer in answers):
        whole.payload = [rank for answer in answers for rank in answer.payload or ()]
    return whole


def _own_payload(worker: Any, request: Any) -> None:
    """Before a rank picks its payload by its number in the stage: leaves those of its stage."""
    ps, payloads = worker.ps, request.serialized_named_tensors
    assert len(payloads) == ps.pp_size * ps.tp_size, f"{len(payloads)} payloads for {ps.pp_size} x {ps.tp_size} ranks"
    request.serialized_named_tensors = payloads[ps.pp_rank * ps.tp_size : (ps.pp_rank + 1) * ps.tp_size]


def _own_place(
    join: Callable[..., Any], updater: Any, address: str, port: int, rank_offset: int, *rest: Any, **named: Any
) -> Any:
    """Around joining the group of the sender: a later stage comes behind those before it."""
    ps = updater.get_model_runner().ps
    return join(updater, address, port, rank_offset + ps.pp_rank * ps.tp_size, *rest, **named)
