"""Law 2 against a real SGLang server: what the trainer sends is what the engine serves, over every transport; one
altered float is refused by name, and the engine stays paused."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from slime.cluster.engine_tracker import WEIGHT_VERSION
from slime.core.engine_interface import ASK_AGAIN
from slime.core.errors import WeightSyncError
from slime.core.topology import ONE_RANK, EngineLayout
from slime.models import table_for
from slime.models.common.table import FamilyTable
from slime.serving.control import HttpEngineControl
from slime.serving.leased_ports import lease_meeting_point
from slime.serving.payloads import digest
from slime.serving.server import SGLangServer
from slime.weights.receivers import Receiver
from slime.weights.sync import CAUSES, PAUSED, sync_weights
from slime.weights.transports import TRANSPORTS, Channel
from tests.support.engines import READY_LIMIT_S, kill, serving, spec_of
from tests.support.marks import quick
from tests.support.recording import RecordingActors
from tests.support.tiny import write_tiny_model
from tests.support.weights import Tamper, TamperingChannel, Whole, disk_settings, transport_context
from tests.unit.cluster.test_weight_sync_sequence import sequence

pytestmark = pytest.mark.timeout(300)
BUCKET_BYTES = 64 * 1024
NAMES = ["tensor", "distributed", "disk"]
PROMPT = [2, 40, 41, 42, 43, 44, 45, 46]
TAMPERED = "model.layers.1.self_attn.k_proj.weight"
StateDict = dict[str, torch.Tensor]


def read_model(path: Path) -> tuple[FamilyTable, StateDict]:
    table = table_for(json.loads((path / "config.json").read_text()))
    state = {n: t for n, t in load_file(path / "model.safetensors").items() if n in table.hf_names}
    return table, {n: state[n] for n in table.hf_names}


def reference_logprobs(path: Path, state: StateDict, tokens: list[int]) -> torch.Tensor:
    """[T-1] log-probs of tokens[1:] under transformers."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    kind = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(None, config=config, state_dict=dict(state), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def engine_logprobs(url: str, tokens: list[int]) -> tuple[torch.Tensor, str]:
    """[T-1] log-probs of tokens[1:] under the engine, and its weight version."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    meta = httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json()["meta_info"]
    return torch.tensor([x[0] for x in meta["input_token_logprobs"][1:]]), meta["weight_version"]


def is_paused(url: str) -> bool:
    """A paused engine holds requests back; an unpaused one answers a single token at once."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    try:
        httpx.post(f"{url}/generate", json=body, timeout=2)
    except httpx.ReadTimeout:
        return True
    return False


def changed(state: StateDict, seed: int) -> StateDict:
    generator = torch.Generator().manual_seed(seed)
    return {n: t + 0.05 * torch.randn(t.shape, generator=generator) for n, t in state.items()}


def one_float(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name == TAMPERED:
        tensor.view(-1)[7] += 1e-6
    return tensor


class Rig:
    """A server, its control, and what it was started from."""

    def __init__(self, url: str, path: Path, tmp_path: Path, layout: EngineLayout = ONE_RANK) -> None:
        self.url, self.path, self.tmp_path = url, path, tmp_path
        self.table, self.state = read_model(path)
        self.control = HttpEngineControl(url, layout, timeout_s=60)
        self.receivers = [Receiver(self.control)]

    def channel(self, name: str, tamper: Tamper | None = None) -> Channel:
        settings = disk_settings(self.tmp_path / "disk")
        channel = TRANSPORTS.build(name, settings).open(transport_context(hf_checkpoint=self.path, table=self.table))
        return channel if tamper is None else TamperingChannel(channel, tamper)

    def sync_weights(self, state: StateDict, channel: Channel, version: int, **kwargs: Any) -> dict[str, float]:
        return sync_weights(
            Whole(self.table, state.items()),
            receivers=self.receivers,
            channel=channel,
            digest=digest,
            version=version,
            buffer_bytes=BUCKET_BYTES,
            **kwargs,
        )

    def assert_serves(self, state: StateDict, version: int) -> None:
        got, served = engine_logprobs(self.url, PROMPT)
        assert served == str(version)
        want = reference_logprobs(self.path, state, PROMPT)
        assert (got - want).abs().max() < 1e-5, f"worst gap {(got - want).abs().max()}"


@pytest.fixture
def rig(engine_server: SGLangServer, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(engine_server.url, Path(engine_server.model_path), tmp_path)
    yield rig
    rig.sync_weights(rig.state, rig.channel("tensor"), version=1)  # leave the shared server as it was
    rig.control.close()


@pytest.mark.parametrize("name", NAMES)
def test_new_weights_arrive_and_are_served(rig: Rig, name: str) -> None:
    channel = rig.channel(name)
    before, _ = engine_logprobs(rig.url, PROMPT)
    for version in (2, 3):  # the second weight sync reuses what the first one set up
        state = changed(rig.state, seed=version)
        metrics = rig.sync_weights(state, channel, version)
        rig.assert_serves(state, version)
    after, _ = engine_logprobs(rig.url, PROMPT)
    assert (after - before).abs().max() > 1e-3
    assert metrics["update_weights_bytes"] == sum(t.numel() * t.element_size() for t in state.values())
    channel.close()
    assert not list(rig.tmp_path.glob("disk/*"))


class Timed(HttpEngineControl):
    """Notes when each call began and ended, on the clock of the weight sync."""

    def __init__(self, url: str) -> None:
        super().__init__(url, ONE_RANK, timeout_s=60)
        self.calls: dict[str, tuple[float, float]] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("pause", "flush_cache", "weight_checksums", "resume"):
            return found

        def noted(*args: Any) -> Any:
            began = time.monotonic()
            answer = found(*args)
            self.calls[name] = began, time.monotonic()
            return answer

        return noted


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_the_causes_add_up_to_the_time_in_which_the_engine_was_paused(rig: Rig, mode: str) -> None:
    """Each cause contains its calls, and all of them lie within the weight sync: no load can break this."""
    rig.receivers = [Receiver(timed := Timed(rig.url))]
    channel = rig.channel("tensor")
    metrics = rig.sync_weights(changed(rig.state, seed=2), channel, 2, pause_mode=mode)
    causes = {cause: metrics[f"{PAUSED}/{cause}"] for cause in CAUSES}
    took = {name: ended - began for name, (began, ended) in timed.calls.items()}
    assert metrics[PAUSED] == pytest.approx(sum(causes.values()), rel=1e-12)
    paused = timed.calls["resume"][1] - timed.calls["pause"][0]
    assert paused <= metrics[PAUSED] <= metrics["update_weights_time"]
    assert causes["abort"] >= took["pause"] and causes["admission"] >= took["resume"]
    assert causes["verify"] >= took["weight_checksums"] and causes["flush"] >= took.get("flush_cache", 0.0)
    assert ("flush_cache" in took) is (mode == "abort")
    between = timed.calls["weight_checksums"][0] - max(timed.calls[n][1] for n in ("pause", "flush_cache") if n in took)
    assert 0 < causes["transfer"] <= between
    rig.receivers = [Receiver(rig.control)]
    channel.close()
    timed.close()


class Counting(HttpEngineControl):
    """Notes which buckets each call announced."""

    def __init__(self, url: str) -> None:
        super().__init__(url, ONE_RANK, timeout_s=60)
        self.formats: list[str] = []
        self.listed: list[int] = []
        """The number of tensors that each call listed."""

    def update_weights_from_distributed(self, **told: Any) -> None:
        self.formats.append(str(told["load_format"]))
        self.listed.append(len(told["names"]))
        super().update_weights_from_distributed(**told)


def test_one_call_announces_all_buckets_of_a_sender(rig: Rig) -> None:
    """Law: and an engine that waits for announced buckets is freed if their sender cannot fill them."""
    counting, usual = Counting(rig.url), rig.receivers
    rig.receivers = [Receiver(counting)]
    channel = rig.channel("distributed")
    for version in (2, 3):
        rig.sync_weights(changed(rig.state, version), channel, version)
        rig.assert_serves(changed(rig.state, version), version)
    (first, second), (listed, again) = counting.formats, counting.listed
    assert first.count(",") > 3 and listed > 3
    assert again == 0 and second == first.rpartition(":")[0], "engines have the list of tensors"
    broken = dict(changed(rig.state, 4))
    broken[list(broken)[-1]] = torch.zeros(3)
    with pytest.raises(WeightSyncError, match="has shape"):
        rig.sync_weights(broken, channel, version=4)
    rig.sync_weights(changed(rig.state, 5), channel, version=5)
    rig.assert_serves(changed(rig.state, 5), version=5)
    channel.close()
    counting.close()
    rig.receivers = usual


def groups_built(channel: Channel) -> float:
    return channel.costs()["update_weights_groups_built"]


def test_a_group_is_built_once_for_the_process_that_is_there(rig: Rig) -> None:
    """Law: one for the first weight sync, one more when another process answers at that address, none otherwise."""
    channel, built = rig.channel("distributed"), []
    for version, is_new in ((2, False), (3, False), (4, True), (5, False)):
        rig.receivers = [Receiver(HttpEngineControl(rig.url, ONE_RANK, timeout_s=60))] if is_new else rig.receivers
        state = changed(rig.state, seed=version)
        rig.sync_weights(state, channel, version)
        rig.assert_serves(state, version)
        built.append(groups_built(channel))
    channel.close()
    assert built == [1, 1, 2, 2]


@pytest.mark.slow
def test_engines_that_come_back_between_two_weight_syncs_cost_one_group(tmp_path: Path) -> None:
    """Law: two of three engines end and are started again; nobody asks for weights for them while the third one serves
    (no token of theirs before), and the next weight sync makes one group for all, verified."""
    path = write_tiny_model(tmp_path / "model", "qwen3", seed=3)
    servers: dict[int, SGLangServer] = {}
    rigs: dict[int, Rig] = {}

    def begin(*numbers: int) -> None:
        for number in numbers:
            servers[number] = SGLangServer(spec_of(path), log_path=tmp_path / f"{number}.log")
            stack.callback(servers[number].stop)
            servers[number].start()
        for number in numbers:
            servers[number].wait_ready(READY_LIMIT_S)
            rigs[number] = Rig(servers[number].url, path, tmp_path)

    class RealActors(RecordingActors):
        def on_trainers(self, method: str, *arguments: Any, on_poll: Any = None) -> list[dict[str, float]]:
            super().on_trainers(method, *arguments)
            sender, version = rigs[0], 2 + len(self.engines.served)
            sender.receivers = [rigs[index].receivers[0] for index in arguments[0]]
            sender.sync_weights(changed(sender.state, version), channel, version)
            return [{WEIGHT_VERSION: float(version)}]

    with contextlib.ExitStack() as stack:
        begin(0, 1, 2)
        channel, actors = rigs[0].channel("distributed"), RealActors(num_engines=3)
        stack.callback(channel.close)
        weight_sync, _, _ = sequence(actors, update_weight_transport="distributed")
        weight_sync.run(for_save=False)
        weight_sync.run(for_save=False)
        assert groups_built(channel) == 1
        engines = actors.engines.begin_sync()
        for number in (1, 2):
            kill(servers[number])
            begin(number)
            actors.engines.waiting = engines[1 : number + 1]
            weight_sync.join(fresh=True)
            assert groups_built(channel) == 1 and actors.engines.served == [2, 3], "it waits"
        for version in (4, 5):
            weight_sync.run(for_save=False)
            assert groups_built(channel) == 2
            for rig in rigs.values():
                rig.assert_serves(changed(rigs[0].state, version), version)


@pytest.mark.parametrize("name", quick(NAMES, "tensor"))
def test_one_altered_float_is_refused_by_name_and_the_engine_stays_paused(rig: Rig, name: str) -> None:
    bad = rig.channel(name, one_float)
    with pytest.raises(WeightSyncError) as caught:
        rig.sync_weights(changed(rig.state, 5), bad, version=5)
    bad.close()
    message = str(caught.value)
    assert TAMPERED in message and "model.layers.1.self_attn.qkv_proj.weight" in message and rig.url in message
    assert message.count("qkv_proj") == 1 and "missing" not in message and "extra" not in message
    assert is_paused(rig.url)
    good = changed(rig.state, 6)
    channel = rig.channel(name)
    rig.sync_weights(good, channel, version=6)  # the way out: sync again
    channel.close()
    rig.assert_serves(good, 6)


def test_unchanged_weights_are_verified_as_well(rig: Rig) -> None:
    metrics = rig.sync_weights(rig.state, rig.channel("tensor"), version=1)
    assert metrics["update_weights_verify_time"] > 0
    rig.assert_serves(rig.state, 1)


def test_a_forgotten_tensor_is_refused_before_the_engine_is_asked(rig: Rig) -> None:
    state = {n: t for n, t in rig.state.items() if n != "model.norm.weight"}
    with pytest.raises(WeightSyncError, match=r"did not send model\.norm\.weight"):
        rig.sync_weights(state, rig.channel("tensor"), version=7)


def test_a_weight_sync_under_load_drains_first(rig: Rig) -> None:
    """Requests in flight are ended, of which their clients hear as an error, and the server survives, also those whose
    client has hung up."""
    from concurrent.futures import ThreadPoolExecutor

    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}

    def ask(timeout: float) -> Any:
        try:
            return httpx.post(f"{rig.url}/generate", json=body, timeout=timeout)
        except httpx.ReadTimeout:
            return None

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, t) for t in (60, 60, 0.4, 0.4)]
        while not all(f.done() for f in running[2:]):
            pass
        state = changed(rig.state, 8)
        rig.sync_weights(state, rig.channel("tensor"), version=8)
        answers = [f.result() for f in running[:2]]
    for answer in answers:
        ended = answer.status_code == 503 and ASK_AGAIN in answer.text
        assert ended or answer.json()["meta_info"]["finish_reason"]["type"] == "length"
    rig.assert_serves(state, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, overrides", [("llama", {"tied": True, "vocab_size": 131}), ("qwen3", {}), ("qwen3_moe", {})]
)
def test_two_ranks(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """Fusing, sharding, the padding of heads, MLP and vocabulary are as declared, over every transport."""
    kv_heads = 1 if family == "qwen3" else 2
    path = write_tiny_model(tmp_path / "model", family, seed=3, num_key_value_heads=kv_heads, **overrides)
    layout = EngineLayout(tp_size=2)
    with serving(spec_of(path, layout=layout), tmp_path) as server:
        rig = Rig(server.url, path, tmp_path, layout)
        for version, name in enumerate(NAMES, 2):
            state = changed(rig.state, seed=version)
            channel = rig.channel(name)
            rig.sync_weights(state, channel, version)
            channel.close()
            rig.assert_serves(state, version)
        with pytest.raises(WeightSyncError, match=r"rank [01]: differing"):
            rig.sync_weights(changed(rig.state, 9), rig.channel("tensor", one_float), version=9)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3_moe", False)])
def test_two_pipeline_stages(tmp_path: Path, family: str, tied: bool) -> None:
    """Both stages take what is sent, over every transport, both are compared, and together they serve it."""
    layout = EngineLayout(pp_size=2)
    path = write_tiny_model(tmp_path / "model", family, seed=3, tied=tied)
    with serving(spec_of(path, layout=layout), tmp_path) as server:
        rig = Rig(server.url, path, tmp_path, layout)
        for version, name in enumerate(NAMES, 2):
            state = changed(rig.state, seed=version)
            channel = rig.channel(name)
            for _ in range(2):  # the second weight sync reuses what the first one set up
                rig.sync_weights(state, channel, version)
            channel.close()
            rig.assert_serves(state, version)
        with pytest.raises(WeightSyncError, match=r"rank 0 of stage 1: differing: model.layers.1.self_attn.qkv_proj"):
            rig.sync_weights(changed(rig.state, 9), rig.channel("tensor", one_float), version=9)
        assert is_paused(rig.url)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", EngineLayout(tp_size=2, ep_size=2)), ("qwen3", EngineLayout(tp_size=2, dp_size=2))],
)
def test_groups_of_ranks(tmp_path: Path, family: str, layout: EngineLayout) -> None:
    """Experts apart, and DP attention: taken and compared on every rank. (On a CPU SGLang cannot serve either.)"""
    path = write_tiny_model(tmp_path / "model", family, seed=3, vocab_size=131)
    with serving(spec_of(path, layout=layout), tmp_path) as server:
        rig = Rig(server.url, path, tmp_path, layout)
        for version, name in enumerate(NAMES, 2):
            channel = rig.channel(name)
            rig.sync_weights(changed(rig.state, seed=version), channel, version)
            channel.close()
        with pytest.raises(WeightSyncError, match=r"rank [01]: differing: model.layers.1.self_attn.qkv_proj"):
            rig.sync_weights(changed(rig.state, 9), rig.channel("tensor", one_float), version=9)


@pytest.mark.slow
def test_an_engine_of_two_nodes(tmp_path: Path) -> None:
    """Two servers are one engine: the first one answers, for the second one's stage, too."""
    layout = EngineLayout(pp_size=2)
    path = write_tiny_model(tmp_path / "model", "qwen3", seed=3)
    with lease_meeting_point() as point, contextlib.ExitStack() as stack:
        nodes = []
        for rank in range(2):
            spec = spec_of(path, layout=layout, num_nodes=2, node_rank=rank, dist_init_addr=f"127.0.0.1:{point.port}")
            nodes.append(SGLangServer(spec, log_path=tmp_path / f"node{rank}.log"))
            stack.callback(nodes[-1].stop)
            nodes[-1].start()
        for node in nodes:
            node.wait_ready(READY_LIMIT_S)
        assert all(node.healthy() and node.problem() is None and node.scheduler_answers(30.0) for node in nodes)
        rig = Rig(nodes[0].url, path, tmp_path, layout)
        for version, name in enumerate(NAMES, 2):
            state = changed(rig.state, seed=version)
            channel = rig.channel(name)
            rig.sync_weights(state, channel, version)
            channel.close()
            rig.assert_serves(state, version)
