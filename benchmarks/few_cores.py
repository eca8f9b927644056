"""Speed of engine and trainer on two cores, depending on how OpenMP threads wait, with and without other work.

    python -m benchmarks.few_cores --model assets/smollm2-135m-instruct        the demo's model; half an hour

Each setting has an engine (16 prompts of 34 tokens, 8 tokens each) and a trainer (one step of 16 samples). They run
one at a time, in every round once alone and once with two looping processes. So the machine's other work affects all
settings alike. Compare the ratios to the first setting, which are medians over rounds. With `--first` (as root) the
measured processes and the two loops have priority over all other work. Prints a table and a JSON line, with the load
average of each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SETTINGS: dict[str, tuple[int, dict[str, str]]] = {
    "2 threads": (2, {"GOMP_SPINCOUNT": "300000"}),
    "2 threads, passive": (2, {"OMP_WAIT_POLICY": "PASSIVE"}),
    "1 thread": (1, {}),
}
"""Name -> threads of a process, and additional environment. The first setting is libgomp's default."""
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 16, 34, 8
LOOP = "import os\nfrom slime.core.processes import die_with_parent\ndie_with_parent(os.getppid())\nwhile True: pass"
NUM_LOOPS = 2


@contextlib.contextmanager
def environment(more: dict[str, str]) -> Iterator[None]:
    """Sets environment variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def engine(model: str, threads: int, more: dict[str, str], folder: Path) -> Iterator[Callable[[], float]]:
    """Starts an engine. The yielded function sends one batch of requests and returns the seconds."""
    from slime.serving.leased_ports import request
    from slime.serving.server import ServerSpec, SGLangServer

    body = {
        "input_ids": [[1000 + i + t for t in range(PROMPT_TOKENS)] for i in range(NUM_PROMPTS)],
        "sampling_params": {"max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
    }
    server = SGLangServer(ServerSpec(model, "float32", num_threads=threads), log_path=folder / "engine.log")

    def generate() -> float:
        request("POST", f"{server.url}/flush_cache", timeout_s=60.0)
        began = time.perf_counter()
        status, text = request("POST", f"{server.url}/generate", body, timeout_s=1200.0)
        assert status == 200, text
        return time.perf_counter() - began

    try:
        with environment(more):
            server.start()
        server.wait_ready()
        yield generate
    finally:
        server.stop()


@contextlib.contextmanager
def trainer(threads: int, more: dict[str, str]) -> Iterator[Callable[[], float]]:
    """Starts a trainer of the same shape. The yielded function runs one step and returns the seconds."""
    env = {**os.environ, **more, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.few_cores", "--train"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None and process.stdout is not None

        def step() -> float:
            assert process.stdin is not None and process.stdout is not None
            print("step", file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith("took "):
                    return float(line.split()[1])
            raise AssertionError("the trainer process has exited")

        yield step
        process.stdin.close()


def train() -> None:
    """Runs the trainer process: one step per line of input."""
    import torch

    from benchmarks.micro_batches import SIZES, batch, write_model
    from tests.support.engine_parity import one_rank

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    samples = batch(SIZES["135M"]["vocab_size"], shortest=32, longest=48)
    with (
        tempfile.TemporaryDirectory() as folder,
        one_rank(write_model(Path(folder), "135M"), global_batch_size=16, megatron={"lr": 0.0}) as backend,
    ):
        backend.args = backend.args.replace(micro_batch_size=1, use_dynamic_batch_size=True, max_tokens_per_gpu=2048)
        for _ in sys.stdin:
            began = time.perf_counter()
            backend.train(samples)
            print("took", time.perf_counter() - began, flush=True)


def go_first(pids: list[int]) -> None:
    """Gives all threads of these processes priority over other processes."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), -10)


@contextlib.contextmanager
def busy(first: bool) -> Iterator[None]:
    """Keeps the cores busy during the block."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(NUM_LOOPS)]
    try:
        go_first([loop.pid for loop in loops] if first else [])
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(model: str, rounds: int, kinds: list[str], *, first: bool) -> dict[str, Any]:
    """Measures each setting and kind of work, alone and beside loops; returns seconds and each round's load average."""
    from tests.support.engines import descendants

    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    loads: list[float] = []
    for kind in kinds:
        with contextlib.ExitStack() as stack:
            works = {}
            for name, (threads, more) in SETTINGS.items():
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                made = engine(model, threads, more, folder) if kind == "engine" else trainer(threads, more)
                works[name] = stack.enter_context(made)
                works[name]()  # the first call warms up
            if first:
                go_first([*descendants(os.getpid())])
            for _ in range(rounds):
                for company in ("quiet", "beside two loops"):
                    with busy(first) if company != "quiet" else contextlib.nullcontext():
                        for name, work in works.items():
                            seconds[f"{kind}, {company}"][name].append(work())
                            print(f"{kind}, {company}, {name}", seconds[f"{kind}, {company}"][name][-1], flush=True)
                loads.append(os.getloadavg()[0])
    base = next(iter(SETTINGS))
    ratios = {
        kind: {name: statistics.median(a / b for a, b in zip(took[base], took[name], strict=True)) for name in took}
        for kind, took in seconds.items()
    }
    return {
        "model": model,
        "rounds": rounds,
        "speed_against_first": ratios,
        "seconds": seconds,
        "load_average": loads,
        "first": first,
    }


def main() -> None:
    """Prints a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="assets/smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=("engine", "trainer"), default=["engine", "trainer"])
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train()
        return
    found = measure(given.model, given.rounds, given.kinds, first=given.first)
    for kind, took in found["seconds"].items():
        for name, values in took.items():
            ratio = found["speed_against_first"][kind][name]
            print(f"{kind:<26} {name:<24} {statistics.median(values):7.2f} s   x{ratio:.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
