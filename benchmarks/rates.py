"""Derives the rates of `slime plan` from recorded measurements, and compares its predictions with measured runs.

    python -m benchmarks.rates              prints predictions beside measurements, as in docs/performance.md
    python -m benchmarks.rates --write      derives the rates again and writes slime/training/rates.json

Rates of computation are fitted to runs on one GPU. Those of collectives come from runs on two GPUs, one run for each
kind; these runs are marked in the table, because they do not test the prediction. Needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.training.shapes import SHAPES
from slime.core.topology import EngineLayout, ParallelSizes
from slime.training import costs
from slime.training.costs import GPUS, Job, Rate, Work, job_of

RESULTS = Path(__file__).parent / "results"
OUT = Path(costs.__file__).with_name("rates.json")
ROUNDS = 250
"""Of the search for rates; the result hardly changes in the last ones."""
BANDWIDTH, MOST_BANDWIDTH = "share of memory bandwidth", 0.9
"""No kernel reaches more of the data sheet's bandwidth, whatever would fit the runs best."""
FULL = frozenset({"full"})
ADAM_BYTES = 12.0


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run."""

    name: str
    source: str
    job: Job
    work: Work
    train_s: float | None = None
    memory_gb: float | None = None
    """Peak allocation during training."""
    generate_s: float | None = None
    sync_s: float | None = None
    gives: tuple[str, ...] = ()
    """Rates that this run alone determines."""


def job(shape: str, layout: Mapping[str, int] | None = None, world: int = 1, **changes: Any) -> Job:
    """Returns a job on H200s, colocated, with the settings of the benchmarks."""
    known: dict[str, Any] = {
        "gpu": GPUS["h200"],
        "sizes": ParallelSizes(**layout or {}),
        "world": world,
        "gpus_per_host": 8,
        "sequence_parallel": "30b" in shape and (layout or {}).get("tp", 1) > 1,
        "recompute": frozenset(),
        "max_tokens": 8192,
        "chunk_tokens": 1024,
        "state_bytes": ADAM_BYTES,
        "state_on_host": 0.0,
        "engine": EngineLayout(),
        "num_engines": world,
        "colocated": True,
        "pool_fraction": 0.4,
        "bucket_bytes": 2 * 1024**3,
        "transport": "tensor",
        "num_samples": 128,
        "per_prompt": 8,
        "prompt_tokens": 18,
        "response_tokens": 512,
        "num_updates": 1,
        "forward_passes": 0,
    }
    return job_of(SHAPES[shape], **{**known, **changes})


def length_of(of: Job, flops: float, tokens: float, logits: float) -> float:
    """Returns the length of equal sequences with as much attention as those of a call with `flops` FLOPs."""
    pairs = flops / 3 - of.flops.per_token * tokens - of.flops.per_logit * logits
    per_pair = sum(cost for _, cost in of.flops.per_pair)
    return 2 * pairs / tokens / per_pair


def training_runs() -> Iterator[Run]:
    """Yields the runs of `benchmarks.train` with the kernels of today."""
    kernels = [record for run in read("train_kernels_h200.json")["runs"] for record in run["records"]]
    sources = {
        "train_kernels_h200.json": kernels,
        "train_4k_h200.json": read("train_4k_h200.json")["records"],
        "train_two_gpus_h200.json": read("train_two_gpus_h200.json")["records"],
        "train_cp2_32k_h200.json": [
            record for record in read("train_cp2_32k_h200.json")["runs"] if record["flags"] == "--kernels auto"
        ],
    }
    gives = {
        ("4b", "tp2"): ("all-reduce",),
        ("8b", "tp2"): ("all-reduce",),
        ("30b-a3b-6l", "ep2"): ("all-to-all",),
        ("30b-a3b-6l", "tp2"): ("expert layers under TP",),
    }
    for source, records in sources.items():
        for record in records:
            if record["label"] == "old":
                continue
            layout = {} if record["layout"] == "one" else {record["layout"][:2]: int(record["layout"][2:])}
            for found in record["lengths"]:
                plain = 1e12 * found["matrix_tflops"]
                of = job(
                    record["shape"],
                    layout,
                    record["world_size"],
                    plain=plain,
                    max_tokens=record.get("max_tokens", 8192),
                )
                call = found["calls"][-1]
                length = length_of(of, call["flops"], call["tokens"], call["response_tokens"])
                work = Work(
                    call["tokens"], call["response_tokens"], length, found["passes_of_warm_up"]["with_gradients"]
                )
                yield Run(
                    f"{record['shape']} {record['layout']}, {call['tokens']:,} tokens, mean {found['mean_length']:,}",
                    source,
                    of,
                    work,
                    found["median_s"],
                    found["memory_gb"]["peak_allocated"],
                    gives=gives.get((record["shape"], record["layout"]), ()),
                )


def later(rows: Sequence[Mapping[str, float]], key: str) -> float | None:
    """Returns the median over the steps after the first one."""
    values = [row[key] for row in rows if key in row][1:]
    return statistics.median(values) if values else None


def colocated_runs() -> Iterator[Run]:
    """Yields runs of train.py in which an engine shares the GPU."""
    starts = read("colocated_starts_h200.json")["runs"]
    cases: Sequence[tuple[str, str, Any, Job, int]] = (
        (
            "4b colocated, micro-batches of 32,768",
            "colocated_4b_h200.json",
            read("colocated_4b_h200.json")["metrics"],
            job("4b", max_tokens=32768, recompute=FULL),
            3,
        ),
        (
            "4b colocated, samples of 16,362",
            "colocated_4b_16k_h200.json",
            read("colocated_4b_16k_h200.json")["metrics"],
            job(*("4b",), max_tokens=16384, recompute=FULL, num_samples=8, per_prompt=2, prompt_tokens=15850),
            8,
        ),
        (
            "30b-a3b-6l colocated, micro-batches of 16,384",
            "colocated_starts_h200.json",
            starts[4]["metrics"],
            job("30b-a3b-6l", max_tokens=16384),
            5,
        ),
        (
            "4b colocated again, buckets of 2 GiB",
            "colocated_starts_h200.json",
            starts[3]["metrics"],
            job("4b", max_tokens=32768, recompute=FULL),
            3,
        ),
    )
    for name, source, rows, of, micro_batches in cases:
        tokens = of.num_samples * of.sample_tokens
        work = Work(tokens, of.num_samples * of.response_tokens, of.sample_tokens, micro_batches)
        memory, current = later(rows, "perf/memory_train_bytes"), source == "colocated_starts_h200.json"
        yield Run(
            name,
            source,
            of,
            work,
            train_s=later(rows, "perf/train_time"),
            memory_gb=None if memory is None else memory / 1e9,
            generate_s=later(rows, "perf/rollout_time"),
            sync_s=later(rows, "perf/update_weights_time") if current else None,
        )


def certified_runs() -> Iterator[Run]:
    """Yields the plain runs of `slime certify`."""
    runs = read("certify_h200.json")["runs"]
    cases = (
        ("qwen3-0.6b", "0.6b", 1, {}, 512, 5),
        ("30b-a3b-2l", "30b-a3b-2l", 1, {}, 256, 3),
        ("30b-a3b-2l EP 2", "30b-a3b-2l", 2, {"ep": 2}, 256, 2),
    )
    for name, shape, world, layout, response, micro_batches in cases:
        rows = runs[name]["plain"]
        of = job(shape, layout, world, max_tokens=16384, response_tokens=response, prompt_tokens=16)
        tokens = of.num_samples * of.sample_tokens
        work = Work(tokens, of.num_samples * response, of.sample_tokens, micro_batches)
        yield Run(
            f"{shape} certified, {world} GPU{'s' * (world > 1)}",
            "certify_h200.json",
            of,
            work,
            train_s=later(rows, "perf/train_time"),
            generate_s=later(rows, "perf/rollout_time"),
        )


def prefix_runs() -> Iterator[Run]:
    """Yields the calls of eight samples of 4,352 tokens without shared prefixes."""
    for size in read("prefix_sharing_h200.json")["sizes"]:
        of = job("0.6b", max_tokens=4352 if size["max_tokens"] < 10000 else 34816)
        work = Work(34816, 2048, 4352, 8 if size["max_tokens"] < 10000 else 1)
        peak = statistics.median(one["whole"]["peak_allocated_gb"] for one in size["rounds"])
        name = f"0.6b, 8 samples of 4,352, micro-batches of {of.max_tokens:,}"
        yield Run(name, "prefix_sharing_h200.json", of, work, size["median_s"]["whole"], memory_gb=peak)


def server_runs() -> Iterator[Run]:
    """Yields rounds of one server in which all requests run at once."""
    for case in read("rollout_speed_h200.json")["fifth"]["cases"]:
        requests, tokens = case["requests"], case["tokens"]
        of = job("0.6b", pool_fraction=0.92, num_samples=requests, per_prompt=1, response_tokens=tokens)
        seconds = requests * tokens / statistics.median(case["tokens_per_s"]["bare"])
        name = f"0.6b server, {requests} requests x {tokens:,}"
        yield Run(name, "rollout_speed_h200.json", of, Work.of(of), generate_s=seconds)


def layout_runs() -> Iterator[Run]:
    """Yields the weight syncs to engines of two GPUs that give no rate."""
    found = read("engine_layouts_h200.json")["runs"]
    engines = {"tp2-pp2": EngineLayout(pp_size=2), "tp2-ep2": EngineLayout(tp_size=2, ep_size=2)}
    for name, engine in engines.items():
        run = found[name]
        of = job(run["shape"], {"tp": 2}, 2, engine=engine, num_engines=1)
        seconds = statistics.median(run["update_weights_time"])
        yield Run(
            f"{run['shape']} from {run['trainer']} to {run['engines']}",
            *("engine_layouts_h200.json", of, Work.of(of)),
            sync_s=seconds,
        )


def all_runs() -> list[Run]:
    one = (*training_runs(), *colocated_runs(), *certified_runs())
    return [*one, *prefix_runs(), *server_runs(), *layout_runs()]


# --- Deriving the rates


def predicted(run: Run, what: str) -> float:
    """Returns the predicted seconds or GB of a run, with the plain products of its machine."""
    of = run.job
    if what == "train_s":
        return costs.train_seconds(of, run.work)
    if what == "generate_s":
        return costs.seconds_of(costs.generate_parts(of))
    if what == "sync_s":
        return costs.seconds_of(costs.sync_parts(of))
    return costs.training_memory(of, costs.worst_stage(of)).total / 1e9


def set_rate(name: str, value: float) -> None:
    costs.RATES[name] = dataclasses.replace(costs.RATES[name], value=value)


def fit(names: Sequence[str], runs: Sequence[Run], what: str) -> None:
    """Sets rates so that the squared logarithms of predicted / measured are least, by shrinking steps of each rate."""

    def error() -> float:
        return sum(math.log(predicted(run, what) / getattr(run, what)) ** 2 for run in runs)

    step, best = 0.3, error()
    for _ in range(ROUNDS):
        improved = False
        for name in names:
            before = costs.RATES[name].value
            for factor in (1 + step, 1 / (1 + step)):
                set_rate(name, before * factor)
                if costs.RATES[name].unit == BANDWIDTH and before * factor > MOST_BANDWIDTH:
                    set_rate(name, before)
                    continue
                if (now := error()) < best * (1 - 1e-9):
                    best, improved = now, True
                    break
                set_rate(name, before)
        step = step if improved else step / 2


TRAIN_FIT: Mapping[str, tuple[float, str, str]] = {
    "products": (0.85, "share of plain products", "matrix products of dense layers and of the LM head"),
    "expert products": (0.4, "share of plain products", "grouped products of experts, with their rows' way there"),
    "attention": (0.4, "share of plain products", "attention, forward and backward"),
    "passes over activations": (8.0, "times a layer's kept bytes", "reads and writes of a layer outside of products"),
    "launches of a layer": (4e-3, "s", "least time of a layer's forward and backward pass, which the host sets"),
    "optimizer": (0.15, BANDWIDTH, "clearing and measuring gradients, AdamW"),
    "train call": (0.03, "s", "work before and after the passes of one call"),
}
DECODE_FIT: Mapping[str, tuple[float, str, str]] = {
    "decode weights": (0.8, BANDWIDTH, "reading the weights in a decoding step"),
    "decode cache": (0.6, BANDWIDTH, "reading keys and values in a decoding step"),
    "decode launches of a layer": (8e-5, "s", "time of a layer in a decoding step, whatever its size"),
    "decode request": (2e-5, "s", "sampling, scheduling and streaming of one token"),
    "prefill": (0.25, "share of plain products", "prompts, each computed once per group"),
}
EXCHANGE_FIT: Mapping[str, tuple[float, str, str]] = {
    "all-reduce": (0.8, "share of the link", "what 4b tp2 and 8b tp2 take longer than their computation"),
    "all-to-all": (0.2, "share of the link", "what 30b-a3b-6l ep2 takes longer than its computation, waits included"),
    "expert layers under TP": (0.02, "s", "what a layer of 30b-a3b-6l tp2 takes longer than its computation"),
}
ONE_GPU = "train_kernels_h200.json, train_4k_h200.json, colocated_4b_h200.json, colocated_4b_16k_h200.json, " + (
    "colocated_starts_h200.json, prefix_sharing_h200.json"
)
ENGINES = "colocated_4b_h200.json, colocated_4b_16k_h200.json, colocated_starts_h200.json, rollout_speed_h200.json"
DOCS = "docs/performance.md, A 4B colocated with its engine on one H200"


def direct() -> dict[str, Rate]:
    """Returns the rates that follow from one measurement each."""
    records = [r for run in read("train_kernels_h200.json")["runs"] for r in run["records"]]
    plain = statistics.median(found["matrix_tflops"] for r in records for found in r["lengths"])
    sync, starts = read("sync_speed_h200.json")["runs"], read("colocated_starts_h200.json")["runs"]
    four, moe, layouts = starts[3]["metrics"], starts[4]["metrics"], read("engine_layouts_h200.json")["runs"]
    adam = 2 + ADAM_BYTES
    woken = later(read("colocated_4b_h200.json")["metrics"], "perf/wake_up_time")
    released = later(four, "perf/offload_rollout_time")
    calls = later(four, "perf/update_weights_pause_time")
    assert woken is not None and released is not None and calls is not None, "the recorded runs have these metrics"
    parameters, bare = 4_022_468_096, 1e9 * sync["4b"]["bare broadcast"]["GB/s"]
    experts = 6 * 128 * 3 * 2048 * 768 * 2

    def rates(num_bytes: float, dense_s: float, moe_bytes: float, moe_s: float) -> tuple[float, float]:
        dense = num_bytes / (dense_s - calls)
        return dense, experts / (moe_s - calls - (moe_bytes - experts) / dense)

    nccl = rates(*_announced(sync["4b"]), *_announced(sync["30b-a3b-6l"]))
    shared = rates(_bytes(four), _synced(four), _bytes(moe), _synced(moe))
    shards = rates(*_median_sync(layouts["dp2-tp2"]), *_median_sync(layouts["ep2-ep2"]))
    note = "verified; bytes of the model by the time of the sync without its calls"
    return {
        "plain products": Rate(1e12 * plain, "FLOP/s", "train_kernels_h200.json", "median of products of 8192 x 8192"),
        "link": Rate(bare, "bytes/s", "sync_speed_h200.json", "bare broadcast between two GPUs of a host"),
        "network": Rate(
            *(50e9 * bare / 450e9, "bytes/s", "not measured"),
            "400 Gb/s for each GPU (data sheet), of which as much is reached as of NVLink's 450 GB/s",
        ),
        "host link": Rate(adam * parameters / woken, "bytes/s", "colocated_4b_h200.json", "perf/wake_up_time"),
        "context": Rate(3.5 * costs.GIB, "bytes", DOCS, "what nvidia-smi shows for a trainer without tensors"),
        "engine context": Rate(2.6 * costs.GIB, "bytes", DOCS, "what nvidia-smi shows for a released engine"),
        "communicator": Rate(0.2e9, "bytes", "not measured", "buffers of one NCCL communicator of a rank"),
        "engine release": Rate(released, "s", "colocated_starts_h200.json", "perf/offload_rollout_time"),
        "sync calls": Rate(calls, "s", "colocated_starts_h200.json", "perf/update_weights_pause_time"),
        "sync over NCCL": Rate(nccl[0], "bytes/s", "sync_speed_h200.json", f"4b; {note}"),
        "sync of experts over NCCL": Rate(nccl[1], "bytes/s", "sync_speed_h200.json", f"30b-a3b-6l; {note}"),
        "shared sync": Rate(shared[0], "bytes/s", "colocated_starts_h200.json", f"4b; {note}"),
        "shared sync of experts": Rate(shared[1], "bytes/s", "colocated_starts_h200.json", f"30b-a3b-6l; {note}"),
        "shared sync of shards": Rate(shards[0], "bytes/s", "engine_layouts_h200.json", f"4b, DP 2 to TP 2; {note}"),
        "shared sync of expert shards": Rate(
            shards[1], "bytes/s", "engine_layouts_h200.json", f"30b-a3b-6l, EP 2 to EP 2; {note}"
        ),
    }


def _announced(run: Any) -> tuple[float, float]:
    return run["bytes"], run["medians"]["announced"]["time"]


def _median_sync(run: Any) -> tuple[float, float]:
    return run["bytes"], statistics.median(run["update_weights_time"])


def _bytes(rows: Sequence[Mapping[str, float]]) -> float:
    return max(row.get("perf/update_weights_bytes", 0.0) for row in rows)


def _synced(rows: Sequence[Mapping[str, float]]) -> float:
    found = later(rows, "perf/update_weights_time")
    assert found is not None, "the recorded runs have this metric"
    return found


def fits_training(run: Run) -> bool:
    """Whether computation rates are fitted to a run: on one GPU, without other work on the host."""
    return run.train_s is not None and run.job.world == 1 and "cert" not in run.source and "again" not in run.name


def derive() -> dict[str, Rate]:
    """Returns all rates, derived from the recorded measurements in half a minute."""
    costs.RATES.clear()
    costs.RATES.update(direct())
    for kind, source in ((TRAIN_FIT, ONE_GPU), (DECODE_FIT, ENGINES), (EXCHANGE_FIT, "train_two_gpus_h200.json")):
        costs.RATES.update({k: Rate(value, unit, source, f"fitted: {how}") for k, (value, unit, how) in kind.items()})
    runs = all_runs()
    fit(list(TRAIN_FIT), [run for run in runs if fits_training(run)], "train_s")
    for name in EXCHANGE_FIT:
        fit([name], [run for run in runs if name in run.gives], "train_s")
    generating = [run for run in runs if run.generate_s and "cert" not in run.source and "again" not in run.name]
    fit(list(DECODE_FIT), generating, "generate_s")
    return dict(costs.RATES)


# --- Predictions beside measurements


def rows() -> Iterator[tuple[str, str, float, float, str]]:
    """Yields (run, what, predicted, measured, how independent the prediction is) of every measurement."""
    runs = all_runs()
    for run in runs:
        if run.memory_gb is not None:
            yield run.name, "peak memory, GB", predicted(run, "memory_gb"), run.memory_gb, "no rate"
        if run.train_s is not None:
            yield run.name, "training, s", *_independent(run, runs)
        for what, name in (("generate_s", "generation, s"), ("sync_s", "weight sync, s")):
            if (measured := getattr(run, what)) is not None:
                tests = ("cert", "engine_layouts")
                fitted = not run.source.startswith(tests) and ("again" not in run.name or what == "sync_s")
                yield run.name, name, predicted(run, what), measured, "gives rates" if fitted else "other runs"


def _independent(run: Run, runs: Sequence[Run]) -> tuple[float, float, str]:
    """Predicts a run without the rates that it gives, if another run gives them as well."""
    assert run.train_s is not None, run.name
    if fits_training(run):
        return predicted(run, "train_s"), run.train_s, "gives rates"
    others = [one for one in runs if one is not run and one.gives == run.gives]
    if not run.gives:
        return predicted(run, "train_s"), run.train_s, "other runs"
    if not others:
        return predicted(run, "train_s"), run.train_s, "gives its rate"
    (name,) = run.gives
    before = costs.RATES[name].value
    fit([name], others, "train_s")
    seconds = predicted(run, "train_s")
    set_rate(name, before)
    return seconds, run.train_s, "other runs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="derive the rates again and write them")
    if parser.parse_args().write:
        found = {name: dataclasses.asdict(rate) for name, rate in sorted(derive().items())}
        for one in found.values():
            one["value"] = float(f"{one['value']:.4g}")
        OUT.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    print("| run | what | predicted | measured | difference | rates from |\n|---|---|---|---|---|---|")
    for name, what, seconds, measured, source in rows():
        print(f"| {name} | {what} | {seconds:.3g} | {measured:.3g} | {seconds / measured - 1:+.0%} | {source} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
