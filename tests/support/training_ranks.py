"""What the shared ranks (`tests.support.ranks`) do of training: layouts of a model, one after the other.

A layout: checkpoint, world_size, out (a folder for what is saved), megatron and args (settings), scenarios ({name:
{order, args}}), seed of the batch, lengths (from and to, of its responses), forked (samples of a group begin alike;
"agent": they are branches of an agent), seeing (a folder for their images), routed (numbers of layers, experts and
experts of a token, recorded at random), rounds (training steps after the scenarios), round_args (settings of the rounds
alone), save_after (a round), load (a folder that `save` wrote), export (into the folder hf) and provoke (errors; true
by default). Every rank writes its part of a checkpoint into `after_N` and, with `save_end`, `end`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slime.algorithms import Algorithm
from slime.core.errors import HookError, NumericsError
from tests.support.adapters import fill_b
from tests.support.measured_backend import MeasuredBackend
from tests.support.ranks import Ranks, Seat
from tests.support.training import (
    agent_batch,
    forked_batch,
    random_batch,
    training_args,
    with_routed_experts,
    with_samples,
)
from tests.support.vision import seeing_batch

KINDS_OF_ERRORS = ("non_finite", "gap", "hook")


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one layout found."""

    gradients: dict[str, dict[str, Any]]
    """Scenario -> HF name -> gradient."""
    weights: dict[str, Any]
    """HF name -> tensor, after training."""
    result: dict[str, Any]
    """`log_probs` of each sample before training, and `metrics` of each round."""
    errors: dict[str, list[str]] = field(default_factory=dict)
    """Kind -> what the ranks were told; shorter than the world if one was not."""


def run_layouts(
    ranks: Ranks, folder: Path, layouts: dict[str, dict[str, Any]], *, defaults: dict[str, Any]
) -> dict[str, Outcome]:
    """Runs every layout, one after the other; `defaults` fill what a layout leaves out."""
    outcomes = {}
    for name, layout in layouts.items():
        (folder / name).mkdir(parents=True)
        spec = {"scenarios": {}, **defaults, **layout, "out": str(folder / name)}
        told = ranks.run(train_layout, spec["world_size"], spec)
        errors = {kind: [own.errors[kind][0] for own in told if own.errors[kind]] for kind in KINDS_OF_ERRORS}
        outcomes[name] = dataclasses.replace(told[0], errors=errors)
    return outcomes


def train_layout(seat: Seat, spec: dict[str, Any]) -> Outcome:
    """One rank of one layout, from joining the process group to leaving it. Tensors are rank 0's."""
    out = Path(spec["out"])
    settings = spec.get("args", {})
    args = training_args(Path(spec["checkpoint"]), megatron=spec["megatron"], **settings)
    backend = MeasuredBackend(args, **seat.place)
    backend.weight_version = 1
    if args.lora_rank:
        fill_b(backend)
    made = {"seed": spec.get("seed", 0), **({"response_lengths": spec["lengths"]} if "lengths" in spec else {})}
    make = {"agent": agent_batch, True: forked_batch, False: random_batch}[spec.get("forked", False)]
    batch = make(**made)
    if spec.get("seeing"):
        batch = seeing_batch(Path(spec["seeing"]), Path(spec["checkpoint"]), seed=spec.get("seed", 0))
    if spec.get("routed"):
        batch = with_routed_experts(batch, *spec["routed"])
    all_gradients = {}
    for name, scenario in spec["scenarios"].items():
        order = scenario.get("order") or range(len(batch.samples))
        with _changed(backend, {**settings, **scenario.get("args", {})}):
            gradients = backend.gradients(with_samples(batch, [batch.samples[i] for i in order]))
        if seat.rank == 0:
            all_gradients[name] = _on_host(gradients)
    result: dict[str, Any] = {"log_probs": [x.tolist() for x in backend.log_probs(batch)], "metrics": []}
    if spec.get("load"):
        backend.load(Path(spec["load"]))
    if spec.get("export"):
        backend.save_hf(out / "hf")
    errors = errors_of(backend, batch, settings) if spec.get("provoke", True) else {}
    with _changed(backend, {**settings, **spec.get("round_args", {})}):
        for done in range(1, spec.get("rounds", 0) + 1):
            result["metrics"].append(backend.train(batch))
            if done == spec.get("save_after"):
                backend.save(out / f"after_{done}")
    if spec.get("save_end"):
        backend.save(out / "end")
    weights = _on_host(dict(backend.iter_hf_tensors()))
    backend.close()
    told = {kind: [errors[kind]] if kind in errors else [] for kind in KINDS_OF_ERRORS}
    return Outcome(all_gradients, weights if seat.rank == 0 else {}, result, told)


def _on_host(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


@contextlib.contextmanager
def _changed(backend: Any, settings: dict[str, Any]) -> Iterator[None]:
    """Other settings of a backend in the block, with what follows from them, its algorithm too; Megatron's stay."""
    args, algorithm = backend.args, backend._algorithm
    kept = dict(vars(args))
    changed = training_args(Path(args.hf_checkpoint), **settings)
    vars(args).update({name: value for name, value in vars(changed).items() if name != "megatron"})
    backend._algorithm = Algorithm.of(args)
    try:
        yield
    finally:
        vars(args).update(kept)
        backend._algorithm = algorithm


def errors_of(backend: Any, batch: Any, settings: dict[str, Any]) -> dict[str, str]:
    """What this rank is told about a NaN in one sample, and about log-probs that one sample's engine got wrong."""
    hook = {"custom_tis_function_path": f"{__file__}:first_rank_fails", "use_tis": True}
    cases: dict[str, tuple[float, dict[str, Any]]] = {
        "non_finite": (np.nan, {"use_rollout_logprobs": True}),
        "gap": (50.0, {"mismatch_limit": 20.0}),
        "hook": (0.0, hook),
    }
    out = {}
    for kind, (shift, changes) in cases.items():
        samples = list(batch.samples)
        broken = samples[3].rollout_log_probs + np.float32(shift)
        samples[3] = dataclasses.replace(samples[3], rollout_log_probs=broken)
        with _changed(backend, {**settings, **changes}):
            try:
                backend.train(with_samples(batch, samples))
            except (NumericsError, HookError, ZeroDivisionError) as error:
                out[kind] = str(error)
    return out


def first_rank_fails(*, pg_loss: Any, loss_masks: Any, **_others: Any) -> Any:
    """A `--custom-tis-function-path` with a mistake that only one rank of the last stage runs into."""
    from megatron.core import parallel_state as mpu

    if mpu.get_data_parallel_rank() == mpu.get_context_parallel_rank() == mpu.get_tensor_model_parallel_rank() == 0:
        raise ZeroDivisionError("a mistake of the user")
    return pg_loss, loss_masks, {}


FLOAT32_LIMIT = 1e-3
"""Of a float32 gradient's error, relative to its largest entry, unless plain PyTorch is worse than a third of it."""


def run_on_cpu_and_gpu(
    folder: Path, checkpoint: Path, devices: dict[str, dict[str, Any]], figure: Callable[[str, float], None]
) -> dict[str, float]:
    """One rank for each of `devices` ("cpu" and "gpu" in float32, others as they like): how far each is
    from the CPU's log-probs on average.

    The GPU's float32 log-probs must be within 1e-4 of the CPU's. Each gradient must be within `FLOAT32_LIMIT` of the
    CPU's or within three times the error that plain PyTorch makes on the GPU, since a gradient that is nearly zero
    because its parts cancel is inexact in any form. No error above 1 % is accepted.
    """
    plain = {**devices["gpu"], "args": {**devices["gpu"]["args"], "kernels": "reference"}}
    layouts = {name: {"world_size": 1, "megatron": {}, **own} for name, own in {**devices, "gpu_plain": plain}.items()}
    defaults = {"checkpoint": str(checkpoint), "scenarios": {"four": {}}, "rounds": 1, "provoke": False}
    outcomes: dict[str, Outcome] = {}
    for kind in ("cpu", "cuda"):  # in processes of their own: what helps Megatron on a CPU stays for a process's life
        own = {name: layout for name, layout in layouts.items() if layout["args"]["device"] == kind}
        with Ranks(fresh=True) as ranks:
            outcomes |= run_layouts(ranks, folder / kind, own, defaults=defaults)
    errors = {name: _errors_of_gradients(outcomes["cpu"], outcomes[name]) for name in ("gpu", "gpu_plain")}
    log_probs = {name: np.concatenate(outcome.result["log_probs"]) for name, outcome in outcomes.items()}
    worst = float(np.abs(log_probs["gpu"] - log_probs["cpu"]).max())
    figure("float32 gradients", max(errors["gpu"].values()))
    figure("of plain PyTorch", max(errors["gpu_plain"].values()))
    figure("float32 log-probs", worst)
    for tensor, error in errors["gpu"].items():
        limit = min(max(FLOAT32_LIMIT, 3 * errors["gpu_plain"][tensor]), 1e-2)
        assert error < limit, f"gradient of {tensor} differs by {error:.1e} of its largest entry, limit {limit:.1e}"
    assert worst < 1e-4, "float32 log-probs of GPU and CPU differ"
    far = {name: float(np.abs(own - log_probs["cpu"]).mean()) for name, own in log_probs.items()}
    for name in devices.keys() - {"cpu", "gpu"}:
        figure(f"log-probs {name}", far[name])
    return far


def _errors_of_gradients(want: Outcome, got: Outcome) -> dict[str, float]:
    """The largest error in each gradient, relative to its largest entry."""
    return {
        name: float((got.gradients["four"][name] - own).abs().max() / own.abs().max().clamp_min(1e-6))
        for name, own in want.gradients["four"].items()
    }
