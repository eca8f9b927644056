"""One training rank in a process of its own, driven by a JSON file: `python -m tests.support.training_worker SPEC
RANK`.

SPEC: `layouts`, a list that all ranks work through, since importing costs more than training. A layout: checkpoint,
world_size (ranks beyond it skip the layout), out (folder), megatron and args (settings), scenarios ({name:
{order, args}}), seed of the batch, rounds (training steps after the scenarios), round_args (settings of the rounds
alone), save_after (a round), load (a folder that `save` wrote), export (into the folder hf) and provoke (errors; true
by default). Rank 0 writes `<name>.safetensors` with the
gradients of each scenario, `weights.safetensors` after training and `result.json` with metrics; every rank writes
`errors_RANK.json` (see `errors_of`) and its part of a checkpoint into `after_N` and, with `save_end`, `end`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any


def main(spec_path: str, rank: int) -> None:
    """Runs one rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import torch

    torch.set_num_threads(1)
    for layout in json.loads(Path(spec_path).read_text())["layouts"]:
        if rank < layout["world_size"]:
            run_layout(layout, rank)


def run_layout(spec: dict[str, Any], rank: int) -> None:
    """One rank of one layout, from joining the process group to leaving it."""
    from safetensors.torch import save_file

    from tests.support.adapters import fill_b
    from tests.support.measured_backend import MeasuredBackend
    from tests.support.training import random_batch, training_args, with_samples

    out = Path(spec["out"])
    listener, port = meet(out / "port", rank)
    settings = spec.get("args", {})
    args = training_args(Path(spec["checkpoint"]), megatron=spec["megatron"], **settings)
    backend = MeasuredBackend(
        args,
        rank=rank,
        world_size=spec["world_size"],
        local_rank=rank,  # counts on a GPU only
        master_address="127.0.0.1",
        master_port=port,
        listener=listener,
    )
    backend.weight_version = 1
    if args.lora_rank:
        fill_b(backend)
    batch = random_batch(seed=spec.get("seed", 0))
    results: dict[str, Any] = {}
    for name, scenario in spec["scenarios"].items():
        changed = training_args(Path(spec["checkpoint"]), **{**settings, **scenario.get("args", {})})
        kept = dict(vars(args))
        vars(args).update({k: v for k, v in vars(changed).items() if k != "megatron"})
        order = scenario.get("order") or range(len(batch.samples))
        gradients = backend.gradients(with_samples(batch, [batch.samples[i] for i in order]))
        if rank == 0:
            save_file({k: v.cpu().contiguous().clone() for k, v in gradients.items()}, out / f"{name}.safetensors")
        vars(args).update(kept)
    results["log_probs"] = [x.tolist() for x in backend.log_probs(batch)]
    if spec.get("load"):
        backend.load(Path(spec["load"]))
    if spec.get("export"):
        backend.save_hf(out / "hf")
    (out / f"errors_{rank}.json").write_text(json.dumps(errors_of(backend, batch) if spec.get("provoke", True) else {}))
    vars(args).update(spec.get("round_args", {}))
    results["metrics"] = []
    for done in range(1, spec.get("rounds", 0) + 1):
        results["metrics"].append(backend.train(batch))
        if done == spec.get("save_after"):
            backend.save(out / f"after_{done}")
    if spec.get("save_end"):
        backend.save(out / "end")
    weights = {k: v.cpu().contiguous().clone() for k, v in backend.iter_hf_tensors()}
    if rank == 0:
        save_file(weights, out / "weights.safetensors")
        (out / "result.json").write_text(json.dumps(results))
    backend.close()


def errors_of(backend: Any, batch: Any) -> dict[str, str]:
    """What this rank is told about a NaN in one sample, and about log-probs that one sample's engine got wrong."""
    import dataclasses

    import numpy as np

    from slime.core.errors import HookError, NumericsError
    from tests.support.training import with_samples

    hook = {"custom_tis_function_path": f"{__file__}:first_rank_fails", "use_tis": True}
    cases: dict[str, tuple[float, dict[str, Any]]] = {
        "non_finite": (np.nan, {"use_rollout_logprobs": True}),
        "gap": (50.0, {"mismatch_limit": 20.0}),
        "hook": (0.0, hook),
    }
    out, kept = {}, dict(vars(backend.args))
    for kind, (shift, changes) in cases.items():
        samples = list(batch.samples)
        broken = samples[3].rollout_log_probs + np.float32(shift)
        samples[3] = dataclasses.replace(samples[3], rollout_log_probs=broken)
        vars(backend.args).update(changes)
        try:
            backend.train(with_samples(batch, samples))
        except (NumericsError, HookError, ZeroDivisionError) as error:
            out[kind] = str(error)
        vars(backend.args).update(kept)
    return out


def first_rank_fails(*, pg_loss: Any, loss_masks: Any, **_others: Any) -> Any:
    """A `--custom-tis-function-path` with a mistake that only one rank of the last stage runs into."""
    from megatron.core import parallel_state as mpu

    if mpu.get_data_parallel_rank() == mpu.get_context_parallel_rank() == mpu.get_tensor_model_parallel_rank() == 0:
        raise ZeroDivisionError("a mistake of the user")
    return pg_loss, loss_masks, {}


def meet(file: Path, rank: int) -> tuple[socket.socket | None, int]:
    """Rank 0 listens on a free port and tells it in `file`; a port chosen beforehand could be taken meanwhile."""
    from slime.weights.rendezvous import listen_on

    if rank == 0:
        listener = listen_on("127.0.0.1", 0)
        port = int(listener.getsockname()[1])
        partial = file.with_suffix(".partial")
        partial.write_text(str(port))
        partial.rename(file)
        return listener, port
    while not file.exists():
        time.sleep(0.02)
    return None, int(file.read_text())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
