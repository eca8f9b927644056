"""Law 2 under faults, against a real SGLang server: whatever happens to a bucket behind the sender's digests, the
weight sync names it, nobody gets a token, and the next one heals it. See `tests.support.weight_faults`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from slime.core.errors import DeadlineExceeded
from slime.models import table_for
from slime.serving.server import SGLangServer
from slime.weights import engine_layout
from slime.weights.quantised.formats import QuantisedFormat
from slime.weights.quantised.sending import quantised_outgoing, quantised_stream
from tests.contract.weights.test_quantised_in_sglang import FAMILIES
from tests.contract.weights.test_sync_to_engine import reference_logprobs
from tests.support.engines import serving, spec_of
from tests.support.families import write_family
from tests.support.marks import quick
from tests.support.quantised import write_quantised
from tests.support.quantised_kernels import kernels_in_servers
from tests.support.tiny import write_tiny_model
from tests.support.weight_faults import (
    FAULTS,
    PROMPT,
    TRANSPORTS_TRIED,
    Count,
    Engine,
    ForgettingProxy,
    behind_proxy,
    moved,
    try_faults,
)
from tests.support.weights import Whole

CASES = 100
WEIGHTS = 5
"""Different ones that an engine may get."""
Record = Callable[[str, object], None]


def require_apart(answers: Sequence[torch.Tensor], least: float) -> None:
    """Which weights an answer is of can be told."""
    gaps = [float((a - b).abs().max()) for i, a in enumerate(answers) for b in answers[:i]]
    assert min(gaps) > least, f"weights that answer alike: {gaps}"


def engine_of(url: str, proxy: ForgettingProxy, path: Path, folder: Path) -> Engine:
    """A plain engine; what it has to answer is what transformers says."""
    table = table_for(json.loads((path / "config.json").read_text()))
    own = load_file(path / "model.safetensors")
    state = {name: own[name] for name in table.hf_names}
    states = [state, *(moved(state, seed) for seed in range(1, WEIGHTS))]
    answers = [reference_logprobs(path, state, PROMPT) for state in states]
    require_apart(answers, 1e-3)
    return Engine(url, proxy, path, folder, [Whole(table, state.items()) for state in states], states, answers)


def caught(engine: Engine, transport: str, fault: str, cases: int) -> Count:
    """Tries a fault so often. Whatever is not caught, or gets a token, fails the test there."""
    if transport != "delta":
        return try_faults(engine, transport, fault, cases)
    with engine.agent():
        return try_faults(engine, transport, fault, cases)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of a Mixture of Experts: some tensors are fused, some stacked, some sent as runs."""
    folder = tmp_path_factory.mktemp("experts")
    path = write_tiny_model(folder / "model", "qwen3_moe", seed=3)
    with serving(spec_of(path, token_versions=True), folder) as server, behind_proxy(server.url) as proxy:
        engine = engine_of(server.url, proxy, path, folder)
        yield engine
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transport", TRANSPORTS_TRIED)
def test_a_hundred_of_a_hundred_are_caught(
    experts: Engine, transport: str, fault: str, record_property: Record
) -> None:
    """Law: all are caught, by name, and no token is served before a good weight sync."""
    count = caught(experts, transport, fault, CASES)
    record_property("counts", vars(count))
    assert count == Count(CASES, CASES, 0, 2 * CASES)


@pytest.mark.slow
def test_an_engine_that_says_yes_to_a_broadcast_and_is_not_there_is_found_out_in_time(experts: Engine) -> None:
    """Law: its sender waits no longer than it may; a group with the engine is made afresh."""
    experts.channels.pop("distributed", experts.channel("tensor")).abandon()
    channel = experts.channel("distributed", timeout_s=5.0)
    experts.sync(1, channel)
    experts.proxy.receives = False
    experts.proxy.forget(range(10**6))
    with pytest.raises(DeadlineExceeded, match=r"waited 5 s for engines to receive a bucket") as caught:
        experts.sync(2, channel)
    assert caught.value.engines == (experts.proxy.url,)
    experts.proxy.forget(())
    experts.proxy.receives = True
    asked = experts.pool.submit(experts.ask)
    experts.sync(3, channel)
    answer = asked.result()
    assert set(answer.versions) == {experts.version} and experts.is_answered_by(answer) == 3


@pytest.mark.parametrize("transport", quick(TRANSPORTS_TRIED, "tensor"))
def test_each_fault_is_caught(engine_server: SGLangServer, tmp_path: Path, transport: str) -> None:
    """Law: the same of a dense model, once for each fault."""
    with behind_proxy(engine_server.url) as proxy:
        engine = engine_of(engine_server.url, proxy, Path(engine_server.model_path), tmp_path)
        for fault in FAULTS:
            assert caught(engine, transport, fault, 2) == Count(2, 2, 0, 4)
        engine.version = 0
        engine.sync(0, engine.channel("tensor"))  # leave the shared server as it was
        engine.close()


def quantised_engine(
    url: str, proxy: ForgettingProxy, path: Path, quantised: QuantisedFormat, source: Path, folder: Path
) -> Engine:
    """An engine of a quantised folder. What it has to answer is what it answered when it had got the same, verified."""
    table = table_for(json.loads((source / "config.json").read_text()))
    own = load_file(source / "model.safetensors")
    state = {name: own[name].bfloat16() for name in table.hf_names}
    states = [moved(state, seed) for seed in range(WEIGHTS)]
    outgoing = [quantised_outgoing(Whole(table, state.items()), quantised) for state in states]
    sent = [dict(quantised_stream(state.items(), quantised)) for state in states]
    engine = Engine(url, proxy, path, folder, outgoing, sent, [], bucket_bytes=1024 * 1024)
    for which in range(WEIGHTS):
        engine.sync(which, engine.channel("tensor"))
        engine.answers.append(engine.ask().log_probs)
    require_apart(engine.answers, 0.02)
    return engine


@pytest.fixture(scope="module", params=[("fp8", "qwen3_moe"), ("channels", "qwen3"), ("int4", "qwen3")], ids=str)
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of a quantised folder, which pads nothing, as on a GPU, where alone a run has such engines."""
    (kind, family), folder = request.param, tmp_path_factory.mktemp("quantised")
    source = write_family(folder / "plain", family, **FAMILIES[family])
    path, found = write_quantised(source, folder / kind, kind)
    split, spec = engine_layout._split, spec_of(path, token_versions=True, dtype="bfloat16")
    with (
        pytest.MonkeyPatch.context() as patch,
        kernels_in_servers(folder),
        serving(spec, folder) as server,
        behind_proxy(server.url) as proxy,
    ):
        patch.setattr(engine_layout, "_split", lambda *given: split(*given[:-1], False))
        engine = quantised_engine(server.url, proxy, path, found, source, folder)
        yield engine
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_hundred_of_a_hundred_are_caught_on_the_way_to_quantised_engines(
    quantised: Engine, fault: str, record_property: Record
) -> None:
    """Law: codes and scales as well, by every transport in turn."""
    count, draw = Count(), Random(fault)
    with quantised.agent():
        for number in range(CASES):
            quantised.one_case(TRANSPORTS_TRIED[number % 4], fault, draw, count)
    record_property("counts", vars(count))
    assert count == Count(CASES, CASES, 0, 2 * CASES)
