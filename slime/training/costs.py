"""Predicts the GPU memory of each rank and the seconds of each part of a step, without a GPU, weights or torch.

Memory follows from shapes: the weight table, the parallel sizes and the tensors that a layer keeps for its backward
pass. Seconds are amounts (FLOPs, bytes, kernel launches) divided by rates of `RATES`. The rates were measured on H200s
and name the files of `benchmarks/results` that they come from; `python -m benchmarks.rates` derives them again. Two
were not measured and say so: the network between hosts, and the memory of a communicator.

Left out: what hooks and graders compute, the critic, other policies in host memory, LoRA, vision towers, draft models,
quantised engines, time that only stragglers cause (a longest response, experts with more rows than others), overlapped
communication, host work per batch, checkpoints and evaluation. Linear attention counts as attention without keys, and
a sliding window as full attention in the cache.

Invariants
1. Peak memory is an allocation, as in `slime.training.rehearsal`: what torch reserves beyond it is not included.
2. A prediction uses only `RATES`; nothing is adjusted for a model, a layout or a run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig, num_experts_of
from slime.core.topology import EngineLayout, EngineRank, ParallelSizes
from slime.models import family_of, table_for
from slime.models.common.config import is_sparse
from slime.models.common.flops import TRAIN_FORWARDS, FlopsModel, head_sizes
from slime.models.common.table import EXPERT, FamilyTable, Row
from slime.weights.holding import holdings
from slime.weights.send_plan import NUM_BUFFERS

T = TypeVar("T")
HALF = 2
"""Bytes of an element of weights and activations."""
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Rate:
    value: float
    unit: str
    source: str
    """File in `benchmarks/results`, or why there is none."""
    how: str
    """How the value follows from the source."""


def _rates() -> dict[str, Rate]:
    read = json.loads(Path(__file__).with_name("rates.json").read_text())
    return {name: Rate(**one) for name, one in read.items()}


RATES: dict[str, Rate] = _rates()
"""By name. `python -m benchmarks.rates --write` derives them from the recorded measurements."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU."""

    name: str
    memory_bytes: int
    """What CUDA reports as the device's total memory."""
    bandwidth: float
    """Memory bandwidth of the data sheet, in bytes per second."""


GPUS: Mapping[str, Gpu] = {
    "h200": Gpu("h200", 150_100_000_000, 4.8e12),
    "h100": Gpu("h100", 85_000_000_000, 3.35e12),
}
"""The H100 has the chip of the H200 with slower and smaller memory; its memory rates are scaled by the data sheets."""


@dataclass(frozen=True, eq=False)
class Job:
    """All that a prediction depends on. Equal only to itself, so that results can be cached."""

    hf_config: HfConfig = field(repr=False)
    table: FamilyTable = field(repr=False)
    flops: FlopsModel = field(repr=False)
    gpu: Gpu
    sizes: ParallelSizes
    world: int
    """Training ranks."""
    gpus_per_host: int
    sequence_parallel: bool
    recompute: frozenset[str]
    """"full", or modules of `--recompute-modules`. Empty: nothing is recomputed."""
    max_tokens: int
    """Tokens per rank of the largest micro-batch."""
    chunk_tokens: int
    """Rows of logits in memory at a time; 0 or less: all."""
    state_bytes: float
    """Bytes of optimizer states per parameter, before they are divided by the data-parallel ranks."""
    state_on_host: float
    """Fraction of the optimizer states in host memory."""
    stage_layers: tuple[int, ...]
    """Layers of each pipeline stage."""
    engine: EngineLayout
    num_engines: int
    colocated: bool
    pool_fraction: float
    """Fraction of a GPU for the engine's weights and cache."""
    bucket_bytes: int
    transport: str
    num_samples: int
    """Samples per step."""
    per_prompt: int
    """Samples that share a prompt."""
    prompt_tokens: int
    response_tokens: int
    num_updates: int
    """Optimizer steps per batch."""
    forward_passes: int
    """Passes without gradients over the batch: reference, old log-probs."""
    num_eval_engines: int = 0
    """Engines of `--eval-fleet`, like the others, whose work overlaps with the step."""
    plain: float | None = None
    """FLOP/s of plain products on the machine at hand; None: the rate of `RATES`."""
    known: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What depends on the model alone, shared by all jobs that `dataclasses.replace` makes of one."""

    def once(self, key: Any, compute: Callable[[], T]) -> T:
        """Returns a value that depends on nothing but the model and `key`; computes it once."""
        if key not in self.known:
            self.known[key] = compute()
        found: T = self.known[key]
        return found

    @property
    def dp(self) -> int:
        return self.sizes.dp(self.world)

    @property
    def expert_dp(self) -> int:
        return self.world // (self.sizes.ep * self.sizes.pp)

    @property
    def num_layers(self) -> int:
        return self.table.sizes.num_layers

    def layers_of(self, stage: int) -> slice:
        """Returns the numbers of the layers of a pipeline stage."""
        begin = sum(self.stage_layers[:stage])
        return slice(begin, begin + self.stage_layers[stage])

    @property
    def sample_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    def with_sizes(self, sizes: ParallelSizes, **changes: Any) -> Job:
        """Returns the same job in a different layout with equal stages."""
        layers = stage_layers(self.num_layers, sizes.pp)
        return dataclasses.replace(self, sizes=sizes, stage_layers=layers, **changes)


def stage_layers(num_layers: int, stages: int, first: int | None = None, last: int | None = None) -> tuple[int, ...]:
    """Returns the layers of each stage. The stages between `first` and `last` are equal, as Megatron requires.

    If neither is given and the layers do not divide, the last stage has fewer than the others; it may have none, or a
    negative number, if there are too many stages.
    """
    if first is None and last is None and num_layers % stages:
        last = num_layers - -(-num_layers // stages) * (stages - 1)
    fixed = [n for n in (first, last) if n is not None]
    middle = stages - len(fixed)
    rest = [(num_layers - sum(fixed)) // middle] * middle if middle else []
    return (*([] if first is None else [first]), *rest, *([] if last is None else [last]))


# --- Memory of a training rank


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters that a rank holds."""

    dense: float
    experts: float
    untrained_bytes: float = 0.0

    @property
    def trained(self) -> float:
        return self.dense + self.experts


def _size(row: Row) -> int:
    return sum(map(math.prod, row.shapes))


@dataclass(frozen=True, slots=True)
class RowSums:
    """Elements of some rows of the weight table."""

    split: int = 0
    """Split over tensor-parallel ranks."""
    whole: int = 0
    experts: int = 0
    """All experts of a layer."""
    untrained_bytes: int = 0

    @classmethod
    def of(cls, rows: Iterable[Row], num_experts: int) -> RowSums:
        split = whole = experts = untrained = 0
        for row in rows:
            if EXPERT in row.megatron:
                experts += _size(row) * num_experts
            elif not row.trained:
                untrained += _size(row) * (4 if row.wide else HALF)
            elif row.dim is None:
                whole += _size(row)
            else:
                split += _size(row)
        return cls(split, whole, experts, untrained)


def stage_parameters(job: Job, stage: int) -> Parameters:
    """Returns the parameters of a rank of a pipeline stage. A tied output layer is a second tensor on the last one."""
    table, num_experts = job.table, num_experts_of(job.hf_config)
    layers = job.once("layers", lambda: [RowSums.of(rows, num_experts) for rows in table.layers])
    held = list(layers[job.layers_of(stage)])
    last = stage == job.sizes.pp - 1
    if stage == 0 or (last and table.tied):
        held.append(job.once("before", lambda: RowSums.of(table.before, num_experts)))
    if last:
        held.append(job.once("after", lambda: RowSums.of((*table.after, *table.mtp), num_experts)))
    dense = sum(one.whole + one.split / job.sizes.tp for one in held)
    experts = sum(one.experts for one in held) / job.sizes.ep
    return Parameters(dense, experts, sum(one.untrained_bytes for one in held))


def shard(job: Job, parameters: Parameters) -> float:
    """Returns how many of its parameters a rank optimizes: the optimizer divides them among data-parallel ranks."""
    return parameters.dense / (job.dp * job.sizes.cp) + parameters.experts / job.expert_dp


@dataclass(frozen=True, slots=True)
class LayerElements:
    """Elements per token of one layer that a rank keeps for the backward pass."""

    hidden: float
    """The input of the layer."""
    norms: float
    """The input of the MLP, and the outputs of norms."""
    attention: float
    mlp: float
    gathered: float
    """Keys and values of other context-parallel ranks."""

    @property
    def total(self) -> float:
        return self.hidden + self.norms + self.attention + self.mlp + self.gathered

    def kept(self, recompute: frozenset[str]) -> float:
        """Returns the elements that stay until the backward pass."""
        if "full" in recompute:
            return self.hidden
        attention = 0.5 if "core_attn" in recompute else 1.0
        mlp = 0.0 if recompute & {"mlp", "moe"} else 1.0
        norms = 0.0 if "layernorm" in recompute else 1.0
        return (
            self.hidden + norms * self.norms + attention * self.attention + mlp * self.mlp + attention * self.gathered
        )


@functools.lru_cache(4096)
def stage_elements(job: Job, stage: int) -> tuple[LayerElements, ...]:
    """Returns `layer_elements` of the layers of a stage."""
    kinds = sparse_kinds(job)
    elements = {sparse: layer_elements(job, kinds.index(sparse)) for sparse in set(kinds)}
    return tuple(elements[sparse] for sparse in kinds[job.layers_of(stage)])


def sparse_kinds(job: Job) -> list[bool]:
    """Returns which layers have experts."""
    return job.once("sparse", lambda: [is_sparse(job.hf_config, layer) for layer in range(job.num_layers)])


def layer_elements(job: Job, layer: int) -> LayerElements:
    """Returns what a rank keeps of a layer, in elements of the training dtype per token of its micro-batch."""
    config, tp, cp = job.hf_config, job.sizes.tp, job.sizes.cp
    hidden = int(config["hidden_size"]) / (tp if job.sequence_parallel else 1)
    if config.get("kv_lora_rank"):
        heads = int(config["num_attention_heads"]) / tp
        nope, rope, value = (int(config[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        latent = 2.0 * (int(config.get("q_lora_rank") or 0) + int(config["kv_lora_rank"]) + rope)
        query = nope + rope
        attention = latent + heads * (2 * query + (nope + value) + query + 2 * value)
        keys = heads * 2 * query  # values are padded to the size of a key
    else:
        num_heads, num_kv_heads, size = head_sizes(config)
        heads, key = num_heads * size / tp, num_kv_heads * size / min(tp, num_kv_heads)
        attention = (heads + 2 * key) + (heads + key) + heads
        keys = 2 * key
    return LayerElements(hidden, 3 * hidden, attention, _mlp_elements(job, layer), keys * cp if cp > 1 else 0.0)


def _mlp_elements(job: Job, layer: int) -> float:
    config, tp = job.hf_config, job.sizes.tp
    if not is_sparse(config, layer):
        return 3.0 * int(config["intermediate_size"]) / tp
    hidden, size = int(config["hidden_size"]), int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0) * size + int(config.get("shared_expert_intermediate_size") or 0)
    rows = int(config["num_experts_per_tok"]) * (hidden + 3 * size) / tp
    router = 3 * (4 / HALF) * num_experts_of(config) / tp
    return rows + router + 3.0 * shared / tp


@dataclass(frozen=True, slots=True)
class Memory:
    """GPU memory of one rank, in bytes."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def under_way(sizes: ParallelSizes, stage: int) -> float:
    """Returns how many micro-batches a stage holds activations of, in whole stages (1F1B, or interleaved)."""
    left = sizes.pp - stage
    if sizes.vp == 1:
        return left
    return (2 * (left - 1) + (sizes.vp - 1) * sizes.pp + 1) / sizes.vp


def activation_bytes(job: Job, stage: int) -> float:
    """Returns the bytes that a micro-batch of the largest size keeps on a rank of a stage."""
    return HALF * job.max_tokens * sum(one.kept(job.recompute) for one in stage_elements(job, stage))


def training_memory(job: Job, stage: int) -> Memory:
    """Returns the peak memory of a rank of a stage while it trains on micro-batches of the largest size."""
    parameters = stage_parameters(job, stage)
    largest = max(stage_elements(job, stage), key=lambda one: one.total)
    held = under_way(job.sizes, stage)
    again = largest.total - largest.kept(job.recompute) if job.recompute else 0.0
    backward = HALF * job.max_tokens * max(largest.mlp, largest.attention)
    rows = job.chunk_tokens if job.chunk_tokens > 0 else job.max_tokens
    vocab = job.table.sizes.vocab_size / job.sizes.tp
    logits = 2.0 * HALF * min(rows, job.max_tokens) * vocab if stage == job.sizes.pp - 1 else 0.0
    return Memory(
        {
            "weights": HALF * parameters.trained + parameters.untrained_bytes,
            "gradients": 4.0 * parameters.trained,
            "optimizer states": job.state_bytes * shard(job, parameters) * (1.0 - job.state_on_host),
            "activations": held * activation_bytes(job, stage),
            "recomputed layer": HALF * job.max_tokens * again,
            "logits or gradients of a layer": max(logits, backward),
        }
    )


def fixed_memory(job: Job) -> Memory:
    """Returns what a training process keeps besides the tensors of training: the CUDA context, kernels, workspaces,
    communicators and, if it does not lend its GPU, the buckets of the weight sync and what fills them."""
    s = job.sizes
    groups = sum(n > 1 for n in (s.tp, s.cp, s.pp, s.ep, job.dp, job.expert_dp)) + (job.world > 1)
    kept = {"CUDA context": RATES["context"].value, "NCCL": groups * RATES["communicator"].value}
    if not job.colocated:
        kept["buckets of the weight sync"] = float((NUM_BUFFERS + 1) * job.bucket_bytes)
    return Memory(kept)


def host_memory(job: Job, stage: int) -> float:
    """Returns the pinned host memory of a rank: what it gives away while engines use its GPU, or offloads."""
    found = training_memory(job, stage).parts
    states = job.state_bytes * shard(job, stage_parameters(job, stage))
    away = found["weights"] + found["optimizer states"] if job.colocated else 0.0
    return away + states * job.state_on_host


# --- Memory of an engine


def engine_weight_bytes(job: Job) -> float:
    """Returns the weights of the engine rank that holds most."""
    return job.once(("engine", job.engine), lambda: _engine_weight_bytes(job))


def _engine_weight_bytes(job: Job) -> float:
    held: dict[EngineRank, float] = {}
    for entries in job.table.resident.values():
        sizes = list(accumulate((_size(entry.row) for entry in entries), initial=0))
        for rank, _, holding in holdings(job.table, entries, job.engine):
            own = holding.experts or range(len(entries))
            size = sizes[own.stop] - sizes[own.start]
            wide = 4 if entries[0].row.wide else HALF
            held[rank] = held.get(rank, 0.0) + wide * size / holding.share.parts
    return max(held.values())


def cache_bytes_per_token(job: Job) -> float:
    """Returns the bytes of keys and values per token on one engine rank."""
    config, layout = job.hf_config, job.engine
    kinds = config.get("layer_types") or ["full_attention"] * job.num_layers
    layers = sum(kind != "linear_attention" for kind in kinds) / layout.pp_size
    if config.get("kv_lora_rank"):
        return HALF * layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
    _, kv_heads, size = head_sizes(config)
    return HALF * layers * 2 * size * kv_heads / min(layout.attention_tp_size, kv_heads)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    weights: float
    cache: float
    """Bytes left for keys and values on a rank."""
    tokens: int
    """Tokens whose keys and values fit in an engine."""
    fixed: float
    """CUDA context, graphs and workspaces."""


def engine_memory(job: Job) -> EngineMemory:
    weights, fixed = engine_weight_bytes(job), RATES["engine context"].value
    cache = job.gpu.memory_bytes * job.pool_fraction - weights
    tokens = job.engine.dp_size * max(0.0, cache) / cache_bytes_per_token(job)
    return EngineMemory(weights, max(0.0, cache), int(tokens), fixed)


def typical_stages(job: Job) -> list[int]:
    """Returns the stages among which the largest and the slowest one is: those between them hold less."""
    last = job.sizes.pp - 1
    return sorted({0, min(1, last), max(last - 1, 0), last})


def worst_stage(job: Job) -> int:
    return max(typical_stages(job), key=lambda stage: training_memory(job, stage).total)


def sync_memory(job: Job, stage: int) -> float:
    """Returns the tensors on a shared GPU during a weight sync, as in `slime.training.state.sleeping`."""
    engine, weights = engine_weight_bytes(job), training_memory(job, stage).parts["weights"]
    return weights + NUM_BUFFERS * min(job.bucket_bytes, engine) + engine


# --- Seconds of training


@dataclass(frozen=True, slots=True)
class Work:
    """A batch, summed over all data-parallel ranks."""

    tokens: float
    logits: float
    """Positions with a log-prob."""
    length: float
    """Mean length of the sequence that a token is in."""
    micro_batches: int
    """On each data-parallel rank, over all optimizer steps."""

    @classmethod
    def of(cls, job: Job) -> Work:
        """Returns the work of a step in which all samples have the mean length."""
        length, samples = job.sample_tokens, -(-job.num_samples // job.dp)
        each = max(1, job.max_tokens * job.sizes.cp // length)
        updates = max(1, job.num_updates)
        micro_batches = updates * math.ceil(math.ceil(samples / updates) / each)
        return cls(float(job.num_samples * length), float(job.num_samples * job.response_tokens), length, micro_batches)


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of one part of a step, with the rates that they come from."""

    name: str
    seconds: float
    rates: tuple[str, ...] = ()
    within: bool = False
    """Whether the part above contains these seconds."""


def _rate(name: str) -> float:
    return RATES[name].value


def plain_products(job: Job) -> float:
    return job.plain or _rate("plain products")


def expert_flops(config: HfConfig, num_layers: int) -> float:
    """Returns the FLOPs per token of a forward pass through all routed experts."""
    size = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
    each = 6.0 * int(config["hidden_size"]) * size * int(config.get("num_experts_per_tok") or 0)
    return each * sum(is_sparse(config, layer) for layer in range(num_layers))


def sparse_layers(job: Job, stage: int) -> int:
    """Returns the number of layers with experts in a stage."""
    return sum(sparse_kinds(job)[job.layers_of(stage)])


def stage_seconds(job: Job, stage: int, work: Work, *, gradients: bool = True) -> float:
    """Returns the seconds that a rank of a stage computes for a whole batch, without waiting for other ranks."""
    share, last = job.stage_layers[stage] / job.num_layers, stage == job.sizes.pp - 1
    again = 1.0 if gradients and "full" in job.recompute else 0.0
    passes = TRAIN_FORWARDS + again if gradients else 1.0
    tokens = work.tokens / (job.dp * job.sizes.cp)
    split = tokens * share / job.sizes.tp * passes
    experts = job.once("expert FLOPs", lambda: expert_flops(job.hf_config, job.num_layers))
    pairs = (job.flops.forward(round(work.length), num_logits=0) / work.length) - job.flops.per_token
    logits = work.logits / (job.dp * job.sizes.cp) if last else 0.0
    head = job.flops.per_logit * logits / job.sizes.tp * (TRAIN_FORWARDS + 1.0 if gradients else 1.0)
    elements = sum(one.total for one in stage_elements(job, stage))
    moved = HALF * (elements * tokens * passes + job.table.sizes.vocab_size / job.sizes.tp * logits * passes)
    plain = plain_products(job)
    gpu = (
        ((job.flops.per_token - experts) * split + head) / (plain * _rate("products"))
        + experts * split / (plain * _rate("expert products"))
        + pairs * split / (plain * _rate("attention"))
        + moved / TRAIN_FORWARDS * _rate("passes over activations") / job.gpu.bandwidth
    )
    sparse = sparse_layers(job, stage)
    split_experts = sparse * _rate("expert layers under TP") if job.sizes.tp > 1 else 0.0
    launches = job.stage_layers[stage] * _rate("launches of a layer") + split_experts
    host = work.micro_batches * launches * passes / TRAIN_FORWARDS
    return float((gpu**JOIN + host**JOIN) ** (1 / JOIN))


JOIN = 4
"""Launches hide behind kernels unless both take equally long: the larger time counts, a little more where they meet."""


def link(job: Job, extent: int) -> float:
    """Returns the bytes per second between ranks of a group whose members lie within `extent` consecutive ranks."""
    return _rate("link") if extent <= job.gpus_per_host else _rate("network")


def exchange_seconds(job: Job, stage: int, work: Work, *, gradients: bool = True) -> dict[str, float]:
    """Returns the seconds of the collectives inside the passes, by kind. They do not overlap with computation."""
    config, s = job.hf_config, job.sizes
    layers, sparse = job.stage_layers[stage], sparse_layers(job, stage)
    tokens, hidden = work.tokens / (job.dp * s.cp), HALF * int(config["hidden_size"])
    passes = (3.0 if "full" in job.recompute else 2.0) if gradients else 1.0
    out: dict[str, float] = {}
    if s.tp > 1:
        reductions = passes * (2 * layers - sparse)  # experts are not split
        sent = reductions * tokens * hidden * 2 * (s.tp - 1) / s.tp
        out["TP"] = sent / (link(job, s.tp) * _rate("all-reduce"))
    if s.cp > 1:
        keys = HALF * max(one.gathered for one in stage_elements(job, stage))
        if config.get("kv_lora_rank"):  # ranks gather latents, and each computes keys and values from them
            keys = HALF * s.cp * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
        out["CP"] = passes * layers * tokens * keys * (s.cp - 1) / s.cp / link(job, s.tp * s.cp)
    if s.ep > 1 and sparse:
        rows = tokens / s.tp * int(config["num_experts_per_tok"])
        sent = 2 * passes * sparse * rows * hidden * (s.ep - 1) / s.ep
        out["EP"] = sent / (link(job, s.ep) * _rate("all-to-all"))
    if s.pp > 1:
        boundary = tokens * hidden / (s.tp if job.sequence_parallel else 1)
        out["PP"] = (2.0 if gradients else 1.0) * s.vp * boundary / link(job, job.world)
    return out


def update_seconds(job: Job, stage: int) -> dict[str, float]:
    """Returns the seconds of one optimizer step: sums of gradients, and the update of this rank's shard."""
    found, s = stage_parameters(job, stage), job.sizes
    dense_ranks = job.dp * s.cp
    sent = (4.0 + HALF) * (
        found.dense * (dense_ranks - 1) / dense_ranks + found.experts * (job.expert_dp - 1) / job.expert_dp
    )
    own = shard(job, found)
    extent = max(s.tp * dense_ranks, s.ep * job.expert_dp)
    touched = GRADIENT_TRAFFIC * found.trained + (2 * job.state_bytes + HALF) * own
    on_host = 2 * HALF * 2 * own * job.state_on_host / _rate("host link")
    out = {"optimizer": touched / (job.gpu.bandwidth * _rate("optimizer")) + on_host}
    return out | ({"DP": sent / link(job, extent)} if sent else {})


GRADIENT_TRAFFIC = 16.0
"""Bytes per parameter: gradients are cleared twice, measured and read."""


def train_parts(job: Job, work: Work | None = None) -> list[Part]:
    """Returns the parts of training on one batch: passes without gradients, the training pass, updates."""
    work = work or Work.of(job)
    out = []
    if job.forward_passes:
        seconds = job.forward_passes * _pipelined(job, work, gradients=False)
        out.append(Part("log-probs before the update", seconds, COMPUTE_RATES))
    slowest = _slowest(job, work, gradients=True)
    compute = stage_seconds(job, slowest, work)
    exchanges = exchange_seconds(job, slowest, work)
    bubble = _bubble(job, work)
    updates = {k: v * job.num_updates for k, v in update_seconds(job, _heaviest(job)).items()}
    out.append(Part("computation", compute, COMPUTE_RATES))
    out += [Part(EXCHANGES[kind], seconds, _rates_of(job, kind)) for kind, seconds in exchanges.items()]
    if bubble:
        out.append(Part("pipeline bubble", bubble * (compute + sum(exchanges.values()))))
    if "DP" in updates:
        out.append(Part(EXCHANGES["DP"], updates["DP"], _rates_of(job, "DP")))
    out.append(Part("optimizer", updates["optimizer"], ("optimizer",)))
    return [*out, Part("preparation on the host", _rate("train call"), ("train call",))]


COMPUTE_RATES = (
    *("plain products", "products", "expert products", "attention"),
    *("passes over activations", "launches of a layer"),
)
EXCHANGES = {
    "TP": "tensor-parallel reductions",
    "CP": "keys and values of context parallelism",
    "EP": "tokens to experts and back",
    "PP": "hidden states between stages",
    "DP": "sums of gradients, new weights",
}


def _rates_of(job: Job, kind: str) -> tuple[str, ...]:
    s = job.sizes
    extent = {"TP": s.tp, "CP": s.tp * s.cp, "EP": s.ep, "PP": job.world, "DP": job.world}[kind]
    wire = "link" if extent <= job.gpus_per_host else "network"
    return (wire, *{"TP": ("all-reduce",), "EP": ("all-to-all",)}.get(kind, ()))


def _bubble(job: Job, work: Work) -> float:
    """Returns the idle time of a pipeline, as a fraction of its computation."""
    return (job.sizes.pp - 1) / job.sizes.vp / max(work.micro_batches, 1) * max(1, job.num_updates)


def _stage_total(job: Job, stage: int, work: Work, *, gradients: bool) -> float:
    exchanges = exchange_seconds(job, stage, work, gradients=gradients)
    return stage_seconds(job, stage, work, gradients=gradients) + sum(exchanges.values())


def _slowest(job: Job, work: Work, *, gradients: bool) -> int:
    return max(typical_stages(job), key=lambda stage: _stage_total(job, stage, work, gradients=gradients))


def _heaviest(job: Job) -> int:
    return max(typical_stages(job), key=lambda stage: stage_parameters(job, stage).trained)


def _pipelined(job: Job, work: Work, *, gradients: bool) -> float:
    stage = _slowest(job, work, gradients=gradients)
    return _stage_total(job, stage, work, gradients=gradients) * (1.0 + _bubble(job, work))


def train_seconds(job: Job, work: Work | None = None) -> float:
    return sum(part.seconds for part in train_parts(job, work))


# --- Seconds of generation


def decode_seconds(job: Job, requests: float, context: float) -> float:
    """Returns the seconds of one decoding step of an engine with `requests` running requests of `context` tokens."""
    layout, config = job.engine, job.hf_config
    weights = engine_weight_bytes(job)
    num_experts = num_experts_of(config)
    if num_experts:
        chosen = int(config["num_experts_per_tok"])
        all_experts = num_bytes_of(job)[1] / HALF
        untouched = (1.0 - chosen / num_experts) ** requests
        weights -= HALF * all_experts / layout.num_ranks * untouched
    cache = requests / layout.dp_size * context * cache_bytes_per_token(job)
    moved = (weights / _rate("decode weights") + cache / _rate("decode cache")) / job.gpu.bandwidth
    flops = (job.flops.per_token + job.flops.per_logit) * requests / layout.num_ranks
    products = flops / (plain_products(job) * _rate("products"))
    exchanges = 0.0
    if layout.tp_size > 1:
        reductions = 2 * job.num_layers / layout.pp_size
        exchanges = reductions * 2 * requests * HALF * int(config["hidden_size"]) / link(job, layout.tp_size)
    # A token passes through all stages of a pipeline, one after the other.
    own = job.num_layers * _rate("decode launches of a layer") + requests / layout.dp_size * _rate("decode request")
    return (max(moved, products) + exchanges) * layout.pp_size + own


def generate_parts(job: Job) -> list[Part]:
    """Returns the parts of a rollout in which every response has `response_tokens` tokens."""
    each = -(-job.num_samples // job.num_engines)
    memory, layout = engine_memory(job), job.engine
    fitting = max(1, memory.tokens // job.sample_tokens)
    running = min(each, fitting)
    waves = each / running
    context = job.prompt_tokens + job.response_tokens / 2
    step = decode_seconds(job, running, context)
    decode = waves * job.response_tokens * step
    prompts = -(-each // job.per_prompt)
    pairs = job.flops.forward(job.prompt_tokens, num_logits=1)
    prefill = prompts * pairs / layout.num_ranks / (plain_products(job) * _rate("prefill"))
    rates = ("decode weights", "decode cache", "decode launches of a layer", "decode request")
    return [
        Part("prefill", prefill, ("plain products", "prefill")),
        Part("decode", decode, rates),
    ]


# --- Seconds of weight syncs and of hand-overs


def num_bytes_of(job: Job) -> tuple[float, float]:
    """Returns the bytes of all weights, and those of routed experts among them."""

    def compute() -> tuple[float, float]:
        rows = (*job.table.before, *(row for layer in job.table.layers for row in layer), *job.table.after)
        found = RowSums.of(rows, num_experts_of(job.hf_config))
        return HALF * (found.split + found.whole + found.experts) + found.untrained_bytes, HALF * float(found.experts)

    return job.once("bytes", compute)


def sync_parts(job: Job) -> list[Part]:
    """Returns the verified weight sync. Stages send one after the other, so all bytes of the model count."""
    num_bytes, of_experts = num_bytes_of(job)
    dense = num_bytes - of_experts
    several = job.world > 1 or job.engine.num_ranks > 1
    if job.transport == "distributed":
        names = ("sync over NCCL", "sync of experts over NCCL")
    else:
        names = SHARED_SHARDS if several else SHARED
    seconds = dense / _rate(names[0]) + of_experts / _rate(names[1])
    used = names if of_experts else names[:1]
    return [Part("weight sync", seconds + _rate("sync calls"), (*dict.fromkeys(used), "sync calls"))]


SHARED = ("shared sync", "shared sync of experts")
SHARED_SHARDS = ("shared sync of shards", "shared sync of expert shards")


def hand_over_parts(job: Job) -> list[Part]:
    """Returns the copies between GPU and host by which trainer and engines take turns on their GPUs."""
    if not job.colocated:
        return []
    stage = _heaviest(job)
    parts = training_memory(job, stage).parts
    weights, states = parts["weights"], parts["optimizer states"]
    speed = _rate("host link")
    return [
        Part("trainer takes its memory", (weights + states) / speed, ("host link",)),
        Part("trainer gives its memory away", (weights + states) / speed, ("host link",)),
        Part("engine gives its memory away", _rate("engine release"), ("engine release",)),
    ]


def step_parts(job: Job) -> dict[str, list[Part]]:
    """Returns all parts of a step by phase."""
    return {
        "generate": generate_parts(job),
        "train": train_parts(job),
        "sync": [*hand_over_parts(job), *sync_parts(job)],
    }


def seconds_of(parts: Sequence[Part]) -> float:
    return sum(part.seconds for part in parts)


def check_sizes(job: Job) -> str | None:
    """Returns why a layout cannot exist, or None."""
    s, config, sizes = job.sizes, job.hf_config, job.table.sizes
    if job.world % (s.tp * s.pp * s.cp) or job.world % (s.ep * s.pp):
        return "the sizes do not divide the training GPUs"
    if sizes.num_heads % s.tp or (not config.get("kv_lora_rank") and sizes.num_kv_heads % s.tp):
        return "TP does not divide the heads"
    if s.ep > 1 and (not sizes.num_experts or sizes.num_experts % s.ep):
        return "EP does not divide the experts"
    if min(stage_layers(job.num_layers, s.pp)) < 1:
        return "there are too many stages for the layers"
    return None


def job_of(hf_config: HfConfig, **known: Any) -> Job:
    """Returns a job. `known`: fields of `Job`; the stages are equal unless `stage_layers` is given.

    Raises `ConfigError` if the model is not supported.
    """
    table = table_for(hf_config)
    pp = known["sizes"].pp
    if pp > table.sizes.num_layers:
        raise ConfigError(f"{pp} pipeline stages are more than the {table.sizes.num_layers} layers; use fewer")
    known.setdefault("stage_layers", stage_layers(table.sizes.num_layers, pp))
    return Job(hf_config=hf_config, table=table, flops=family_of(hf_config).flops(hf_config), **known)
