"""Shared prefixes of an agent's branches: how much a step computes, and how evenly its ranks divide it.

OMP_NUM_THREADS=1 python -m benchmarks.prefix_trees --out benchmarks/results/prefix_trees.json      seconds, anywhere

No model and no GPU: the trainer's own schedule, packing and split of rows are applied to random token ids, and work is
counted in the operations of a forward pass (the shape of Qwen3-0.6B). The branches of an execution share the prompt and
their first turns; they fork at random turns, and a batch has them in the order of their forks. All layouts have the
same number of tokens per micro-batch, so a context-parallel rank has a smaller limit. Prints a line per tree and
layout.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from slime.core.batch import TrainSample
from slime.data.context_split import split_context
from slime.data.micro_batch_schedule import build_schedule
from slime.data.packing import pack
from slime.data.shared_prefixes import Prefixes
from slime.models import family_of

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
MICRO_BATCH = 16_384
"""Maximum number of tokens in a micro-batch, on all context-parallel ranks together."""
DP_SIZE = 4
TREES: dict[str, dict[str, int]] = {
    "prompt of 2k": {"groups": 8, "executions": 4, "prompt": 2_000, "turns": 6, "forks": 6},
    "prompt of 8k": {"groups": 8, "executions": 4, "prompt": 8_000, "turns": 6, "forks": 6},
    "40 forks": {"groups": 8, "executions": 1, "prompt": 2_000, "turns": 6, "forks": 40},
}
"""Name -> sizes. An execution has one branch of `turns` turns, and one more for each of `forks`; turns have 200 to 900
tokens, and a fork adds one to three turns behind a random turn of a random branch."""
LAYOUTS: dict[str, tuple[int, bool]] = {
    "1 rank": (1, False),
    "2, gathering": (2, False),
    "8, gathering": (8, False),
    "8, by heads": (8, True),
}
"""Name -> number of context-parallel ranks, and whether they split heads (`--cp-comm-type a2a`)."""


def branches(rng: np.random.Generator, *, groups: int, executions: int, prompt: int, turns: int, forks: int) -> Any:
    """Returns the samples of all branches, group by group."""
    made, ids = [], functools.partial(rng.integers, 0, CONFIG["vocab_size"])
    for group in range(groups):
        start = ids(prompt)
        for execution in range(executions):
            own = [[start, *(ids(rng.integers(200, 900)) for _ in range(turns))]]
            for _ in range(forks):
                before = own[rng.integers(len(own))]
                new = [ids(rng.integers(200, 900)) for _ in range(rng.integers(1, 4))]
                own.append([*before[: rng.integers(1, len(before))], *new])
            made += [
                sample(np.concatenate(turns_of), prompt, group, group * executions + execution) for turns_of in own
            ]
    return made


def sample(tokens: Any, prompt: int, group: int, index: int) -> TrainSample:
    """Returns a sample whose response starts behind the prompt."""
    size = len(tokens) - prompt
    return TrainSample(
        tokens=tokens.astype(np.int32),
        loss_mask=np.ones(size, np.float32),
        rollout_log_probs=None,
        token_versions=np.full(size, -1, np.int32),
        reward=0.0,
        group_index=group,
        index=index,
        truncated=False,
    )


def measured(samples: list[TrainSample], cp_size: int, splits_heads: bool, *, shares: bool = True) -> dict[str, Any]:
    """Schedules the samples as one step and counts its work."""
    flops = family_of(CONFIG).flops(CONFIG)
    prefix_cost = functools.partial(flops.forward, num_logits=0)
    cost = [flops.forward(s.num_tokens, num_logits=s.response_length) for s in samples]
    start = time.process_time()
    prefixes = Prefixes.of(samples, replays=False) if shares else None
    (step,) = build_schedule(
        [s.num_tokens for s in samples],
        [s.index for s in samples],
        dp_size=DP_SIZE,
        num_steps=1,
        max_tokens_per_gpu=MICRO_BATCH // cp_size,
        cp_size=cp_size,
        splits_heads=splits_heads,
        balance=True,
        cost_S=cost,
        prefixes=prefixes,
        prefix_cost=prefix_cost,
    ).steps
    seconds = time.process_time() - start
    computed = padded = 0
    work, uneven = [0.0] * DP_SIZE, 1.0
    for rank, micro_batches in enumerate(step.micro_batches):
        for positions in micro_batches:
            shared = None if prefixes is None else prefixes.of_row(positions)
            row = pack([samples[p] for p in positions], pad_each_to=2 * cp_size, shared=shared)
            computed += sum(samples[p].num_tokens for p in positions) - sum(row.num_shared)
            padded += len(row.tokens)
            work[rank] += sum(cost[p] for p in positions) - sum(prefix_cost(n) for n in row.num_shared if n)
            uneven = max(uneven, unevenness(row, cp_size))
    return {
        "micro_batches_per_rank": step.num_micro_batches,
        "computed_tokens": computed,
        "padding": padded / computed - 1,
        "operations": sum(work),
        "busiest_data_parallel_rank": max(work) * DP_SIZE / sum(work),
        "most_over_least_pairs_of_context_parallel_ranks": uneven,
        "schedule_cpu_s": seconds,
    }


def unevenness(row: Any, cp_size: int) -> float:
    """Returns the most pairs of a query and a key on a context-parallel rank, divided by the fewest."""
    pairs = []
    for rank in range(cp_size):
        cut = split_context(row.cu_seqlens, cp_rank=rank, cp_size=cp_size, prefixes=row.prefixes)
        each = zip(cut.query_lengths, cut.key_lengths, strict=True)
        pairs.append(sum(queries * keys - queries * (queries - 1) // 2 for queries, keys in each))
    return max(pairs) / min(pairs)


def run(trees: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    """Measures all trees in all layouts."""
    records = []
    for name, sizes in trees.items():
        samples = branches(np.random.default_rng(0), **sizes)
        groups = [[p for p, s in enumerate(samples) if s.group_index == group] for group in range(sizes["groups"])]
        prefixes = Prefixes.of(samples, replays=False)
        total = sum(s.num_tokens for s in samples)
        shared = sum(one.num_tokens for group in groups for one in prefixes.of_row(group))
        record: dict[str, Any] = {"tree": name, "samples": len(samples), "tokens": total}
        record |= {"tokens_of_trees": total - shared, "without_sharing": measured(samples, 1, False, shares=False)}
        record["layouts"] = {layout: measured(samples, *how) for layout, how in LAYOUTS.items()}
        records.append(record)
        for layout, found in record["layouts"].items():
            print(f"{name}, {layout}: {told(record, found)}", flush=True)
    return records


def told(record: dict[str, Any], found: dict[str, Any]) -> str:
    """Returns one line about a layout."""
    whole, total = record["without_sharing"], record["tokens"]
    return (
        f"{found['computed_tokens'] / total:.3f} of {total} tokens computed (the trees have "
        f"{record['tokens_of_trees'] / total:.3f}), {found['operations'] / whole['operations']:.3f} of the operations, "
        f"{found['micro_batches_per_rank']} micro-batches instead of {whole['micro_batches_per_rank']}, busiest rank "
        f"{found['busiest_data_parallel_rank']:.3f} of the mean, padding {found['padding']:.4f}, context-parallel "
        f"ranks {found['most_over_least_pairs_of_context_parallel_ranks']:.3f}, {found['schedule_cpu_s']:.2f} s"
    )


def main() -> None:
    """Prints a line per tree and layout, and writes all numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    trees = run(TREES)
    if given.out is not None:
        command = f"python -m benchmarks.prefix_trees --out {given.out}"
        record = {"command": command, "micro_batch": MICRO_BATCH, "dp_size": DP_SIZE, "trees": trees}
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
