"""Cost of the rollout side: tokens per second of whole rollouts, and of a bare client of the same server.

    python -m benchmarks.rollout_speed --model DIR --device cuda --cases 512x1024 64x16384 --workers 0 4

There is one stock server. The bare client sends all requests together and reads whole responses with log-probs, which
training needs. The rollout is a step of `RolloutManager`, in one process and with workers: prompts from a file, groups
of 8, the default generate function, token ids, versions, and the trainer's batch. They alternate `--rounds` times (one
number, or one per case), in one order and then in the other; the ratio is the median over rounds. Prompts always
differ, so no cache helps, and answers always have full length. The engine's log shows how often it put requests back
for lack of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import ray

from slime.cluster.rollout_actor import worker_fleet
from slime.core.sample import Sample
from slime.rollout import generate as default
from slime.rollout.client.wire import allow_many_connections, collect_garbage_rarely
from slime.rollout.context import current
from slime.rollout.manager import RolloutManager
from slime.serving.server import ServerSpec, SGLangServer
from slime.settings import Args, parse_args

SAMPLES, WORDS, WARM_TOKENS = 8, 48, 8
GPU = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
GRAPHS = {"cuda_graph_max_bs_decode": 512, "disable_prefill_cuda_graph": True}
"""CUDA graphs up to the largest batch; without them, the server's Python scheduler limits the speed and adds noise."""
MEMORY = {"mem_fraction_static": 0.92}
"""64 requests of 16,384 tokens are 120 GB of keys and values with the shape of Qwen3-0.6B."""
LIMIT_S = 600.0


async def to_the_end(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default generate function with responses of full length; the first step warms up each process."""
    given = {**sampling_params, "ignore_eos": True}
    if current().rollout_id == 0:
        given["max_new_tokens"] = WARM_TOKENS
    sample = await default.generate(args, sample, given)
    sample.reward = float((sample.index or 0) % 2)
    return sample


def write_prompts(path: Path, num: int, turn: int) -> None:
    rows = [{"input": " ".join(str(turn * 7919 + i * 101 + k) for k in range(WORDS))} for i in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(options: argparse.Namespace, folder: Path, case: tuple[int, int], workers: int, turn: int) -> Args:
    num, length = case
    write_prompts(folder / "prompts.jsonl", 2 * num // SAMPLES, turn)
    words: dict[str, Any] = {
        "--hf-checkpoint": options.model,
        "--prompt-data": folder / "prompts.jsonl",
        "--rollout-batch-size": num // SAMPLES,
        "--n-samples-per-prompt": SAMPLES,
        "--num-rollout": 2,
        "--rollout-max-response-len": length,
        "--device": options.device,
        "--custom-generate-function-path": f"{__spec__.name}:to_the_end",
        "--rollout-num-workers": workers,
        "--run-dir": folder / "run",
        "--request-timeout-s": 600,
        "--sglang-server-concurrency": 4096,
    }
    return parse_args([str(word) for pair in words.items() for word in pair])


async def bare(url: str, options: argparse.Namespace, folder: Path, case: tuple[int, int], turn: int) -> float:
    """Returns the tokens per second of the bare client."""
    from transformers import AutoTokenizer

    num, length = case
    write_prompts(folder / "bare.jsonl", num // SAMPLES, turn)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [json.loads(line)["input"] for line in (folder / "bare.jsonl").read_text().splitlines()]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts for _ in range(SAMPLES)]
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": length, "ignore_eos": True}
    limits = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:

        async def ask(ids: list[int]) -> int:
            body = orjson.dumps({"input_ids": ids, "sampling_params": params, "return_logprob": True})
            async with session.post(f"{url}/generate", data=body, headers={"Content-Type": "application/json"}) as got:
                answer = orjson.loads(await got.read())
                assert got.status == 200, answer
                return len(answer["output_ids"])

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(ask(ids) for ids in prompts)))
        return tokens / (time.perf_counter() - began)


async def rollout(url: str, args: Args, folder: Path) -> float:
    """Returns the tokens per second of a rollout, from the first prompt to the batch."""
    (folder / "run" / "logs").mkdir(parents=True, exist_ok=True)
    fleet = worker_fleet(args, str(folder / "run" / "logs"), None)
    manager = RolloutManager(args, engines=[url], workers=fleet)
    if fleet is not None:
        await fleet.ready()
    try:
        await manager.generate(0)
        manager.commit(0)
        began = time.perf_counter()
        batch, _ = await manager.generate(1)
        return sum(s.response_length for s in batch.samples) / (time.perf_counter() - began)
    finally:
        await manager.close()


def measure(url: str, options: argparse.Namespace, folder: Path, case: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Measures the bare client and the rollouts alternately."""
    rates: dict[str, list[float]] = {"bare": [], **{f"workers_{n}": [] for n in options.workers}}
    asyncio.run(bare(url, options, folder, (case[0], min(64, case[1])), 0))  # compile kernels and capture graphs
    turn = 1000 * case[1]
    for number in range(rounds):
        for name in sorted(rates, reverse=number % 2 == 1):
            turn += 1
            if name == "bare":
                rate = asyncio.run(bare(url, options, folder, case, turn))
            else:
                args = settings(options, folder, case, int(name.removeprefix("workers_")), turn)
                rate = asyncio.run(rollout(url, args, folder))
            print(f"{case[0]} x {case[1]} {name}: {rate:.0f} tokens/s", flush=True)
            rates[name].append(round(rate, 1))
    ratios = {
        name: [round(own / bare, 4) for own, bare in zip(found, rates["bare"], strict=True)]
        for name, found in rates.items()
        if name != "bare"
    }
    medians = {name: round(statistics.median(found), 4) for name, found in ratios.items()}
    put_back = sum("Retract requests" in line for line in (folder / "engine.log").read_text().splitlines())
    sizes = {"requests": case[0], "tokens": case[1]}
    return {**sizes, "tokens_per_s": rates, "ratios": ratios, "against_bare": medians, "retractions_so_far": put_back}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint folder with a tokenizer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="+", default=["512x1024", "64x16384"], help="requests x tokens of a response")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--rounds", type=int, nargs="+", default=[2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    allow_many_connections()
    collect_garbage_rarely()
    cuda = options.device == "cuda"
    spec = ServerSpec(
        str(options.model),
        dtype="bfloat16" if cuda else "float32",
        device=options.device,
        extra=GPU | GRAPHS | MEMORY if cuda else {},
    )
    result: dict[str, Any] = {
        "command": " ".join(["python", "-m", "benchmarks.rollout_speed", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "cases": [],
    }
    if cuda:
        import torch

        result["device"] = torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        server = SGLangServer(spec, log_path=folder / "engine.log")
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=16)
        try:
            server.start()
            server.wait_ready(timeout_s=LIMIT_S)
            for number, words in enumerate(options.cases):
                num, _, length = words.partition("x")
                rounds = options.rounds[min(number, len(options.rounds) - 1)]
                result["cases"].append(measure(server.url, options, folder, (int(num), int(length)), rounds))
                if options.json:  # written now, because the next case may not finish
                    options.json.write_text(json.dumps(result, indent=1) + "\n")
        finally:
            server.stop()
            ray.shutdown()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
