"""slime, TRL and verl at the same work, one after the other on one GPU.

python -m benchmarks.peers.league --systems slime,trl,verl --model DIR --out league.json

Each system runs in its own process with a time limit, from its own site (`--site verl=FOLDER`, a folder of packages; no
TRL 1 in verl's, which takes it for an older one), and does the same: GRPO with 32 prompts x 8 samples, responses of
exactly 1,024 tokens, log-probs of the trainer, one AdamW step of 1e-6 with float32 weights computed with in bfloat16,
no KL and no reference model, weights to the engine.
`--model` is made if it does not exist (`--shape`, random weights). The driver itself needs only the standard library.

Definitions, for all systems alike. A step's time is the time between the rows of two steps, seen by this driver, so it
holds everything that a system does; the first `--drop` steps are left out and the median is reported. generate, train
and sync are the systems' own timings: generation including its reward for slime; log-probs, loss, backward pass and
optimizer; weights to the engine. TRL times its optimizer with nothing, so its `train` is what remains of the step.
Memory is the highest value that nvidia-smi showed, ten times a second at most. Start-up is the time from the command to
the first step's samples.

A later call with the same `--out` keeps the other systems' figures. `--label` names a variant. `--change` changes a
setting: a hydra override of verl, a field of TRL's GRPOConfig (`vllm.NAME=...`: of its engine), a flag of slime:

  ... --systems trl --label plain --change trl use_liger_kernel=false --change trl vllm.enforce_eager=true
  ... --systems verl --attention sdpa --change verl actor_rollout_ref.rollout.enforce_eager=True
  ... --systems slime --change slime sglang-mem-fraction-static=0.5
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
POLL_S = 0.1
FREE_MIB = 3_000
"""A GPU with less in use is free for the next system."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer compiles its kernels at the first call
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "true",
    "PYTHONUNBUFFERED": "1",
    "SPT_NOENV": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
}
PACKAGES = ("torch", "transformers", "sglang", "megatron-core", "ray", "vllm", "trl", "verl", "liger-kernel", "triton")


# ---- commands --------------------------------------------------------------------------------------------------------


def slime_command(spec: dict[str, Any], folder: Path) -> list[str]:
    """Returns the command of a colocated run; its rows are in the run folder's metrics.jsonl."""
    flags: dict[str, Any] = {
        "device": spec["device"],
        "hf-checkpoint": spec["model"],
        "prompt-data": spec["data"],
        "input-key": "prompt",
        "label-key": "label",
        "custom-rm-path": "benchmarks.peers.workload:slime_reward",
        "custom-generate-function-path": "benchmarks.peers.workload:slime_generate",
        "advantage-estimator": "grpo",
        "lr": "1e-6",
        "lr-decay-style": "constant",
        "adam-beta2": "0.95",
        "adam-beta1": "0.9",
        "weight-decay": "0",
        "clip-grad": "1.0",
        "num-rollout": spec["steps"],
        "rollout-batch-size": spec["prompts"],
        "n-samples-per-prompt": spec["samples"],
        "rollout-max-response-len": spec["response"],
        "max-tokens-per-gpu": micro_tokens(spec),
        "run-dir": folder / "run",
    }
    if spec["device"] == "cuda":
        flags |= {"sglang-attention-backend": "triton", "sglang-sampling-backend": "pytorch"}
        flags |= {"sglang-grammar-backend": "none", "sglang-mem-fraction-static": spec["engine_memory"]}
        flags |= {"bf16": True, "update-weight-transport": "tensor"}
    flags |= {"colocate": True, "apply-chat-template": True, "use-dynamic-batch-size": True, **spec["changes"]}
    words = ([f"--{k}"] if v is True else [f"--{k}", str(v)] for k, v in flags.items() if v is not False)
    return [spec["python"], "train.py", *(word for pair in words for word in pair)]


def trl_command(spec: dict[str, Any], folder: Path) -> list[str]:
    file = folder / "spec.json"
    file.write_text(json.dumps({**spec, "folder": str(folder), "rows": str(rows_file("trl", folder))}))
    return [spec["python"], "-m", "benchmarks.peers.league_trl", str(file)]


def verl_command(spec: dict[str, Any], folder: Path) -> list[str]:
    """Returns the command of verl's trainer: FSDP2 and vLLM share the GPU, and packed samples without padding."""
    tokens, packed = micro_tokens(spec), spec["attention"] == "stand-in"
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    settings: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": spec["data"],
        "data.val_files": spec["data"],
        "data.train_batch_size": spec["prompts"],
        "data.max_prompt_length": spec["prompt_tokens"],
        "data.max_response_length": spec["response"],
        "data.shuffle": False,
        "data.dataloader_num_workers": 1,
        f"{model}.path": spec["model"],
        f"{model}.use_remove_padding": packed,
        f"+{model}.override_config.attn_implementation": "flash_attention_2" if packed else "sdpa",
        f"{model}.enable_gradient_checkpointing": False,
        f"{model}.use_liger": True,
        f"{model}.use_fused_kernels": True,
        f"{model}.fused_kernel_options.impl_backend": "triton",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{actor}.ppo_mini_batch_size": spec["prompts"],
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": tokens,
        f"{actor}.loss_agg_mode": "seq-mean-token-mean",
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.betas": "[0.9,0.95]",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": spec["samples"],
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": spec["engine_memory"],
        f"{rollout}.ignore_eos": True,
        f"{rollout}.max_model_len": spec["prompt_tokens"] + spec["response"],
        f"{rollout}.max_num_seqs": spec["prompts"] * spec["samples"],
        f"{rollout}.log_prob_max_token_len_per_gpu": tokens,
        f"{rollout}.agent.num_workers": 4,
        "reward.num_workers": 2,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,  # verl recommends two per host
        "reward.custom_reward_function.path": HERE / "benchmarks" / "peers" / "workload.py",
        "trainer.logger": "[console,file]",
        "trainer.val_before_train": False,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": spec["steps"],
        "trainer.total_epochs": 100,
        "trainer.project_name": "league",
        "trainer.experiment_name": "verl",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
        "hydra.run.dir": folder / "hydra",
        **spec["changes"],
    }
    return [spec["python"], "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]


COMMANDS: dict[str, Callable[[dict[str, Any], Path], list[str]]] = {
    "slime": slime_command,
    "trl": trl_command,
    "verl": verl_command,
}


def rows_file(system: str, folder: Path) -> Path:
    return folder / "run" / "metrics.jsonl" if system == "slime" else folder / "rows.jsonl"


def micro_tokens(spec: dict[str, Any]) -> int:
    """Returns the tokens of a micro-batch: the same number of whole samples for every system."""
    return int(spec["micro_samples"] * (spec["prompt_tokens"] + spec["response"]))


def environment_of(system: str, spec: dict[str, Any], folder: Path) -> dict[str, str]:
    sites = [spec["site"]] if spec["site"] else []
    if system == "verl" and spec["attention"] == "stand-in":
        from benchmarks.peers.flash_attention import install

        install(folder / "packages")
        sites.insert(0, str(folder / "packages"))
    if system != "verl":
        sites.append(str(HERE))
    extra = {"PYTHONPATH": ":".join(sites), "VERL_FILE_LOGGER_PATH": str(rows_file("verl", folder))}
    cache = {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TRITON_CACHE_DIR": str(folder / "triton")}
    return {**os.environ, **ENVIRONMENT, **extra, **cache, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


# ---- rows ------------------------------------------------------------------------------------------------------------


Seen = list[tuple[float, dict[str, Any]]]
"""Rows, each with the time at which the driver saw it."""


def step_of(system: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the seconds of the parts of a step if this row is the last one of a step, else None."""
    if system == "slime":
        if "perf/step_time" not in row:
            return None
        train, sync = row.get("perf/train_time"), row.get("perf/update_weights_time")
        return {"generate": row.get("perf/rollout_wait_time"), "train": train, "sync": sync}
    if system == "trl":
        seconds = row["seconds"]
        generate = sum(value for name, value in seconds.items() if "generate" in name)
        return {"generate": generate, "train": None, "sync": seconds.get("sync_weights", 0.0)}
    timing = {k.removeprefix("timing_s/"): v for k, v in row["data"].items() if k.startswith("timing_s/")}
    if "step" not in timing:
        return None
    train = sum(timing.get(part, 0.0) for part in ("old_log_prob", "adv", "update_actor"))
    return {"generate": timing.get("gen"), "train": train, "sync": timing.get("update_weights")}


def first_samples_at(system: str, rows: Seen) -> float | None:
    """Returns when the first step's samples were there, in seconds of `time.time`."""
    for seen, row in rows:
        if system == "slime" and "perf/rollout_time" in row:
            return seen
        if system == "trl":
            return next((at for name, at in row["first"].items() if "generate" in name), None)
        if system == "verl" and "timing_s/step" in row["data"]:
            return float(seen - row["data"]["timing_s/step"] + row["data"]["timing_s/gen"])
    return None


def summary(
    system: str, spec: dict[str, Any], rows: list[tuple[float, dict[str, Any]]], begin: float
) -> dict[str, Any]:
    """Returns the figures of a run that began at `begin`, in seconds of `time.time`."""
    steps = [(seen, parts) for seen, row in rows if (parts := step_of(system, row)) is not None]
    walls = [after - before for (before, _), (after, _) in itertools.pairwise(steps)]
    kept = [{**parts, "step": wall} for wall, (_, parts) in zip(walls, steps[1:], strict=False)][spec["drop"] - 1 :]
    first = first_samples_at(system, rows)
    found: dict[str, Any] = {"steps_seen": len(steps), "startup_s": first and first - begin, "kept": kept}
    if not kept:
        return found
    for step in kept:
        if step["train"] is None and step["generate"] is not None:
            step["train"] = step["step"] - step["generate"] - step["sync"]
    for part in ("step", "generate", "train", "sync"):
        values = [step[part] for step in kept if step[part] is not None]
        found[f"{part}_s"] = statistics.median(values) if values else None
    samples = spec["prompts"] * spec["samples"]
    found["samples_per_s"] = samples / found["step_s"]
    found["tokens_per_s"] = samples * spec["response"] / found["step_s"]
    return found


class Rows:
    """Reads complete lines of a growing file, each with the time at which it was seen."""

    def __init__(self, file: Path) -> None:
        self.file, self.read, self.rows = file, 0, list[tuple[float, dict[str, Any]]]()

    def poll(self) -> None:
        if not self.file.exists():
            return
        with self.file.open("rb") as file:
            file.seek(self.read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.read += len(whole)
        now = time.time()
        self.rows += [(now, json.loads(line)) for line in whole.splitlines() if line.strip()]


# ---- processes -------------------------------------------------------------------------------------------------------


class Memory:
    """The GPU's memory in use, from one nvidia-smi that reports until the end."""

    def __init__(self, device: str) -> None:
        self.peak = self.last = 0
        self.process = None
        if device == "cuda":
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "100"]
            self.process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self.last = int(line.split()[0]) if line.split()[:1] and line.split()[0].isdigit() else self.last
            self.peak = max(self.peak, self.last)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans, so that `end_descendants` finds all of them."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def descendants(of: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(file.parent.name))
    found, left = [], [of]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def end_descendants(spared: Iterable[int]) -> int:
    """Kills whatever a system left running; returns how many processes these were."""
    ended, spared = set[int](), set(spared)
    for _ in range(20):
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                ended.add(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not left:
            break
        time.sleep(0.2)
    return len(ended)


def run(system: str, spec: dict[str, Any], log: Path, limit_s: float) -> dict[str, Any]:
    """Runs one system; returns its figures, or `error` with the end of its output."""
    with tempfile.TemporaryDirectory(prefix=f"league-{system}-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        command, environment = COMMANDS[system](spec, folder), environment_of(system, spec, folder)
        rows, memory = Rows(rows_file(system, folder)), Memory(spec["device"])
        before = settle(memory)
        spared = [memory.process.pid] if memory.process else []
        begin, error = time.time(), None
        with log.open("w") as output:
            output.write(f"{command}\n")
            output.flush()
            process = subprocess.Popen(
                command, cwd=HERE if system == "slime" else folder, env=environment, stdout=output, stderr=output
            )
            while process.poll() is None:
                rows.poll()
                if time.time() - begin > limit_s:
                    error = f"not done after {limit_s:.0f} s"
                    process.kill()
                    process.wait()
                time.sleep(POLL_S)
        rows.poll()
        whole = time.time() - begin
        if process.returncode and error is None:
            error = f"ended with code {process.returncode}"
        left = end_descendants(spared)
        found = summary(system, spec, rows.rows, begin)
        memory.close()
        if log.parent.joinpath(f"{log.stem}.rows.jsonl").write_text(
            "".join(json.dumps({"seen_s": seen - begin, **row}) + "\n" for seen, row in rows.rows)
        ):
            found["rows"] = f"{log.stem}.rows.jsonl"
        gpu = {"gpu_peak_mib": memory.peak, "gpu_before_mib": before} if spec["device"] == "cuda" else {}
        tail = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))[-1500:] if error else None
        shown = " ".join(map(str, command)).replace(str(folder), "FOLDER")
        return {
            **found,
            **gpu,
            "whole_s": whole,
            "left_running": left,
            "error": error,
            "output": tail,
            "command": shown,
        }


def settle(memory: Memory, limit_s: float = 30.0) -> int:
    """Waits until the GPU is free; returns what is in use then, in MiB."""
    deadline = time.time() + limit_s
    time.sleep(0.5 if memory.process else 0)
    while memory.last > FREE_MIB and time.time() < deadline:
        time.sleep(0.2)
    memory.peak = memory.last
    return memory.last


# ---- the whole -------------------------------------------------------------------------------------------------------


def in_site(options: argparse.Namespace, system: str, words: list[str]) -> str:
    """Runs Python in the site of a system; returns its output."""
    site = ":".join(filter(None, (options.site.get(system), str(HERE))))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": site}
    done = subprocess.run(
        [options.python, *words], cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def versions(options: argparse.Namespace, system: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json\n"
        "def of(n):\n try: return m.version(n)\n except m.PackageNotFoundError: return None\n"
        f"print(json.dumps({{n: of(n) for n in {PACKAGES!r}}}))"
    )
    found = json.loads(in_site(options, system, ["-c", code]))
    return {name: version for name, version in found.items() if version}


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the model, if it is missing, and the prompts; returns the workload's part of the spec."""
    if not (options.model / "config.json").exists():
        words = ["--shape", options.shape, "--out", str(options.model), "--tokenizer", str(options.tokenizer)]
        in_site(options, "slime", ["-m", "benchmarks.random_checkpoint", *words])
    data = options.logs / "data"
    num = options.prompts * (options.steps + 2)
    words = ["--model", str(options.model), "--out", str(data), "--prompts", str(num)]
    if not (data / "workload.json").exists():
        in_site(options, "slime", ["-m", "benchmarks.peers.workload", *words])
    found = json.loads((data / "workload.json").read_text())
    return {"data": str((data / "prompts.jsonl").resolve()), "prompt_tokens": found["prompt_tokens"]}


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def spec_of(options: argparse.Namespace, system: str, workload: dict[str, Any]) -> dict[str, Any]:
    changes = dict(change.split("=", 1) for name, change in options.change if name == system)
    if system != "verl":  # whose overrides are hydra's
        changes = {name: value_of(value) for name, value in changes.items()}
    names = ("prompts", "samples", "response", "steps", "drop", "micro_samples", "device", "attention", "engine")
    site = options.site.get(system, "")
    memory = {"slime": 0.4, "trl": 0.4, "verl": 0.5}[system]
    return {
        **{name: getattr(options, name) for name in names},
        **workload,
        "model": str(options.model.resolve()),
        "python": options.python,
        "site": ":".join(str(Path(part).absolute()) for part in site.split(":") if part),
        "engine_memory": memory if options.engine_memory is None else options.engine_memory,
        "changes": changes,
    }


def machine() -> str:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        gpu = ""
    return f"{gpu or 'no GPU'}; {os.cpu_count()} CPU cores"


def line_of(name: str, found: dict[str, Any]) -> str:
    if "samples_per_s" not in found:
        return f"{name}: {found['error'] or 'no step after the dropped ones'}"
    parts = ", ".join(
        f"{part} {found[f'{part}_s']:.2f} s" for part in ("generate", "train", "sync") if found[f"{part}_s"] is not None
    )
    memory = f", {found['gpu_peak_mib'] / 1024:.1f} GiB" if "gpu_peak_mib" in found else ""
    return (
        f"{name}: {found['samples_per_s']:.2f} samples/s, {found['tokens_per_s']:.0f} tokens/s, "
        f"step {found['step_s']:.2f} s ({parts}){memory}, start-up {found['startup_s'] or float('nan'):.0f} s"
        + (f"; {found['error']}" if found["error"] else "")
    )


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="slime,trl,verl", help="in this order")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shape", default="0.6b", help="of the model, if it is missing")
    parser.add_argument("--tokenizer", type=Path, default=HERE / "assets" / "tokenizers" / "qwen3")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--logs", type=Path, help="folder of logs and rows; default: next to --out")
    parser.add_argument(
        "--site", action="append", default=[], metavar="SYSTEM=FOLDER[:FOLDER]", help="packages of a system"
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--label", default="", help="names a variant in --out: SYSTEM-LABEL")
    parser.add_argument("--change", action="append", nargs=2, default=[], metavar=("SYSTEM", "KEY=VALUE"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response", type=int, default=1024, help="tokens of every response")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--drop", type=int, default=2, help="steps of warm-up")
    parser.add_argument("--micro-samples", type=int, default=16, help="samples of a micro-batch")
    parser.add_argument("--engine-memory", type=float, help="share of the GPU; default: slime 0.4, TRL 0.4, verl 0.5")
    parser.add_argument("--engine", choices=("vllm", "paged", "generate"), default="vllm", help="how TRL generates")
    parser.add_argument("--attention", choices=("stand-in", "sdpa"), default="stand-in", help="of verl's training")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of each system")
    options = parser.parse_args(argv)
    options.site = dict(text.split("=", 1) for text in options.site)
    options.logs = options.logs or options.out.parent / "league"
    return options


def main() -> int:
    """Prints a line per system; returns 1 if one failed."""
    options = options_of()
    adopt_orphans()
    options.logs.mkdir(parents=True, exist_ok=True)
    workload = prepare(options)
    record = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    record |= {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    failed = False
    for system in options.systems.split(","):
        name = f"{system}-{options.label}" if options.label else system
        spec = spec_of(options, system, workload)
        found = run(system, spec, options.logs / f"{name}.log", options.limit_s)
        settings = {k: v for k, v in spec.items() if k not in ("python", "site", "data", "model")}
        record["runs"][name] = {**found, "settings": settings, "versions": versions(options, system)}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(line_of(name, found), flush=True)
        failed |= found["error"] is not None
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
