"""Law: a stock engine reads the tokens that are trained, images among them, and sees with the tower that the trainer
sees with; then log-probs of sampled tokens agree to 1e-5 (worst token, float32)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import EngineError, SampledPlaceholder, WeightSyncError
from slime.core.files import ImageFolder
from slime.core.hf_config import read_hf_config
from slime.core.topology import ONE_RANK
from slime.models import family_of
from slime.rollout.client.call import Pictures
from slime.rollout.client.engine_client import EngineClient
from slime.serving.control import HttpEngineControl
from slime.serving.payloads import digest
from slime.serving.server import SGLangServer
from slime.weights.receivers import Receiver
from slime.weights.sync import sync_weights
from slime.weights.transports.tensor import TensorTransport
from tests.support.engine_parity import one_rank
from tests.support.engines import serving, spec_of
from tests.support.training import with_samples
from tests.support.vision import IMAGE_ID, VIDEO_ID, VISION_END_ID, VISION_START_ID, seeing_batch, write_vision_model
from tests.support.weights import Whole, transport_context

pytestmark = pytest.mark.slow  # an engine of its own
LIMIT, LENGTH = 1e-5, 24


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, SGLangServer]]:
    root = tmp_path_factory.mktemp("vision-engine")
    checkpoint = write_vision_model(root / "model", samples_media=True)
    with serving(spec_of(checkpoint, extra={"disable_fast_image_processor": True}), root) as server:
        yield root, server


@pytest.fixture(scope="module")
def backend(engine: tuple[Path, SGLangServer]) -> Iterator[Any]:
    root, _ = engine
    with one_rank(root / "model", multimodal_keys={"image": "images"}, run_dir=str(root)) as made:
        yield made


def _sync(server: SGLangServer, backend: Any, version: int, carried: dict[str, str]) -> None:
    control = HttpEngineControl(server.url, ONE_RANK, 60.0, None)
    sync_weights(
        Whole(backend.table, backend.iter_hf_tensors()),
        receivers=[Receiver(control)],
        channel=TensorTransport().open(transport_context(table=backend.table)),
        digest=digest,
        version=version,
        buffer_bytes=64 * 1024,
        carried=carried,
    )


async def _generated(url: str, root: Path, prompts: Sequence[TrainSample], **params: Any) -> list[Any]:
    client, folder = EngineClient(url), ImageFolder(root / "images")

    def asked(sample: TrainSample) -> Any:
        ids = sample.tokens[: sample.num_tokens - sample.response_length].tolist()
        pictures = Pictures.of(sample.images, folder, IMAGE_ID) if sample.images else None
        return client.generate(ids, {"temperature": 1.0, "max_new_tokens": LENGTH, **params}, pictures=pictures)

    try:
        return await asyncio.gather(*map(asked, prompts), return_exceptions=True)
    finally:
        await client.close()


def test_trainer_and_engine_agree_on_what_was_sampled_of_images(
    engine: tuple[Path, SGLangServer], backend: Any
) -> None:
    root, server = engine
    batch: TrainBatch = seeing_batch(root / "images", root / "model", seed=5)
    backend.train(batch)  # the engine was started with other weights
    backend.weight_version = 2
    _sync(server, backend, 2, backend.sight.digests(torch.float32, digest))
    answers = asyncio.run(_generated(server.url, root, batch.samples, ignore_eos=True))
    samples = []
    for sample, answer in zip(batch.samples, answers, strict=True):
        prompt = sample.tokens[: sample.num_tokens - sample.response_length]
        assert answer.prompt_tokens == len(prompt) and len(answer.tokens) == LENGTH
        sampled = {
            "tokens": np.concatenate([prompt, np.asarray(answer.tokens, np.int32)]),
            "loss_mask": np.ones(LENGTH, np.float32),
            "rollout_log_probs": np.asarray(answer.log_probs, np.float32),
            "token_versions": np.asarray(answer.versions, np.int32),
        }
        samples.append(dataclasses.replace(sample, **sampled))
    ids = [{*sample.tokens[-LENGTH:].tolist()} for sample in samples if sample.images]
    assert any(IMAGE_ID in one for one in ids) and any(VIDEO_ID in one for one in ids), "sampled ones are text"
    metrics = backend.measure_mismatch(with_samples(batch, samples))
    assert 0 < metrics["train/train_rollout_logprob_abs_diff_max"] <= LIMIT


def test_an_engine_with_another_tower_is_not_served(
    engine: tuple[Path, SGLangServer], backend: Any, tmp_path: Path
) -> None:
    _, server = engine
    other = write_vision_model(tmp_path / "other", seed=1)
    config = read_hf_config(str(other))
    weights = {n: t for n, t in load_file(other / "model.safetensors").items() if "visual" in n}
    tower = family_of(config).tower(config, weights, dtype=torch.float32, device=torch.device("cpu"))
    expected = {name: digest(held) for name, held in tower.resident(torch.float32)}
    with pytest.raises(WeightSyncError, match=r"differing: visual\.blocks\.0"):
        _sync(server, backend, 3, expected)
    backend.weight_version = 4
    _sync(server, backend, 4, backend.sight.digests(torch.float32, digest))


def test_a_prompt_that_the_engine_reads_otherwise_is_an_error(engine: tuple[Path, SGLangServer]) -> None:
    root, server = engine
    sample = next(s for s in seeing_batch(root / "images", root / "model", seed=5).samples if s.images)
    place = int(np.flatnonzero(sample.tokens == IMAGE_ID)[0])
    short = dataclasses.replace(sample, tokens=np.delete(sample.tokens, place))
    more = dataclasses.replace(sample, tokens=np.insert(sample.tokens, 1, IMAGE_ID))
    (read, refused) = asyncio.run(_generated(server.url, root, [short, more]))
    assert isinstance(read, EngineError) and "their image processors differ" in str(read)
    assert isinstance(refused, SampledPlaceholder) and "runs of placeholders" in str(refused)


@pytest.mark.parametrize(
    ("sampled", "answers"), [(IMAGE_ID, False), (VIDEO_ID, False), (VISION_START_ID, True), (VISION_END_ID, True)]
)
def test_an_engine_cannot_read_a_sampled_placeholder_in_a_prompt_with_images(
    engine: tuple[Path, SGLangServer], sampled: int, answers: bool
) -> None:
    """Why `Pictures.written` refuses such a prompt, and only such: what encloses an image is text to an engine."""
    root, server = engine
    sample = next(s for s in seeing_batch(root / "images", root / "model", seed=5).samples if len(s.images) == 1)
    pictures = Pictures.of(sample.images, ImageFolder(root / "images"), IMAGE_ID)
    ids = pictures.written(sample.tokens[: sample.num_tokens - sample.response_length].tolist())
    body = {"input_ids": [*ids, 30, sampled, 31], "image_data": list(pictures.uris)}
    asked = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode())
    asked.add_header("Content-Type", "application/json")
    if answers:
        assert urllib.request.urlopen(asked, timeout=60).status == 200
    else:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            urllib.request.urlopen(asked, timeout=60)
