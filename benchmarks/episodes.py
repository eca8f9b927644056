"""Turns of episodes per second in a rollout, in one process and in workers, with engines that respond immediately.

    python -m benchmarks.episodes --workers 0 2 --json benchmarks/results/episodes.json

64 scripted engines run in a separate process (`benchmarks.turns`). Each episode has 8 turns; a turn sends the whole
context and gets 32 tokens. Contexts begin with 1k and 32k ids. Groups of 8 episodes go through the loop that schedules
share (`GroupLoop`) and are settled in a Data Buffer. With workers, each group is sent to a worker and back through Ray,
as in a run. Results are turns per second and the stalls of the event loops of the conductor and of the processes with
episodes: how late a 5 ms timer is. All processes share the cores of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import GroupOrRecord, group_of
from slime.cluster.rollout_actor import worker_fleet
from slime.core.sample import Group, Sample, Status
from slime.core.topology import Worker
from slime.rollout.client.wire import allow_many_connections, collect_garbage_rarely
from slime.rollout.context import RolloutContext, current
from slime.rollout.factories import engine_client
from slime.rollout.schedules.group_loop import GroupLoop, Policy
from slime.rollout.types import Progress
from slime.rollout.user_functions import RolloutHooks
from slime.settings import Args, parse_args
from tests.support.rollout import write_checkpoint_stub, write_prompts

TURNS, SAMPLES = 8, 8
VOCAB_SIZE = 151_936
POLL_S = 0.005
CONTEXTS = (1024, 32 * 1024)


class Stalls:
    """Records how late a timer is."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(POLL_S)
            self._late.append(time.perf_counter() - began - POLL_S)

    def take(self) -> list[float]:
        late, self._late = self._late, []
        return late

    def end(self) -> None:
        self._task.cancel()


_STALLS: list[Stalls] = []


async def episode(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Runs turns; each turn sends all earlier tokens."""
    _STALLS[:] = _STALLS or [Stalls()]
    sample.tokens = list(range(1, int(sample.metadata["context"]) + 1))
    client = current().engine()
    for _ in range(TURNS):
        made = await client.generate(sample.tokens, {**sampling_params, "max_new_tokens": 32})
        sample.append_response_tokens(
            made.tokens, log_probs=made.log_probs, weight_version=made.weight_version, text=made.text
        )
    sample.status, sample.reward = Status.COMPLETED, 1.0
    sample.metadata["late"] = _STALLS[0].take()
    return sample


class Endless(Policy):
    """A schedule that runs a fixed number of groups at a time, and settles each group when it is finished."""

    def __init__(self, buffer: DataBuffer, context: int, num_groups: int) -> None:
        self.finished: list[GroupOrRecord] = []
        self._buffer, self._context, self._num_groups = buffer, context, num_groups

    def num_missing(self, loop: GroupLoop) -> int:
        return self._num_groups - len(loop.running)

    def admit(self, loop: GroupLoop, group: Group) -> Group:
        for sample in group.samples:
            sample.metadata["context"] = self._context
        return group

    def was_meant(self, loop: GroupLoop, group: Group) -> bool:
        return False

    def accept(self, loop: GroupLoop, group: GroupOrRecord) -> None:
        self._buffer.mark_trained([group.group_index])
        self.finished.append(group)


def settings(folder: Path, workers: int) -> Args:
    model = write_checkpoint_stub(folder / "model")
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": VOCAB_SIZE}))
    words: dict[str, Any] = {
        "--hf-checkpoint": model,
        "--prompt-data": write_prompts(folder / "prompts.jsonl", 8),
        "--rollout-batch-size": 32,
        "--n-samples-per-prompt": SAMPLES,
        "--num-rollout": 1,
        "--device": "cpu",
        "--custom-generate-function-path": f"{__spec__.name}:episode",
        "--rollout-num-workers": workers,
        "--run-dir": folder / "run",
    }
    args: Args = parse_args([str(word) for pair in words.items() for word in pair])
    return args


async def measure(args: Args, urls: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures both contexts with one number of workers."""
    logs = Path(args.run_dir or ".") / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    fleet = worker_fleet(args, str(logs), None)
    client = engine_client(args, urls, None)
    if fleet is not None:
        fleet.admit("default", urls, Worker.REGULAR)
        await fleet.ready()
    loop = asyncio.get_running_loop()
    context = RolloutContext(args, client, None, None, Progress(), loop, workers=fleet)
    collect_garbage_rarely()
    try:
        return [await turns(context, length, options) for length in CONTEXTS]
    finally:
        if fleet is not None:
            await fleet.close()
        await client.close()


async def turns(context: RolloutContext, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs turns for a number of seconds."""
    buffer = DataBuffer(None, n_samples_per_prompt=SAMPLES)
    policy = Endless(buffer, length, options.groups)
    loop = GroupLoop(context, RolloutHooks.load(context.args), buffer, policy)
    loop.begin_step(context, 0)

    async def run() -> None:
        while True:
            await loop.turn()

    working = asyncio.create_task(run())
    while len(policy.finished) < options.groups:
        await asyncio.sleep(0.05)
        if working.done():
            working.result()
    stalls, policy.finished = Stalls(), []
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(options.seconds)
    took_s, cpu_s, finished = time.perf_counter() - began, time.process_time() - cpu, policy.finished
    late = stalls.take()
    stalls.end()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await loop.abandon()
    theirs = [s for held in finished[options.groups :] for one in group_of(held).samples for s in one.metadata["late"]]
    return {
        "context": length,
        "turns_per_s": round(len(finished) * SAMPLES * TURNS / took_s, 1),
        "conductor_cpu_share": round(cpu_s / took_s, 3),
        "conductor_stall_ms": quantiles(late),
        "episodes_stall_ms": quantiles(theirs),
    }


def quantiles(late: list[float]) -> dict[str, float]:
    return {str(q): round(1e3 * float(np.quantile(late, q)), 1) for q in (0.5, 0.99, 0.999)} if late else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--groups", type=int, default=32, help="at a time")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    allow_many_connections()
    result: dict[str, Any] = {
        "command": " ".join(["python", "-m", "benchmarks.episodes", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    words = [sys.executable, "-m", "benchmarks.turns", "--serve", "--engines", str(options.engines)]
    with (
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as served,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert served.stdin is not None and served.stdout is not None
        try:
            urls = [f"http://127.0.0.1:{port}" for port in json.loads(served.stdout.readline())]
            ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=4)
            for workers in options.workers:
                args = settings(Path(folder), workers)
                result[f"workers_{workers}"] = asyncio.run(measure(args, urls, options))
        finally:
            ray.shutdown()
            served.stdin.close()
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
