"""One training rank as an actor: `MegatronBackend` and this rank's part of the weight sync.

Consumes: calls of the driver, the same on all ranks; one thread runs them in order, another writes files (`save`),
a third one hears of lost engines (`tell`).
Produces: trained weights, their metrics, and the rank's parts of checkpoints. Waits for: the other ranks in the
collectives of a call, with the limit of the process group, and for engines in a weight sync. Is woken by: the driver's
calls alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from slime.cluster.engines import WEIGHT_VERSION, EngineInfo
from slime.core.batch import TrainBatch
from slime.core.cores import thread_variables
from slime.core.processes import interface_variables
from slime.observability.logs import setup_logging
from slime.settings import Args


@ray.remote(max_restarts=0, concurrency_groups={"save": 1, "tell": 1})
class TrainActor:
    """Shell around `MegatronBackend`. Every method is called on all ranks, in the same order.

    One thread runs them all, but for `write_parts`, which writes files while the others go on, and `give_up`.
    """

    def __init__(
        self, args: Args, rank: int, slots: Sequence[int], num_threads: int, log_dir: str, address: str
    ) -> None:
        """`slots`: placement slot of every training rank; `address`: this host, as the others of the run reach it."""
        setup_logging(Path(log_dir) / f"train_{rank}.log", crashes=True)
        self._args, self._rank, self._slots, self._address = args, rank, tuple(slots), address
        os.environ.update(args.train_env_vars)
        os.environ.update(interface_variables(address, os.environ))
        self._computes_on_cpu = args.device == "cpu" or any(
            role.get("optimizer_cpu_offload") for role in (args.megatron, args.critic)
        )
        if self._computes_on_cpu:  # read by OpenMP and MKL when torch is first imported
            os.environ.update(thread_variables(num_threads, os.environ))
        self._listener: Any = None
        self._backend: Any = None
        self._weight_sync: Any = None
        self._snapshot: Any = None

    def free_address(self) -> tuple[str, int]:
        """(host, port) where rank 0 listens for the others from now on."""
        from slime.weights.rendezvous import listen_on

        self._listener = listen_on(self._address)
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def build(self, master_address: str, master_port: int) -> dict[str, float]:
        """Joins the process group, builds the model with its Hugging Face weights, rehearses; seconds of the parts."""
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
            local_rank=0,  # Ray shows each actor its own GPU only
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
        """Makes the first digest of a weight sync as fast as the others. On a GPU, beside the start of the engines."""
        from slime.serving.payloads import warm_digest

        warm_digest(self._backend.device)

    def connect_engines(self) -> None:
        """Prepares the weight sync."""
        from slime.cluster.rank_weight_sync import RankWeightSync

        self._weight_sync = RankWeightSync(
            self._args,
            self._backend,
            rank=self._rank,
            slots=self._slots,
            address=self._address,
        )

    def sync_weights(self, engines: Sequence[EngineInfo]) -> dict[str, float]:
        """Sends the current weights to these engines and verifies them; they serve again afterwards.

        Returns its cost, and the version as `perf/weight_version`.
        """
        metrics: dict[str, float] = self._weight_sync.sync_weights(engines)
        return metrics | {WEIGHT_VERSION: float(self._backend.weight_version)}

    @ray.method(concurrency_group="tell")
    def give_up(self, url: str, incarnation: int) -> None:
        """An engine is lost: the weight sync under way waits for it no longer."""
        if self._weight_sync is not None:
            self._weight_sync.give_up(url, incarnation)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Trains one batch; the weights that it leaves are the next version."""
        start = time.perf_counter()
        metrics: dict[str, float] = self._backend.train(batch)
        self._backend.weight_version += 1
        return metrics | {"perf/actor_train_tflops": self._backend.tflops(batch, time.perf_counter() - start)}

    def measure_mismatch(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = self._backend.measure_mismatch(batch)
        return metrics

    def measure_loss(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = self._backend.measure_loss(batch)
        return metrics

    def take_snapshot(self) -> None:
        """Copies what this rank will write, for `write_parts`."""
        self._snapshot = self._backend.snapshot()

    @ray.method(concurrency_group="save")
    def write_parts(self, directory: str) -> dict[str, Any]:
        """Writes this rank's files of a checkpoint, as of the snapshot if one was taken; their sizes and hashes."""
        snapshot, self._snapshot = self._snapshot, None
        written: dict[str, Any] = (snapshot or self._backend.snapshot(on_host=False)).write(Path(directory))
        return written

    def save_hf(self, directory: str) -> None:
        self._backend.save_hf(Path(directory))

    def verify(self, directory: str) -> None:
        """This rank's share of comparing a checkpoint with its manifest, which is to be read whole."""
        from slime.training.state.checkpoint import verify

        verify(Path(directory), share=(self._rank, len(self._slots)))

    def load(self, directory: str) -> None:
        self._backend.load(Path(directory))
        if self._args.finetune:
            self._backend.weight_version = 1

    def keep_weights(self) -> dict[str, float]:
        peaks: dict[str, float] = self._backend.keep_weights()
        return peaks

    def sleep(self) -> dict[str, float]:
        peaks: dict[str, float] = self._backend.sleep()
        return peaks

    def wake(self) -> dict[str, float]:
        peaks: dict[str, float] = self._backend.wake()
        return peaks

    def memory_plan(self) -> Any:
        """`MemoryPlan` of this rank; None if it lends no GPU."""
        return self._backend.memory_plan

    def stop(self) -> None:
        if self._weight_sync is not None:
            self._weight_sync.close()
        if self._backend is not None:
            self._backend.close()
