"""Experts that a real engine chose are the ones that the trainer uses, token by token and layer by layer (R3)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from slime.core.batch import TrainBatch, TrainSample
from slime.core.routed_experts import ExpertFormat
from slime.core.sample import Sample
from slime.core.topology import ONE_RANK
from slime.rollout.client.call import Generation
from slime.rollout.client.engine_client import REQUEST_SCOPE, EngineClient, RequestScope
from slime.serving.control import HttpEngineControl
from slime.serving.leased_ports import request
from slime.serving.server import SGLangServer
from tests.support.engine_state import relabel
from tests.support.engines import serving, spec_of
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training_ranks import run_layouts

pytestmark = pytest.mark.slow  # an engine of its own; tests/unit/models/test_routing_replay.py is quick
LAYERS, EXPERTS, TOPK = 4, 16, 4
SIZES = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOPK}
FORMAT = ExpertFormat(EXPERTS, TOPK, sparse=(True,) * LAYERS)
NUM, LENGTH = 24, 48
PARAMS = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe", **SIZES)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """An engine that records, at version 1."""
    spec = spec_of(checkpoint, extra={"enable_return_routed_experts": True}, token_versions=True)
    with serving(spec, tmp_path_factory.mktemp("engine")) as made:
        relabel(made.url, 1)
        yield made


@pytest.fixture(scope="module")
def url(server: SGLangServer) -> str:
    """Where it is."""
    return server.url


def asking(url: str, work: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        client = EngineClient(url, request_timeout_s=300, experts=FORMAT)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


async def extend(client: EngineClient, sample: Sample, num: int) -> Generation:
    """As the default generation does it."""
    known, params = sample.rollout_routed_experts, {**PARAMS, "max_new_tokens": num}
    start = 0 if known is None else known.end
    made = await client.generate(sample.tokens, params, experts_from=start, returns_partial=True)
    append(sample, made)
    return made


def append(sample: Sample, made: Generation) -> None:
    sample.append_response_tokens(
        made.tokens,
        log_probs=made.log_probs,
        weight_version=made.weight_version,
        routed_experts=made.routed_experts,
    )


def sampled(url: str, num: int, length: int) -> TrainBatch:
    """`num` responses of `length` tokens, through the client."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 100, int(rng.integers(2, 30))).tolist() for _ in range(num)]
    samples = [Sample(group_index=i // 2, index=i, tokens=ids) for i, ids in enumerate(prompts)]

    async def work(client: EngineClient) -> None:
        await asyncio.gather(*(extend(client, s, length) for s in samples))

    asking(url, work)
    made = tuple(TrainSample.from_sample(s, reward=float(rng.normal())) for s in samples)
    return TrainBatch(rollout_id=0, samples=made)


@pytest.fixture(scope="module")
def batch(url: str) -> TrainBatch:
    """Of more than 1,000 sampled tokens."""
    return sampled(url, NUM, LENGTH)


def test_every_token_but_the_last_has_its_experts(batch: TrainBatch) -> None:
    for s in batch.samples:
        assert s.routed_experts is not None and s.routed_experts.dtype == np.uint8
        assert s.routed_experts.shape == (s.num_tokens - 1, LAYERS, TOPK)
        assert (np.diff(np.sort(s.routed_experts, -1).astype(int), axis=-1) > 0).all(), "an expert twice"
    every = np.concatenate([s.routed_experts for s in batch.samples if s.routed_experts is not None])
    assert (every.std(axis=0) > 0).all(), "all tokens went one way"


def test_parts_of_a_sample_join(server: SGLangServer, url: str) -> None:
    """A turn, a tool's answer, an interrupted turn and the rest of it; the whole, read at once, goes the same way."""

    async def interrupted(client: EngineClient, sample: Sample) -> None:
        scope = RequestScope()
        token = REQUEST_SCOPE.set(scope)
        running = asyncio.create_task(extend(client, sample, 600))
        REQUEST_SCOPE.reset(token)
        async with aclosing(client.stream([2, 40], {**PARAMS, "max_new_tokens": 20})) as parts:
            async for _ in parts:
                pass
        await client.abort_scope(scope)
        made = await running
        assert made.finish_reason == "abort" and 0 < len(made.tokens) < 600

    async def work(client: EngineClient) -> tuple[Sample, Generation]:
        sample = Sample(group_index=0, index=0, tokens=[2, 50, 51, 52])
        await extend(client, sample, 20)
        sample.append_response_tokens([60, 61, 62])
        assert sample.rollout_routed_experts is not None and sample.rollout_routed_experts.end == 23
        await interrupted(client, sample)
        await extend(client, sample, 10)
        request("POST", f"{server.url}/flush_cache", timeout_s=60)
        again = await client.generate(sample.tokens, {**PARAMS, "max_new_tokens": 1})
        assert again.cached_tokens == 0, "nothing is left of what was recorded"
        return sample, again

    sample, again = asking(url, work)
    known = sample.rollout_routed_experts
    assert known is not None and known.recorded.all() and known.end == len(sample.tokens) - 1
    assert np.array_equal(np.sort(again.routed_experts.ids[: known.end], -1), np.sort(known.ids, -1))


def test_the_last_part_of_a_stream_has_all_experts(url: str) -> None:
    async def work(client: EngineClient) -> Sample:
        sample = Sample(group_index=0, index=0, tokens=[2, 50, 51, 52])
        async with aclosing(client.stream(sample.tokens, {**PARAMS, "max_new_tokens": 20})) as parts:
            async for part in parts:
                append(sample, part)
        return sample

    sample = asking(url, work)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.end == len(sample.tokens) - 1 == 23


class Weights:
    """Two models, one of odd and one of even versions: syncs them to the engine, and says how transformers routes."""

    def __init__(self, url: str, checkpoint: Path, folder: Path) -> None:
        self._control = HttpEngineControl(url, ONE_RANK, 60.0)
        self._paths = (write_tiny_model(folder, "qwen3_moe", seed=1, **SIZES), checkpoint)
        self._models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in self._paths]
        self.version = 1

    def sync(self, mode: str, version: int | None = None) -> None:
        """The next version, as `weights.sync` does it."""
        self.version = version or self.version + 1
        self._control.pause(mode)
        if mode == "abort":
            self._control.flush_cache()
        path = str(self._paths[self.version % 2])
        self._control.update_weights_from_disk(model_path=path, flush_cache=False, weight_version=self.version)
        self._control.resume()

    @torch.no_grad()
    def read(self, version: int, ids: list[int], past: Any) -> tuple[Any, Any]:
        """What a version computes of tokens: the sets of experts [T, L, EXPERTS], the log-probs [T, vocabulary]."""
        model = self._models[version % 2]
        out = model(torch.tensor([ids]), past_key_values=past, use_cache=True, output_router_logits=True)
        chosen = torch.stack(out.router_logits, 1).topk(TOPK).indices
        return torch.zeros(len(ids), LAYERS, EXPERTS, dtype=torch.bool).scatter_(2, chosen, True), out.logits[0]

    def expected(self, sample: Sample, keeps_cache: bool) -> tuple[Any, Any]:
        """[T-1, L, EXPERTS] experts of the pass that sampled the token behind, and the log-probs of that token.

        `keeps_cache`: keys and values are those of the version that read a token first, not read again by newer ones.
        """
        ids, first = sample.tokens, sample.prompt_length
        versions = [(sample.token_versions or [])[max(0, i + 1 - first)] for i in range(len(ids) - 1)]
        if keeps_cache:
            cache, parts, start = DynamicCache(), list[Any](), 0
            for version, run in itertools.groupby(versions):
                end = start + len(list(run))
                parts.append(self.read(version, ids[start:end], cache))
                start = end
            experts, logits = (torch.cat(part) for part in zip(*parts, strict=True))
        else:
            whole = {version: self.read(version, ids[:-1], DynamicCache()) for version in set(versions)}
            experts, logits = (
                torch.stack([whole[version][part][i] for i, version in enumerate(versions)]) for part in (0, 1)
            )
        return experts, logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[first - 1 :, 0]


@pytest.fixture(scope="module")
def weights(url: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weights]:
    made = Weights(url, checkpoint, tmp_path_factory.mktemp("even"))
    yield made
    made.sync("abort", 1)


async def _streamed(client: EngineClient, sample: Sample, num: int) -> None:
    """As a function does that reads the answer as it comes."""
    known = sample.rollout_routed_experts
    asked = {"experts_from": 0 if known is None else known.end, "returns_partial": True}
    async with aclosing(client.stream(list(sample.tokens), {**PARAMS, "max_new_tokens": num}, **asked)) as parts:
        async for part in parts:
            append(sample, part)


async def _paused(client: EngineClient, weights: Weights, scope: RequestScope) -> None:
    """The default: requests end, and go on behind their tokens."""
    await client.pause()
    await asyncio.to_thread(weights.sync, "abort")
    client.resume()


async def _next_step(client: EngineClient, weights: Weights, scope: RequestScope) -> None:
    """A partial rollout: requests come back with what they have, and are continued by others."""
    await client.abort_scope(scope)
    await asyncio.to_thread(weights.sync, "abort")


async def _engine_lost(client: EngineClient, weights: Weights, scope: RequestScope) -> None:
    """What an engine has recorded goes with it; another one begins with newer weights."""
    [url] = client.engines()
    client.dismiss([url])
    await asyncio.to_thread(weights.sync, "abort")
    client.admit([url])


async def _retracted(client: EngineClient, weights: Weights, scope: RequestScope) -> None:
    await asyncio.to_thread(weights.sync, "retract")


async def _in_place(client: EngineClient, weights: Weights, scope: RequestScope) -> None:
    await asyncio.to_thread(weights.sync, "in_place")


Change = Callable[[EngineClient, Weights, RequestScope], Awaitable[None]]


async def lived_through(url: str, weights: Weights, change: Change, samples: list[Sample], length: int) -> None:
    """Samples grow to `length`, and weights change twice meanwhile. The first one is read as it comes."""
    client = EngineClient(url, request_timeout_s=300, experts=FORMAT, token_versions=True)

    async def grow(sample: Sample, scope: RequestScope) -> None:
        REQUEST_SCOPE.set(scope)  # of its task
        while sample.response_length < length and not scope.aborted:
            left = length - sample.response_length
            await (_streamed(client, sample, left) if sample.index == 0 else extend(client, sample, left))

    async def reach(tokens: int, first: asyncio.Task[None]) -> None:
        while samples[0].response_length < tokens and not first.done():
            await asyncio.sleep(0.01)
        if first.done():
            first.result()

    tasks, scope = list[asyncio.Task[None]](), RequestScope()
    try:
        for tokens in (length // 4, length // 2, length):
            if not tasks or change is _next_step:
                scope = RequestScope()
                tasks = [asyncio.create_task(grow(s, scope)) for s in samples]
            if tokens < length:
                await reach(tokens, tasks[0])
                await change(client, weights, scope)
            if tokens == length or change is _next_step:
                await asyncio.gather(*tasks)
    finally:
        await client.close()


@pytest.mark.parametrize("change", [_paused, _next_step, _engine_lost, _retracted, _in_place])
def test_a_tokens_experts_are_those_that_its_log_prob_was_computed_with(
    change: Change, url: str, weights: Weights, checkpoint: Path, make_backend: Callable[..., Any]
) -> None:
    """Law: whatever happens to a request while weights change, each trained token goes with the experts of the version
    that it carries, or has none. The oracle is transformers, which reads the tokens under the weights of each version.
    """
    samples = [Sample(group_index=0, index=i, tokens=[2, *range(40, 42 + 5 * i)]) for i in range(6)]
    weights.sync("abort", 1)
    asyncio.run(lived_through(url, weights, change, samples, length=64))
    lost = 0
    for sample in samples:
        unknown = num_unknown(sample, *weights.expected(sample, keeps_cache=change is _in_place))
        versions = sample.token_versions or []
        assert unknown <= sum(v != versions[-1] for v in versions), "only what an engine took along is not known"
        lost += unknown
    lived = sum(len(set(s.token_versions or ())) > 1 for s in samples)
    assert lived >= len(samples) // 2, "too few requests lived through a weight sync"
    assert (lost > 0) == (change is _engine_lost), f"{lost} rows are not recorded"
    if change is _retracted:
        trained_with_replay(samples, checkpoint, make_backend)


def num_unknown(sample: Sample, experts: Any, log_probs: Any) -> int:
    """Rows without a record; all others are those that are expected, and so are the log-probs."""
    off = np.abs(log_probs.numpy() - np.asarray(sample.rollout_log_probs)).max()
    assert off < 1e-4, f"sample {sample.index}: a log-prob is {off:.1e} off that of the version of its token"
    known = sample.rollout_routed_experts
    assert known is not None and known.end == len(sample.tokens) - 1
    rows = np.flatnonzero(known.recorded)
    chosen = np.zeros((len(rows), LAYERS, EXPERTS), np.bool_)
    np.put_along_axis(chosen, known.ids[rows].astype(np.int64), True, axis=2)
    wrong = rows[(chosen != experts.numpy()[rows]).any((1, 2))].tolist()
    assert not wrong, f"sample {sample.index}: rows {wrong} are of other weights; versions {sample.token_versions}"
    return int(known.end - len(rows))


def test_a_request_that_is_read_again_for_want_of_memory_keeps_its_experts(
    weights: Weights, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes some back every 20 passes, as if memory were short, while the next pass is under way."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "20")
    samples = [Sample(group_index=0, index=i, tokens=[2, *range(40, 42 + 5 * i)]) for i in range(8)]
    extra = {"enable_return_routed_experts": True, "max_total_tokens": 2000}

    async def work(client: EngineClient) -> None:
        await asyncio.gather(*(extend(client, s, 150) for s in samples))

    with serving(spec_of(checkpoint, extra=extra, token_versions=True), tmp_path) as own:
        relabel(own.url, 1)
        asking(own.url, work)
    assert "#retracted_reqs: 1" in (tmp_path / "engine.log").read_text()
    assert [num_unknown(s, *weights.expected(s, keeps_cache=False)) for s in samples] == [0] * len(samples)


def trained_with_replay(samples: list[Sample], checkpoint: Path, make_backend: Callable[..., Any]) -> None:
    """The trainer has the newest weights: it uses the records, and takes no sample of several versions for wrong."""
    batch = TrainBatch(rollout_id=0, samples=tuple(TrainSample.from_sample(s, reward=1.0) for s in samples))
    settings = {"global_batch_size": len(samples), "micro_batch_size": 1, "megatron": {"lr": 0.0}}
    backend = make_backend(checkpoint, **settings, mismatch_limit=None, use_rollout_routing_replay=True)
    backend.weight_version = newest = max(v for s in samples for v in s.token_versions or ())
    with watching(backend) as seen:
        metrics = backend.train(batch)
    check_choices(batch, seen)
    assert newest % 2 == 1 and metrics["train/routing_changed"] > 0, "no older record was replayed"
    assert metrics["train/stale_tokens"] == sum(
        s.response_length for s in samples if len(set(s.token_versions or ())) > 1
    )


@contextlib.contextmanager
def watching(backend: Any) -> Iterator[dict[int, list[Any]]]:
    """Layer -> the sets of experts [T, EXPERTS] of each of its router's calls."""
    from slime.models.common.mlp import ExactRouter

    seen: dict[int, list[Any]] = {layer: [] for layer in range(LAYERS)}
    routers = [m for chunk in backend._trainable.chunks for m in chunk.modules() if isinstance(m, ExactRouter)]
    hooks = [r.register_forward_hook(lambda r, _, out: seen[r.layer_number - 1].append(out[1])) for r in routers]
    yield seen
    for hook in hooks:
        hook.remove()


def disturb(backend: Any) -> None:
    """Moves the routers by what rounding in half precision would."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in backend.model.shards.items():
        if name.endswith("router.weight"):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise * parameter.data.abs() * 2e-2)


def test_the_trainer_uses_the_engines_experts(
    batch: TrainBatch, checkpoint: Path, make_backend: Callable[..., Any]
) -> None:
    """Its routers are disturbed, so that they would choose others; the log-probs are then nearer to the engine's."""
    settings = {"global_batch_size": NUM, "micro_batch_size": 1, "megatron": {"lr": 0.0}}
    backend = make_backend(checkpoint, **settings)
    assert backend.train(batch)["train/routing_changed"] == 0.0, "float32 engine and trainer agree by themselves"
    disturb(backend)
    off = backend.train(batch)
    assert 0.0 < off["train/routing_changed"] < 0.5 and off["train/routing_unrecorded_tokens"] == 0.0
    assert LAYERS * TOPK * 0.8 < off["train/routing_bytes_per_token"] < LAYERS * TOPK

    backend = make_backend(checkpoint, **settings, use_rollout_routing_replay=True)
    disturb(backend)
    with watching(backend) as seen:
        on = backend.train(batch)
    assert 0.0 < on["train/routing_changed"] < 0.5, "what it would have chosen, behind layers that replayed"
    name = "train/train_rollout_logprob_abs_diff"
    assert on[name] < off[name]
    check_choices(batch, seen)


def test_the_trainer_uses_the_engines_experts_of_ten_thousand_tokens(
    url: str, checkpoint: Path, make_backend: Callable[..., Any]
) -> None:
    batch = sampled(url, 128, 80)
    settings = {"global_batch_size": 128, "micro_batch_size": 1, "megatron": {"lr": 0.0}}
    backend = make_backend(checkpoint, **settings, use_rollout_routing_replay=True)
    disturb(backend)
    with watching(backend) as seen:
        metrics = backend.train(batch)
    assert metrics["train/routing_changed"] > 0 and sum(s.response_length for s in batch.samples) >= 10_000
    check_choices(batch, seen)


def check_choices(batch: TrainBatch, seen: dict[int, list[Any]]) -> None:
    """Every token but the last of each sample went where the engine sent it, in every layer."""
    for layer, calls in seen.items():
        assert len(calls) == len(batch.samples), "one row for each sample"
        for sample, chosen in zip(batch.samples, calls, strict=True):
            wanted = np.zeros((sample.num_tokens - 1, EXPERTS), np.bool_)
            assert sample.routed_experts is not None
            np.put_along_axis(wanted, sample.routed_experts[:, layer].astype(np.int64), True, axis=1)
            assert np.array_equal(chosen.numpy()[:-1], wanted)


def test_the_old_policys_experts_are_replayed(
    batch: TrainBatch, checkpoint: Path, make_backend: Callable[..., Any]
) -> None:
    """Without an engine's record; the steps after the first, whose weights have moved, too."""
    backend = make_backend(
        checkpoint,
        global_batch_size=NUM // 2,
        num_steps_per_rollout=2,
        micro_batch_size=1,
        use_routing_replay=True,
        megatron={"lr": 3e-2},
    )
    bare = [dataclasses.replace(s, routed_experts=None) for s in batch.samples]
    with watching(backend) as seen:
        metrics = backend.train(dataclasses.replace(batch, samples=tuple(bare)))
    assert metrics["train/num_updates"] == 2.0 and "train/routing_changed" not in metrics
    for calls in seen.values():
        old, trained = calls[:NUM], calls[NUM:]
        assert len(trained) == NUM and all(torch.equal(a, b) for a, b in zip(old, trained, strict=True))


SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP = {"expert_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
VP = {**PP, "virtual_pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"world_size": 2, "megatron": EP},
    "cp2": {"world_size": 2, "megatron": CP},
    "sp2": {"world_size": 2, "megatron": SP},
    "pp2_recompute": {"world_size": 2, "megatron": {**PP, **AGAIN}},
    "vp2_recompute": {"world_size": 2, "megatron": {**VP, **AGAIN}},
    "sp2ep2cp2": {"world_size": 4, "megatron": {**SP, **EP, **CP}},
}


@pytest.fixture(scope="module")
def one(checkpoint: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    folder = tmp_path_factory.mktemp("layouts")

    def run(name: str) -> Any:
        defaults = {
            "checkpoint": str(checkpoint),
            "scenarios": {"single": {"args": {"micro_batch_size": 1}}, "packed": {"args": {"micro_batch_size": 3}}},
            "rounds": 1,
            "provoke": False,
            "routed": (LAYERS, EXPERTS, TOPK),
            "args": {"use_rollout_routing_replay": True, "use_routing_replay": True},
            "round_args": {"global_batch_size": 4},
        }
        layouts = {"one": {"world_size": 1, "megatron": {}}, **LAYOUTS}
        return run_layouts(ranks, folder, {name: layouts[name]}, defaults=defaults)[name]

    return run


@pytest.fixture(scope="module")
def reference(one: Callable[[str], Any]) -> Any:
    return one("one")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_experts_do_not_feel_the_partition(layout: str, one: Callable[[str], Any], reference: Any) -> None:
    """The record is at random, and has holes: a token that got another's would show in every gradient."""
    other = one(layout)
    want = reference.gradients["single"]
    for scenario, gradients in {**other.gradients, "of one rank": reference.gradients["packed"]}.items():
        for name, tensor in want.items():
            error = float((gradients[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-12))
            assert error <= 1e-5, f"{layout}/{scenario}: {name} differs by {error:.2e} of its largest entry"
    for name, tensor in reference.weights.items():
        assert float((other.weights[name] - tensor).abs().max()) < 1e-4, f"{layout}: {name}"
    (own,), (found,) = reference.result["metrics"], other.result["metrics"]
    for name in ("routing_changed", "routing_unrecorded_tokens", "routing_bytes_per_token", "loss", "grad_norm"):
        assert found[f"train/{name}"] == pytest.approx(own[f"train/{name}"], rel=1e-4), name
    assert own["train/routing_unrecorded_tokens"] > 0 and own["train/routing_changed"] > 0.5
