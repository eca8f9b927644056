"""`slime plan`: memory and seconds of a run before anybody pays for it, from `slime.training.costs`.

    slime plan --hf-checkpoint DIR --gpu h200 [--gpus 256] [--json FILE] [flags of the run]

It needs no GPU and no weights: a folder with config.json is enough. It prints what each rank holds, the seconds of each
part of a step, and the measured rates that they come from. If the layout of the flags does not fit, the exit code is 1.
In either case it proposes the fastest layouts that fit, from a search over the parallel sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config, text_config
from slime.core.topology import EngineLayout, ParallelSizes
from slime.settings import Args, parse_args
from slime.settings.command_line import flag_value
from slime.settings.conditions import has_reference
from slime.settings.groups.training import longest_sample
from slime.settings.topology_yaml import layout_of, topology_of
from slime.training import costs
from slime.training.costs import GPUS, Job, Part

DEFAULTS = {"rollout_batch_size": "32", "n_samples_per_prompt": "8", "num_rollout": "1"}
"""Setting -> its value if the command line does not set it, because a plan does not need it from the user."""
PROMPT_TOKENS = 512
"""Mean length of a prompt if neither `--prompt-tokens` nor a limit is given."""
DEFAULT_POOL = 0.8
"""Fraction of a GPU for engines if `--sglang-mem-fraction-static` is not set. SGLang chooses at start."""
FP32_ADAM = {"main_params_dtype": 4, "exp_avg_dtype": 4, "exp_avg_sq_dtype": 4}
HOST_GPUS = 8
"""GPUs of a host, for `--gpus`."""
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SPARE = 0.08
"""Fraction of a GPU that proposals leave free, because torch reserves more than it allocates."""
PROPOSALS = 3
ENGINE_GPUS = (1, 2, 4, 8, 16, 32)
MICRO_BATCHES = (65536, 32768, 16384, 8192, 4096)
"""Tokens per rank that the search tries; none is shorter than a sample."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --hf-checkpoint DIR [--gpu KIND] [--gpus N] [--json FILE] [flags of the run]"
    parser.add_argument("--gpu", choices=tuple(GPUS), default="h200", help="kind of GPU (default h200)")
    parser.add_argument(
        "--gpus", type=int, help="training GPUs, in hosts of 8 (default: --actor-num-nodes x --actor-num-gpus-per-node)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, help=f"mean tokens of a prompt (default: its limit, else {PROMPT_TOKENS})"
    )
    parser.add_argument(
        "--response-tokens", type=int, help="mean tokens of a response (default: --rollout-max-response-len)"
    )
    parser.add_argument("--plain-tflops", type=float, help="speed of plain bf16 products on your GPUs, in TFLOP/s")
    parser.add_argument("--json", type=Path, help="also write the plan to this file")


def run(options: argparse.Namespace) -> int:
    """Prints the plan. Returns 1 if the layout does not fit. Raises `ConfigError` for flags that no run accepts."""
    job = job_of_options(options)
    planned = plan(job)
    print(text_of(job, planned))
    if options.json is not None:
        options.json.write_text(json.dumps(planned, indent=1) + "\n")
    return 1 if planned["problems"] else 0


# --- From flags to a job


def job_of_options(options: argparse.Namespace) -> Job:
    """Returns the job of a command line, with the settings as a run would derive them."""
    with tempfile.TemporaryDirectory(prefix="slime-plan-") as folder:
        args = parse_args([*_added(options, Path(folder)), *options.words])
    job = job_of(args, GPUS[options.gpu])
    prompt, response = options.prompt_tokens or job.prompt_tokens, options.response_tokens or job.response_tokens
    plain = None if options.plain_tflops is None else options.plain_tflops * 1e12
    most = max(job.max_tokens, -(-(prompt + response) // job.sizes.cp))  # prompts may have no limit
    return dataclasses.replace(job, prompt_tokens=prompt, response_tokens=response, plain=plain, max_tokens=most)


def _added(options: argparse.Namespace, folder: Path) -> list[str]:
    """Returns flags that a run needs and a plan can do without, unless the user gives them."""
    words: Sequence[str] = options.words
    (folder / "prompts.jsonl").write_text('{"prompt": "unused", "label": "unused"}\n')
    wanted = DEFAULTS | {
        "device": "cuda",
        "prompt_data": str(folder / "prompts.jsonl"),
        "input_key": "prompt",
        "label_key": "label",
        "rm_type": "math",
    }
    if options.gpus is not None:
        if options.gpus < 1 or (options.gpus > HOST_GPUS and options.gpus % HOST_GPUS):
            raise ConfigError(f"--gpus is {options.gpus}, but must be at most {HOST_GPUS} or a multiple of it")
        hosts, each = -(-options.gpus // HOST_GPUS), min(HOST_GPUS, options.gpus)
        wanted |= {"actor_num_nodes": str(hosts), "actor_num_gpus_per_node": str(each)}
    if options.gpus is None or options.gpus > HOST_GPUS:
        wanted["ray_address"] = "127.0.0.1:6379"  # several hosts need a cluster; a plan connects to none
    if flag_value(words, "prompt_data") is not None:
        for name in ("input_key", "label_key"):
            wanted.pop(name)
    chosen = {name: value for name, value in wanted.items() if flag_value(words, name) is None}
    return [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]


def job_of(args: Args, gpu: costs.Gpu) -> Job:
    """Returns the job of a run's settings."""
    m = args.megatron
    config = text_config(read_hf_config(args.hf_checkpoint))
    sizes = ParallelSizes.of(m)
    first, last = m["num_layers_in_first_pipeline_stage"], m["num_layers_in_last_pipeline_stage"]
    engine, num_engines = _engines(args)
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    largest = max(args.max_tokens_per_gpu or 0, -(-longest_sample(args) // sizes.cp))
    if not args.use_dynamic_batch_size:
        largest = -(-args.micro_batch_size * longest_sample(args) // sizes.cp)
    updates = args.num_steps_per_rollout or 1
    fraction = args.sglang.get("mem_fraction_static")
    return costs.job_of(
        config,
        gpu=gpu,
        sizes=sizes,
        world=world,
        gpus_per_host=args.num_gpus_per_node or args.actor_num_gpus_per_node,
        sequence_parallel=bool(m["sequence_parallel"]) and sizes.tp > 1,
        recompute=_recompute(args),
        max_tokens=largest,
        chunk_tokens=args.log_probs_chunk_size,
        state_bytes=_state_bytes(args),
        state_on_host=float(m["optimizer_offload_fraction"]) if m["optimizer_cpu_offload"] else 0.0,
        stage_layers=costs.stage_layers(int(m["num_layers"]), sizes.pp, first, last),
        engine=engine,
        num_engines=num_engines,
        num_eval_engines=args.eval_fleet or 0,
        colocated=bool(args.colocate),
        pool_fraction=float(fraction) if fraction else DEFAULT_POOL,
        bucket_bytes=args.update_weight_buffer_size,
        transport="tensor" if args.update_weight_transport == "tensor" else "distributed",
        num_samples=args.rollout_batch_size * args.n_samples_per_prompt,
        per_prompt=args.n_samples_per_prompt,
        prompt_tokens=args.rollout_max_prompt_len or PROMPT_TOKENS,
        response_tokens=args.rollout_max_response_len,
        num_updates=updates,
        forward_passes=int(has_reference(args)) + int(updates > 1),
    )


def _engines(args: Args) -> tuple[EngineLayout, int]:
    """Returns the layout and the number of the policy's engines."""
    policy = topology_of(args).policy
    groups = [group for group in policy.groups if group.runs] if policy is not None else []
    if not groups:
        raise ConfigError("slime plan needs engines of the policy; drop --debug-train-only")
    layout = layout_of(groups[0].num_gpus_per_engine, {**args.sglang, **groups[0].overrides})
    return layout, max(1, sum(group.num_gpus // group.num_gpus_per_engine for group in groups))


def _recompute(args: Args) -> frozenset[str]:
    m = args.megatron
    if m["recompute_granularity"] == "full":
        return frozenset({"full"})
    return frozenset(m["recompute_modules"] or ()) if m["recompute_granularity"] == "selective" else frozenset()


def _state_bytes(args: Args) -> float:
    """Returns the bytes of master weights and moments per parameter."""
    m = args.megatron
    if not m["use_precision_aware_optimizer"]:
        return float(sum(FP32_ADAM.values()))
    return float(sum(4 if m[name] == "float32" else 2 for name in FP32_ADAM))


# --- The plan


def plan(job: Job) -> dict[str, Any]:
    """Returns the plan of a job as JSON data: layout, memory, seconds, rates, problems and proposals."""
    found = list(problems(job))
    phases = costs.step_parts(job)
    used = {name for parts in phases.values() for part in parts for name in part.rates} | {"context", "engine context"}
    return {
        "gpu": job.gpu.name,
        "training": _layout(job),
        "engine": str(job.engine),
        "num_engines": job.num_engines,
        "num_eval_engines": job.num_eval_engines,
        "memory": _memory(job),
        "seconds": {phase: [dataclasses.asdict(part) for part in parts] for phase, parts in phases.items()},
        "step_s": step_seconds(job, phases),
        "rates": {name: dataclasses.asdict(costs.RATES[name]) for name in sorted(used)},
        "problems": found,
        "proposals": [
            _layout(one) | {"engine": str(one.engine), "step_s": step_seconds(one), "training_gb": _peak(one)}
            for one in proposals(job)
        ],
    }


def _layout(job: Job) -> dict[str, Any]:
    s = job.sizes
    return {
        "gpus": job.world,
        "tp": s.tp,
        "pp": s.pp,
        "vp": s.vp,
        "cp": s.cp,
        "ep": s.ep,
        "dp": job.dp,
        "max_tokens_per_gpu": job.max_tokens,
        "recompute": sorted(job.recompute),
        "flags": _flags(job),
    }


def _flags(job: Job) -> str:
    """Returns the flags of a layout."""
    s, layers = job.sizes, job.stage_layers
    sizes = {"tensor-model": s.tp, "pipeline-model": s.pp, "context": s.cp, "expert-model": s.ep}
    words = [f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1]
    words += [f"--decoder-last-pipeline-num-layers {layers[-1]}"] if layers[-1] != layers[0] else []
    words.append(f"--use-dynamic-batch-size --max-tokens-per-gpu {job.max_tokens}")
    words += [FULL_RECOMPUTE] if "full" in job.recompute else []
    return " ".join(words)


def _peak(job: Job) -> float:
    return (costs.training_memory(job, costs.worst_stage(job)).total + costs.fixed_memory(job).total) / 1e9


def _memory(job: Job) -> dict[str, Any]:
    stages = range(job.sizes.pp)
    engine = costs.engine_memory(job)
    worst = costs.worst_stage(job)
    return {
        "training": [dict(costs.training_memory(job, stage).parts) for stage in stages],
        "fixed": dict(costs.fixed_memory(job).parts),
        "sync_bytes": costs.sync_memory(job, worst) if job.colocated else None,
        "host_bytes_per_rank": costs.host_memory(job, worst),
        "engine": dataclasses.asdict(engine),
    }


def step_seconds(job: Job, phases: dict[str, list[Part]] | None = None) -> float:
    """Returns the seconds of a step: all phases after each other."""
    return sum(costs.seconds_of(parts) for parts in (phases or costs.step_parts(job)).values())


# --- What does not fit


def problems(job: Job) -> Iterator[str]:
    """Yields a sentence for each phase that does not fit: what needs how much, and what to change."""
    limit, fixed = job.gpu.memory_bytes, costs.fixed_memory(job).total
    stage = costs.worst_stage(job)
    found = costs.training_memory(job, stage)
    engine = costs.engine_memory(job)
    asleep = engine.fixed if job.colocated else 0.0
    needed = found.total + fixed + asleep
    if needed > limit:
        kept = needed - found.parts["activations"] - found.parts["recomputed layer"]
        if kept > limit:
            do = "split the model over more GPUs: raise --pipeline-, --expert- or --tensor-model-parallel-size"
            do += ", or pass --optimizer-cpu-offload"
        elif "full" not in job.recompute:
            do = f"pass {FULL_RECOMPUTE}, or lower "
            do += f"--max-tokens-per-gpu to {_fitting(job, stage, limit - kept):,} or less"
        else:
            do = f"lower --max-tokens-per-gpu to {_fitting(job, stage, limit - kept):,} or less"
        where = f" of pipeline stage {stage}" if job.sizes.pp > 1 else ""
        yield (
            f"training does not fit: a rank{where} needs {needed / 1e9:.1f} GB of the {limit / 1e9:.1f} GB of an "
            f"{job.gpu.name.upper()}, {kept / 1e9:.1f} GB of it without activations; {do}"
        )
    if engine.weights + engine.fixed > limit * max(job.pool_fraction, 1e-9) or engine.tokens < job.sample_tokens:
        yield (
            f"an engine does not fit: a rank holds {engine.weights / 1e9:.1f} GB of weights, and "
            f"{job.pool_fraction:.0%} of its GPU leave {engine.cache / 1e9:.1f} GB for the cache, {engine.tokens:,} "
            f"tokens, but one sample has {job.sample_tokens:,}; raise --rollout-num-gpus-per-engine or "
            "--sglang-mem-fraction-static"
        )
    if job.colocated and (sync := costs.sync_memory(job, stage) + fixed + engine.fixed) > limit:
        yield (
            f"the weight sync does not fit: trainer and engine need {sync / 1e9:.1f} GB of {limit / 1e9:.1f} GB; lower "
            "--update-weight-buffer-size, or raise --rollout-num-gpus-per-engine"
        )


def _fitting(job: Job, stage: int, num_bytes: float) -> int:
    found = costs.training_memory(job, stage).parts
    per_token = (found["activations"] + found["recomputed layer"]) / job.max_tokens
    return max(0, int(num_bytes / per_token)) // 256 * 256


# --- The search


def proposals(job: Job) -> list[Job]:
    """Returns the fastest layouts that fit on the job's GPUs, at most `PROPOSALS`, with different parallel sizes."""
    engines = [one for one in engine_layouts(job) if fits_engine(one)]
    base = min(engines, key=lambda one: costs.seconds_of(costs.generate_parts(one)), default=job)
    best: dict[ParallelSizes, tuple[float, Job]] = {}
    for one in candidates(base):
        if any(problems(one)) or 1e9 * _peak(one) > (1 - SPARE) * one.gpu.memory_bytes:
            continue
        seconds = step_seconds(one)
        if one.sizes not in best or seconds < best[one.sizes][0]:
            best[one.sizes] = (seconds, one)
    return [one for _, one in sorted(best.values(), key=lambda pair: pair[0])[:PROPOSALS]]


def fits_engine(job: Job) -> bool:
    found = costs.engine_memory(job)
    return found.weights + found.fixed < job.gpu.memory_bytes * job.pool_fraction and found.tokens >= job.sample_tokens


def engine_layouts(job: Job) -> Iterator[Job]:
    """Yields the job with its own engines, then with engines of other sizes, also with DP attention for experts."""
    yield job
    gpus = job.num_engines * job.engine.num_ranks
    sizes = job.table.sizes
    for size in ENGINE_GPUS:
        if gpus % size or sizes.num_heads % size or (sizes.num_experts and sizes.num_experts % size):
            continue
        ep_size = size if sizes.num_experts else 1
        for dp_size in {1, size if sizes.num_experts and job.table.spread.dp_attention else 1}:
            layout = EngineLayout(tp_size=size, ep_size=ep_size, dp_size=dp_size)
            yield dataclasses.replace(job, engine=layout, num_engines=gpus // size)


def candidates(job: Job) -> Iterator[Job]:
    """Yields the job in all layouts of the search. Tensor and context parallelism stay within a host."""
    world, layers, experts = job.world, job.num_layers, job.table.sizes.num_experts
    powers = [2**n for n in range(0, world.bit_length())]
    stages = [n for n in range(1, min(layers, world, 32) + 1) if world % n == 0]
    experts_over = [n for n in powers if experts and experts % n == 0] or [1]
    within = [n for n in powers if n <= job.gpus_per_host]
    tokens = [n for n in MICRO_BATCHES]
    for tp, cp, pp, ep in itertools.product(within, within, stages, experts_over):
        sizes = ParallelSizes(tp=tp, pp=pp, cp=cp, ep=ep)
        if tp * cp > job.gpus_per_host or costs.check_sizes(dataclasses.replace(job, sizes=sizes)) is not None:
            continue
        longest = -(-job.sample_tokens // cp)
        parallel = tp > 1 and bool(experts or job.sequence_parallel)
        for size, recompute in itertools.product(tokens, (frozenset[str](), frozenset({"full"}))):
            if size >= longest:
                yield job.with_sizes(sizes, max_tokens=size, recompute=recompute, sequence_parallel=parallel)


# --- The text


def text_of(job: Job, planned: dict[str, Any]) -> str:
    """Returns the plan as text."""
    lines = [_title(job), "", *_memory_lines(job), "", *_second_lines(job), ""]
    lines += [f"does not fit: {problem}" for problem in planned["problems"]] or [_spare(job)]
    lines += ["", *_proposal_lines(planned["proposals"])]
    lines += ["", "rates, measured on H200s unless they say otherwise (benchmarks/results):"]
    lines += [_rate_line(name, rate) for name, rate in planned["rates"].items()]
    return "\n".join(lines)


def _spare(job: Job) -> str:
    if 1e9 * _peak(job) <= (1 - SPARE) * job.gpu.memory_bytes:
        return "fits"
    return f"fits, but leaves less than {SPARE:.0%} of a GPU free; torch reserves more memory than it allocates"


def _title(job: Job) -> str:
    place = "colocated" if job.colocated else "on GPUs of their own"
    if job.num_eval_engines:
        gpus = job.num_eval_engines * job.engine.num_ranks
        place += f", and {job.num_eval_engines} more on {gpus} GPU{'s' * (gpus > 1)}, which only evaluate"
    return (
        f"{job.table.family}, {job.num_layers} layers, on {job.world} {job.gpu.name.upper()}: {_sizes(_layout(job))}; "
        f"{job.num_engines} engine{'s' * (job.num_engines > 1)} of {job.engine}, {place}; {job.num_samples} samples of "
        f"{job.prompt_tokens:,} + {job.response_tokens:,} tokens"
    )


def _sizes(layout: dict[str, Any]) -> str:
    names = [f"{name.upper()} {layout[name]}" for name in ("tp", "pp", "vp", "cp", "ep", "dp") if layout[name] > 1]
    recompute = f", recomputes {', '.join(layout['recompute'])}" if layout["recompute"] else ""
    return f"{' '.join(names) or 'one GPU'}, micro-batches of {layout['max_tokens_per_gpu']:,} tokens{recompute}"


def _memory_lines(job: Job) -> list[str]:
    stages = sorted({0, costs.worst_stage(job), job.sizes.pp - 1})
    lines = ["memory of a training rank, GB"]
    for stage in stages:
        parts = {**costs.training_memory(job, stage).parts, **costs.fixed_memory(job).parts}
        named = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size >= 5e7)
        where = f"stage {stage}: " if job.sizes.pp > 1 else ""
        lines.append(f"  {where}{sum(parts.values()) / 1e9:.1f} of {job.gpu.memory_bytes / 1e9:.1f}: {named}")
    engine = costs.engine_memory(job)
    lines.append(
        f"memory of an engine rank, GB: weights {engine.weights / 1e9:.1f}, cache {engine.cache / 1e9:.1f} "
        f"({engine.tokens:,} tokens an engine), context and graphs {engine.fixed / 1e9:.1f}"
    )
    worst = costs.worst_stage(job)
    if job.colocated:
        total = costs.sync_memory(job, worst) + costs.fixed_memory(job).total + engine.fixed
        lines.append(f"weight sync: trainer and engine {total / 1e9:.1f} GB")
    if host := costs.host_memory(job, worst):
        lines.append(f"pinned host memory: {host / 1e9:.1f} GB a rank, {host * job.gpus_per_host / 1e9:,.0f} GB a host")
    return lines


def _second_lines(job: Job) -> list[str]:
    phases = costs.step_parts(job)
    lines = [f"seconds of a step: {step_seconds(job, phases):.1f}"]
    for phase, parts in phases.items():
        lines.append(f"  {phase:43} {costs.seconds_of(parts):9.2f}")
        for part in parts:
            rates = f"  {', '.join(part.rates)}" if part.rates else ""
            lines.append(f"    {part.name:41} {part.seconds:9.2f}{rates}")
    return lines


def _proposal_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return ["no layout of the search fits on these GPUs; use more of them, or shorter samples"]
    lines = ["fastest layouts of the search:"]
    return (
        lines
        + [
            f"  {one['step_s']:8.1f} s, {one['training_gb']:6.1f} GB: {_sizes(one)}; engines of {one['engine']}"
            for one in found
        ]
        + [f"flags of the first: {found[0]['flags']}"]
    )


def _rate_line(name: str, rate: dict[str, Any]) -> str:
    first, *more = rate["source"].split(".json, ")
    source = f"{first}.json and {len(more)} more" if more else first
    return f"  {name:29} {rate['value']:<9.4g} {rate['unit']}: {source}; {rate['how']}"
