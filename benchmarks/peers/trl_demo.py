"""The demo in slime, then in TRL, on the same machine: `python -m benchmarks.peers.trl_demo --seeds 1 2 3`.

Both train SmolLM2-135M-Instruct on the demo's prompts, in float32 on the CPU: six steps of 8 prompts x 8 samples of at
most 12 tokens, learning rate 5e-5, clip 0.2, temperature 0.7. Both answer the same 200 held-out sums greedily, before
and after, and the same scorer scores them. TRL runs in one process and generates with transformers; its loss is the
mean over samples (`grpo`) or over tokens (`dapo`). slime runs `recipes/demo/run.sh`, whose loss is the mean over
samples; with `--calculate-per-token-loss` it is the mean over tokens. "seconds" covers the whole command, including
imports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.observability.sinks import read_jsonl

MODEL, TASK = Path("assets/smollm2-135m-instruct"), Path("assets/demo")
OVER_SAMPLES, OVER_TOKENS = "mean over samples", "mean over tokens"
TRL_LOSS = {OVER_SAMPLES: "grpo", OVER_TOKENS: "dapo"}
SLIME_LOSS = {OVER_SAMPLES: (), OVER_TOKENS: ("--calculate-per-token-loss",)}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASK / f"{name}.jsonl").read_text().splitlines()]


def scorer() -> Callable[[str, Mapping[str, Any]], float]:
    """Returns the demo's score of a response to a row."""
    from recipes.demo import task
    from slime.rewards.graders.reasoning_gym_task import bare_answer, score_function

    score = score_function(task.SCORER)

    def of(response: str, row: Mapping[str, Any]) -> float:
        entry = row["metadata"]["reasoning_gym"]["entry"]
        return float(score(bare_answer(response, entry["answer"]), entry) == 1.0)

    return of


def accuracy(model: Any, tokenizer: Any) -> float:
    """Returns the share of held-out sums that greedy responses of the model solve."""
    import torch

    score, held_out, num_right = scorer(), rows("eval"), 0.0
    model.eval()
    for begin in range(0, len(held_out), 50):
        part = held_out[begin : begin + 50]
        texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in part]
        prompts = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        with torch.no_grad():
            output = model.generate(**prompts, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        for row, ids in zip(part, output[:, prompts.input_ids.shape[1] :], strict=True):
            num_right += score(tokenizer.decode(ids, skip_special_tokens=True), row)
    model.train()
    return num_right / len(held_out)


def trl_settings(seed: int, loss: str, folder: Path) -> dict[str, Any]:
    """Returns the arguments of `GRPOConfig` that correspond to `recipes/demo/run.sh`."""
    sampling = {"num_generations": 8, "max_completion_length": 12, "temperature": 0.7}
    optimizer = {"learning_rate": 5e-5, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "adam_beta2": 0.95}
    objective = {"beta": 0.0, "epsilon": 0.2, "loss_type": TRL_LOSS[loss]}
    run = {"max_steps": 6, "per_device_train_batch_size": 64, "use_cpu": True, "bf16": False, "seed": seed}
    output = {"output_dir": str(folder), "logging_steps": 1, "report_to": [], "save_strategy": "no"}
    return {**sampling, **optimizer, **objective, **run, **output}


def train_with_trl(seed: int, loss: str, folder: Path) -> dict[str, Any]:
    """Trains in this process; returns accuracies, the reward of each step and seconds."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    score = scorer()

    def reward(completions: list[Any], row: list[str], **_: Any) -> list[float]:
        return [score(c[0]["content"], json.loads(r)) for c, r in zip(completions, row, strict=True)]

    before = accuracy(model, tokenizer)
    data = Dataset.from_list([{"prompt": r["prompt"], "row": json.dumps(r)} for r in rows("train")])
    config = GRPOConfig(**trl_settings(seed, loss, folder))
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer)
    begin = time.monotonic()
    trainer.train()
    train_s = time.monotonic() - begin
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {"before": before, "after": accuracy(trainer.model, tokenizer), "rewards": rewards, "train_s": train_s}


def train_with_slime(seed: int, loss: str, folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "PY": sys.executable, "SEED": str(seed), "RUN_DIR": str(folder / "run")}
    command = ["bash", "recipes/demo/run.sh", "--device", "cpu", "--no-bf16", *SLIME_LOSS[loss]]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    steps = read_jsonl(folder / "run" / "metrics.jsonl")
    scores = [step["eval/sums"] for step in steps if "eval/sums" in step]
    rewards = [step["rollout/raw_reward"] for step in steps if "rollout/raw_reward" in step]
    return {"before": scores[0], "after": scores[-1], "rewards": rewards}


def timed(system: str, seed: int, loss: str) -> dict[str, Any]:
    """Runs one of the two in its own process; returns what it found, and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        if system == "slime":
            found = train_with_slime(seed, loss, Path(folder))
        else:
            words = ["--seeds", str(seed), "--losses", loss, "--trl", folder]
            subprocess.run([sys.executable, "-m", "benchmarks.peers.trl_demo", *words], check=True)
            found = json.loads(Path(folder, "found.json").read_text())
        return {"system": system, "seed": seed, "loss": loss, "seconds": time.monotonic() - begin, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--losses", nargs="+", choices=[*TRL_LOSS], default=[OVER_SAMPLES])
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--trl", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)  # train with TRL in this process
    options = parser.parse_args()
    if options.trl:
        found = train_with_trl(options.seeds[0], options.losses[0], options.trl)
        (options.trl / "found.json").write_text(json.dumps(found))
        return
    subprocess.run([sys.executable, "-m", "recipes.demo.prepare"], check=True)
    figures = []
    for seed, loss, system in itertools.product(options.seeds, options.losses, ("slime", "TRL")):
        figures.append(run := timed(system, seed, loss))
        print(f"{system}, seed {seed}, {loss}: {run['before']:.3f} -> {run['after']:.3f}, {run['seconds']:.0f} s")
        if options.output:
            command = " ".join(["python -m benchmarks.peers.trl_demo", *sys.argv[1:]])
            options.output.write_text(json.dumps({"command": command, "runs": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
