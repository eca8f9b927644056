"""GRPO with TRL, for `benchmarks.peers.league`: `python -m benchmarks.peers.league_trl SPEC.json`.

Imports TRL, vLLM and transformers, and nothing of slime. Writes a row per step to the file that the spec names: TRL's
own metrics and, under `seconds`, the time of each of its profiled parts.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import compute_score

SECONDS: dict[str, float] = defaultdict(float)
"""Seconds of TRL's profiled parts since the last row."""
STARTED: dict[str, float] = {}
"""When each part was done for the first time, in seconds of `time.time`."""


def settings(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `GRPOConfig`. Weights are float32 and computed with in bfloat16, as by the others."""
    samples = spec["prompts"] * spec["samples"]
    micro = min(spec["micro_samples"], samples)
    on_gpu, engine = spec["device"] == "cuda", spec["engine"]
    batch = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": samples // micro}
    sampling = {"num_generations": spec["samples"], "max_completion_length": spec["response"], "temperature": 1.0}
    optimizer = {"learning_rate": 1e-6, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "adam_beta2": 0.95}
    objective = {"beta": 0.0, "epsilon": 0.2, "loss_type": "grpo", "weight_decay": 0.0, "shuffle_dataset": False}
    memory = {"gradient_checkpointing": False, "bf16": on_gpu, "use_cpu": not on_gpu}
    memory |= {"use_liger_kernel": on_gpu, "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"}}
    output = {"output_dir": spec["folder"], "logging_steps": 1, "report_to": [], "save_strategy": "no"}
    run = {"max_steps": spec["steps"], "seed": 1, "disable_tqdm": True}
    generation: dict[str, Any] = {"generation_kwargs": {"ignore_eos": True}}
    if engine == "vllm":
        length = spec["prompt_tokens"] + spec["response"]
        generation |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": length}
        generation |= {"vllm_gpu_memory_utilization": spec["engine_memory"]}
    else:
        eos: dict[str, Any] = {"eos_token_id": -1} if engine == "paged" else {"min_new_tokens": spec["response"]}
        generation = {"generation_kwargs": eos, "use_transformers_continuous_batching": engine == "paged"}
    return {**batch, **sampling, **optimizer, **objective, **memory, **output, **run, **generation}


def record_parts() -> None:
    """Makes TRL's profiler, which logs to web services only, add its times to `SECONDS`."""
    from trl.extras.profiling import ProfilingContext

    def record(self: Any, duration: float) -> None:
        name = self.name.partition(".")[2]
        SECONDS[name] += duration
        STARTED.setdefault(name, time.time())

    ProfilingContext._log_metrics = record


def with_engine_options(options: dict[str, Any]) -> None:
    """Adds arguments of vLLM that TRL has no setting for."""
    from trl.generation import vllm_generation

    engine: Any = vllm_generation.LLM
    vllm_generation.LLM = lambda **given: engine(**{**given, **options})


def callback_of(rows: Path) -> Any:
    """Returns a callback that appends a row after each step."""
    import torch
    from transformers import TrainerCallback

    class Rows(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if not logs or "reward" not in logs:
                return
            peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
            row = {"step": state.global_step, "seconds": dict(SECONDS), "first": STARTED, "trainer_peak_bytes": peak}
            with rows.open("a") as file:
                file.write(json.dumps({**row, "metrics": logs}) + "\n")
            SECONDS.clear()

    return Rows()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [compute_score("", completion[0]["content"], "") for completion in completions]

    options = {k.removeprefix("vllm."): v for k, v in spec["changes"].items() if k.startswith("vllm.")}
    changes = {k: v for k, v in spec["changes"].items() if not k.startswith("vllm.")}
    if spec["engine"] == "vllm" and options:
        with_engine_options(options)
    record_parts()
    lines = Path(spec["data"]).read_text().splitlines()
    data = Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines])
    config = GRPOConfig(**{**settings(spec), **changes})
    callbacks = [callback_of(Path(spec["rows"]))]
    trainer = GRPOTrainer(
        model=spec["model"], reward_funcs=reward, args=config, train_dataset=data, callbacks=callbacks
    )
    trainer.train()


if __name__ == "__main__":
    main()
