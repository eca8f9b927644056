"""Makes weight updates and digest requests work on all pipeline stages of an engine (`--sglang-pp-size`).

In SGLang (0.5.16 and 0.5.23), the first stage handles and answers a control request before it forwards the request to
the next stage. So `/weights_checker` reports only the first stage. An update is acknowledged before later stages have
read memory that the sender then reuses. When joining a group, the first stage waits forever for later stages, which
have not received the request yet. SGLang also numbers payloads and group ranks as if the engine had only one stage.

With these hooks, each stage forwards a control request about weights or memory before handling it. Later stages send
their results to the first stage over SGLang's CPU group of all ranks, and the first stage responds for all of them.
This wait needs no timeout, because the caller has one and the server exits if a stage exits. Remove the hooks when
SGLang responds for all stages.

Invariants
1. The first stage responds only after all others, so its response covers all stages.
2. Each stage gets each request exactly once, and all stages get requests in the same order.
3. No other messages are sent to the first stage. SGLang itself sends only to the next stage, except with separate
   prefill and decode engines, which slime does not allow together with pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slime.compat import Hook
from slime.compat.sglang_token_versions import MANAGER
from slime.core.engine_interface import BEFORE_SESSIONS, WITH_SESSIONS

FLAG = "--pp-size"
_PIPELINE = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
JOINT = {
    "UpdateWeightsFromTensorReqInput": "update_weights_from_tensor",
    "UpdateWeightsFromDistributedReqInput": "update_weights_from_distributed",
    "UpdateWeightFromDiskReqInput": "update_weights_from_disk",
    "BeginWeightUpdateReqInput": "begin_weight_update",
    "EndWeightUpdateReqInput": "end_weight_update",
    "InitWeightsUpdateGroupReqInput": "init_weights_update_group",
    "DestroyWeightsUpdateGroupReqInput": "destroy_weights_update_group",
    "CheckWeightsReqInput": "check_weights",
    "ReleaseMemoryOccupationReqInput": "release_memory_occupation",
    "ResumeMemoryOccupationReqInput": "resume_memory_occupation",
}
"""Maps each request type that all stages must handle together to its handler method."""
_SESSION = ("begin_weight_update", "end_weight_update")
_SENT = "_slime_sent_ahead"


def _place_of(owner: Any) -> Any:
    """Returns SGLang's parallel state of this rank. In 0.5.16, it is a field of `owner`."""
    if hasattr(owner, "ps"):
        return owner.ps
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _send_ahead(scheduler: Any, requests: Sequence[Any]) -> None:
    """If any of the requests must be handled by both stages together, forwards them to the next stage first."""
    place = _place_of(scheduler)
    if place.pp_rank + 1 >= place.pp_size:
        return
    if any(type(request).__name__ in JOINT for request in requests):
        scheduler._pp_commit_comm_work(scheduler.send_req_work)
        scheduler.send_req_work = scheduler._pp_send_pyobj_to_next_stage(requests, async_send=True)
        setattr(scheduler, _SENT, requests)


def _send_once(send: Callable[..., list[Any]], scheduler: Any, data: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Sends requests to the next stage unless `_send_ahead` has already sent them."""
    if data is getattr(scheduler, _SENT, None):
        setattr(scheduler, _SENT, None)
        return []
    return send(scheduler, data, *args, **kwargs)


def _answer_for_all(handle: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Handles a request. On the first stage, returns the merged results of all stages."""
    answer = handle(manager, request)
    scheduler = manager.scheduler
    ps = _place_of(scheduler)
    if ps.attn_tp_rank or ps.attn_cp_rank:  # in SGLang, only rank 0 answers for a stage
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
    """Merges the failures and digests of all results into the first one."""
    whole = answers[0]
    failures = [answer for answer in answers if getattr(answer, "success", True) is False]
    if failures:
        whole.success, whole.message = False, " | ".join(str(answer.message) for answer in failures)
    if any(getattr(answer, "payload", None) for answer in answers):
        whole.payload = [rank for answer in answers for rank in answer.payload or ()]
    return whole


def _of_this_stage(ps: Any, payloads: Sequence[Any]) -> Sequence[Any]:
    """Returns this stage's payloads. Each rank then selects its own payload by its rank within the stage."""
    assert len(payloads) == ps.pp_size * ps.tp_size, f"{len(payloads)} payloads for {ps.pp_size} x {ps.tp_size} ranks"
    return payloads[ps.pp_rank * ps.tp_size : (ps.pp_rank + 1) * ps.tp_size]


def _own_payload(worker: Any, request: Any) -> None:
    request.serialized_named_tensors = _of_this_stage(worker.ps, request.serialized_named_tensors)


def _read_own(read: Callable[..., Any], worker: Any, payloads: Sequence[Any]) -> Any:
    return read(worker, _of_this_stage(_place_of(worker), payloads))


def _own_place(
    join: Callable[..., Any], updater: Any, address: str, port: int, rank_offset: int, *rest: Any, **named: Any
) -> Any:
    """Joins the sender's group, with ranks numbered after those of earlier stages."""
    ps = _place_of(updater.get_model_runner())
    return join(updater, address, port, rank_offset + ps.pp_rank * ps.tp_size, *rest, **named)


HOOKS = (
    Hook("BEFORE", "sglang.srt.managers.scheduler.Scheduler.process_input_requests", _send_ahead),
    Hook("AROUND", f"{_PIPELINE}._pp_send_pyobj_to_next_stage", _send_once),
    *(
        Hook("AROUND", f"{MANAGER}.{method}", _answer_for_all, WITH_SESSIONS if method in _SESSION else "")
        for method in JOINT.values()
    ),
    Hook("BEFORE", f"{_WORKER}.update_weights_from_tensor", _own_payload, BEFORE_SESSIONS),
    Hook("AROUND", f"{_WORKER}.deserialize_own_rank", _read_own, WITH_SESSIONS),
    Hook("AROUND", f"{_UPDATER}.init_weights_update_group", _own_place),
)
