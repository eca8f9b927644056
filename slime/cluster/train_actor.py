"""Ray actor for one training rank, with its `MegatronBackend` and its `RankWeightSync`.

The driver calls every method on all ranks in the same order. One thread runs the calls, a second one writes checkpoint
files (`write_parts`), a third one records lost engines (`give_up`), and a fourth one says where the rank stands
(`look`). Collectives wait for the other ranks, up to the
process group's timeout. A weight sync also waits for engines.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime.cluster.engine_tracker import OWN_TIME, WEIGHT_VERSION, EngineInfo
from slime.cluster.hang_doctor import CALLS, Look, bytes_moved
from slime.core.batch import TrainBatch
from slime.core.cores import keep_freed_memory, thread_variables
from slime.core.processes import interface_variables
from slime.observability.logs import setup_logging
from slime.observability.stacks import standing_here
from slime.settings import Args

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@ray.remote(max_restarts=0, concurrency_groups={"save": 1, "tell": 1, "watch": 1})
class TrainActor:
    def __init__(
        self, args: Args, rank: int, slots: Sequence[int], num_threads: int, log_dir: str, address: str
    ) -> None:
        """`slots`: [training ranks] placement slots. `address`: address at which other processes reach this host."""
        setup_logging(Path(log_dir) / f"train_{rank}.log", crashes=True)
        self._args, self._rank, self._slots, self._address = args, rank, tuple(slots), address
        os.environ.update(args.train_env_vars)
        os.environ.update(interface_variables(address, os.environ))
        self._computes_on_cpu = args.device == "cpu" or any(
            role.get("optimizer_cpu_offload") for role in (args.megatron, args.critic)
        )
        if self._computes_on_cpu:  # OpenMP and MKL read these variables when torch is first imported
            os.environ.update(thread_variables(num_threads, os.environ))
        if args.device == "cpu":
            keep_freed_memory()
        self._listener: Any = None
        self._backend: Any = None
        self._weight_sync: Any = None
        self._snapshot: Any = None

    def free_address(self) -> tuple[str, int]:
        """Opens a port for rank 0 to listen on and returns (host, port)."""
        from slime.weights.rendezvous import listen_on

        self._listener = listen_on(self._address)
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def build(self, master_address: str, master_port: int) -> dict[str, float]:
        """Joins the process group, builds the model, loads its weights and runs a warmup step.

        Returns the duration of import, build and warmup step in seconds.
        """
        began_s = time.perf_counter()
        import torch

        from slime.training.backend import MegatronBackend

        imported_s = time.perf_counter()
        if self._computes_on_cpu:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._backend = MegatronBackend(
            self._args,
            rank=self._rank,
            world_size=len(self._slots),
            local_rank=0,  # Ray shows each actor only its own GPU
            master_address=master_address,
            master_port=master_port,
            listener=self._listener,
        )
        self._backend.weight_version = 1
        built_s = time.perf_counter()
        self._backend.rehearse()
        ended_s = time.perf_counter()
        return {"import": imported_s - began_s, "build": built_s - imported_s, "rehearsal": ended_s - built_s}

    def warm_digests(self) -> None:
        from slime.serving.payloads import warm_digest

        warm_digest(self._backend.device)

    def connect_engines(self) -> None:
        from slime.cluster.rank_weight_sync import RankWeightSync

        self._weight_sync = RankWeightSync(
            self._args,
            self._backend,
            rank=self._rank,
            slots=self._slots,
            address=self._address,
        )

    def sync_weights(
        self, engines: Sequence[EngineInfo], pause_mode: str, to_eval_fleet: bool = False
    ) -> dict[str, float]:
        """Sends the weights to `engines`, verifies them and resumes the engines. Rank 0 returns metrics and version,
        which all ranks have."""
        metrics: dict[str, float] = self._weight_sync.sync_weights(engines, pause_mode, to_eval_fleet=to_eval_fleet)
        if self._rank != 0:
            return {}
        return metrics | {WEIGHT_VERSION: float(self._backend.weight_version)}

    @ray.method(concurrency_group="tell")
    def give_up(self, url: str, incarnation: int) -> None:
        """Makes the current weight sync stop waiting for a lost engine."""
        if self._weight_sync is not None:
            self._weight_sync.give_up(url, incarnation)

    @ray.method(concurrency_group="watch")
    def look(self, deep: bool = False) -> Look:
        """Returns where this rank stands, for the hang doctor. `deep`: with all threads and pending collectives."""
        standing = standing_here(f"training rank {self._rank}", CALLS, deep=deep)
        return Look(standing, time.process_time(), bytes_moved())

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Trains on one batch and increments the weight version. Returns `OWN_TIME`; rank 0 also returns the metrics,
        which all ranks have."""
        start = time.perf_counter()
        metrics: dict[str, float] = self._backend.train(batch)
        if self._args.log_state_digest:
            metrics["train/state_digest"] = digest_of_all_ranks(self._backend.state, self._backend.device)
        self._backend.weight_version += 1
        tflops = self._backend.tflops(batch, time.perf_counter() - start)
        own = {OWN_TIME: self._backend.own_time.take_s()}
        return own if self._rank != 0 else metrics | {"perf/actor_train_tflops": tflops, **own}

    def measure_mismatch(self, batch: TrainBatch) -> dict[str, float]:
        return self._backend.measure_mismatch(batch)

    def measure_loss(self, batch: TrainBatch) -> dict[str, float]:
        return self._backend.measure_loss(batch)

    def take_snapshot(self) -> None:
        """Copies this rank's state so that `write_parts` can write it in the background."""
        self._snapshot = self._backend.snapshot()

    @ray.method(concurrency_group="save")
    def write_parts(self, directory: str) -> dict[str, Any]:
        """Writes this rank's checkpoint files from the snapshot, if there is one. Returns their sizes and hashes."""
        snapshot, self._snapshot = self._snapshot, None
        return (snapshot or self._backend.snapshot(on_host=False)).write(Path(directory))

    def save_hf(self, directory: str) -> None:
        self._backend.save_hf(Path(directory))

    def verify(self, directory: str) -> None:
        """Verifies this rank's share of a checkpoint's files against the manifest."""
        from slime.training.state.checkpoint import verify

        verify(Path(directory), share=(self._rank, len(self._slots)))

    def load(self, directory: str) -> None:
        self._backend.load(Path(directory))
        if self._args.finetune:
            self._backend.weight_version = 1

    def keep_weights(self) -> dict[str, float]:
        return self._backend.keep_weights()

    def sleep(self) -> dict[str, float]:
        return self._backend.sleep()

    def wake(self) -> dict[str, float]:
        return self._backend.wake()

    def memory_plan(self) -> Any:
        """Returns this rank's `MemoryPlan`, or None if it does not lend its GPU."""
        return self._backend.memory_plan

    def stop(self) -> None:
        if self._weight_sync is not None:
            self._weight_sync.close()
        if self._backend is not None:
            self._backend.close()


def digest_of_all_ranks(state: Sequence[Tensor], device: torch.device) -> float:
    """Returns a digest of the tensors of all training ranks, an integer below 2^52. Collective.

    A changed bit changes it, and so does a tensor that moves to a different place or rank.
    """
    import torch
    import torch.distributed as dist

    from slime.serving.payloads import digest

    hashers = [digest.begin() for _ in state]
    for hasher, tensor in zip(hashers, state, strict=True):
        hasher.add([tensor])
    text = f"{dist.get_rank()} {digest.finish(hashers)}"
    own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    total = torch.tensor(own, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return float(int(total) % 2**52)
