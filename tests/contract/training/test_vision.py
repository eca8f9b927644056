"""Qwen3-VL with images, in packed rows: log-probs and gradients are transformers', the tower comes back untouched."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from slime.core.batch import TrainBatch
from slime.core.errors import DataError
from slime.core.files import ImageFolder
from slime.core.hf_config import read_hf_config
from slime.core.sample import NOT_SAMPLED
from slime.models import family_of
from slime.training.step.vision_encoder import placeholder_starts
from tests.support.marks import quick
from tests.support.measured_backend import MeasuredBackend
from tests.support.ranks import Ranks, Seat
from tests.support.training import random_batch, training_args, with_samples
from tests.support.vision import IMAGE_ID, drawn, seeing_batch, write_vision_model

TOLERANCE = 3e-5
"""Of gradients, relative to the largest entry of each tensor, float32."""
SETTINGS: dict[str, Any] = {
    "loss_type": "sft_loss",
    "calculate_per_token_loss": True,
    "micro_batch_size": 3,
    "multimodal_keys": {"image": "images"},
}


def _measure(
    seat: Seat,
    checkpoint: Path,
    run_dir: Path,
    batch: TrainBatch,
    megatron: dict[str, Any],
    changes: dict[str, Any] | None = None,
) -> Any:
    """(log-probs, gradients) of one rank, which exports its model into `run_dir`."""
    args = training_args(checkpoint, megatron=megatron, **SETTINGS | (changes or {}), run_dir=str(run_dir))
    backend = MeasuredBackend(args, **seat.place)
    log_probs = [x.tolist() for x in backend.log_probs(batch)]
    gradients = {name: g.detach().cpu().clone() for name, g in backend.gradients(batch).items()}
    backend.save_hf(run_dir / "hf")
    backend.close()
    return log_probs, gradients


@pytest.fixture(scope="module", params=quick([False, True], False), ids=["untied", "tied"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, TrainBatch]:
    root = tmp_path_factory.mktemp("vision")
    checkpoint = write_vision_model(root / "model", tied=request.param)
    return root, checkpoint, seeing_batch(root / "images", checkpoint, seed=3)


def _reference(root: Path, checkpoint: Path, batch: TrainBatch) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Log-probs and gradients by checkpoint names, of transformers' class; and positions [3, T], sample by sample."""
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    config = read_hf_config(str(checkpoint))
    processor, folder = family_of(config).images(config, checkpoint), ImageFolder(root / "images")
    log_probs, positions = [], []
    for sample in batch.samples:
        tokens = torch.from_numpy(sample.tokens).long()[None]
        first, given = sample.num_tokens - sample.response_length, {}
        kinds = torch.zeros_like(tokens, dtype=torch.int32)
        kinds[:, :first] = (tokens == IMAGE_ID)[:, :first].int()
        if sample.images:
            pixels, grids = map(torch.from_numpy, processor.patches([folder.read(d) for d in sample.images]))
            given = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
            positions.append(model.model.get_rope_index(tokens, kinds, image_grid_thw=grids)[0].squeeze(1).numpy())
        else:
            positions.append(np.tile(np.arange(sample.num_tokens), (3, 1)))
        # transformers would take a placeholder that was sampled for one of an image: what stands there is said aloud
        embedded = model.get_input_embeddings()(tokens)
        if given:
            seen = model.model.get_image_features(given["pixel_values"], given["image_grid_thw"], return_dict=True)
            mask = kinds.bool()
            embedded = embedded.masked_scatter(mask[..., None], torch.cat(list(seen.pooler_output)).to(embedded.dtype))
            out = model.model.language_model(
                inputs_embeds=embedded,
                position_ids=torch.from_numpy(positions[-1])[:, None],
                visual_pos_masks=mask,
                deepstack_visual_embeds=[f if torch.is_tensor(f) else torch.cat(f) for f in seen.deepstack_features],
            )
        else:
            out = model.model.language_model(inputs_embeds=embedded)
        every = torch.log_softmax(model.lm_head(out.last_hidden_state)[0].float(), -1)
        log_probs.append(every[first - 1 : -1].gather(1, tokens[0, first:, None]).squeeze(1))
    masks = [torch.from_numpy(s.loss_mask) for s in batch.samples]
    loss = -sum((lp * m).sum() for lp, m in zip(log_probs, masks, strict=True)) / sum(m.sum() for m in masks)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and "visual" not in n}
    return [lp.detach().numpy() for lp in log_probs], gradients, positions


def test_log_probs_and_gradients_with_images_are_those_of_transformers(
    world: tuple[Path, Path, TrainBatch], ranks: Ranks
) -> None:
    root, checkpoint, batch = world
    want, gradients, _ = _reference(root, checkpoint, batch)
    ((got, own),) = ranks.run(_measure, 1, checkpoint, root, batch, {})
    # Deep layers of the tower are seen again where layers are computed again.
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ((_, recomputed),) = ranks.run(_measure, 1, checkpoint, root, batch, again)
    assert all(torch.equal(recomputed[name], own[name]) for name in own), "with --recompute-granularity full"
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert np.abs(np.asarray(a) - b).max() < 1e-5, f"sample {number}: log-probs differ from transformers'"
    assert own.keys() == gradients.keys()
    for name, expected in gradients.items():
        error = float((own[name] - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
        assert error < TOLERANCE, f"gradient of {name} differs by {error:.1e} of its largest entry"
    source, written = load_file(checkpoint / "model.safetensors"), load_file(root / "hf" / "model.safetensors")
    assert written.keys() == source.keys() and all(torch.equal(written[n], source[n]) for n in source)
    assert (root / "hf" / "preprocessor_config.json").is_file()


def test_positions_of_tokens_are_those_of_transformers(world: tuple[Path, Path, TrainBatch]) -> None:
    root, checkpoint, batch = world
    config = read_hf_config(str(checkpoint))
    processor, folder = family_of(config).images(config, checkpoint), ImageFolder(root / "images")
    for sample, want in zip(batch.samples, _reference(root, checkpoint, batch)[2], strict=True):
        if not sample.images:
            continue
        _, grids = processor.patches([folder.read(digest) for digest in sample.images])
        starts = placeholder_starts(sample, processor.token_id, processor.tokens_of(grids))
        assert np.array_equal(processor.positions(starts, grids, sample.num_tokens), want)


def test_images_may_stand_behind_the_prompt_and_sampled_placeholders_are_text(
    world: tuple[Path, Path, TrainBatch],
) -> None:
    """Law: what a turn of user code shows is an image, what the model samples is not."""
    _, _, batch = world
    place, text = IMAGE_ID, 50
    tokens = np.asarray([text, place, place, text, place, text, place, place, place], np.int32)
    versions = np.asarray([1, 1, NOT_SAMPLED, NOT_SAMPLED, NOT_SAMPLED, 1], np.int32)  # of the last six
    log_probs = np.zeros(6, np.float32)
    loss_mask = (versions != NOT_SAMPLED).astype(batch.samples[0].loss_mask.dtype)
    own = {"tokens": tokens, "token_versions": versions, "rollout_log_probs": log_probs, "loss_mask": loss_mask}
    sample = dataclasses.replace(batch.samples[0], **own)
    assert placeholder_starts(sample, place, np.asarray([2, 2])).tolist() == [1, 6]
    with pytest.raises(DataError, match="4 placeholders"):
        placeholder_starts(sample, place, np.asarray([2, 3]))


@pytest.mark.slow
def test_the_gradient_does_not_depend_on_the_partition(world: tuple[Path, Path, TrainBatch], ranks: Ranks) -> None:
    root, checkpoint, batch = world
    ((_, whole),) = ranks.run(_measure, 1, checkpoint, root, batch, {})
    split, _ = ranks.run(_measure, 2, checkpoint, root, batch, {})
    for name, expected in whole.items():
        error = float((split[1][name] - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
        assert error < TOLERANCE, f"gradient of {name} differs by {error:.1e} on two ranks"


@pytest.mark.slow
def test_other_images_give_other_log_probs_and_the_wrong_ones_are_refused(
    world: tuple[Path, Path, TrainBatch], ranks: Ranks
) -> None:
    root, checkpoint, batch = world
    one = batch.samples[2]
    red, blue = (ImageFolder(root / "images").put(drawn(40, 24, [colour])) for colour in ((220, 0, 0), (0, 0, 220)))
    counts = 15  # 40 x 24 pixels, one token for 8 x 8
    ids = np.concatenate([one.tokens[:5], np.full(counts, IMAGE_ID), one.tokens[-one.response_length - 3 :]])
    seen = [
        dataclasses.replace(one, tokens=ids.astype(np.int32), images=(digest,), index=index)
        for index, digest in enumerate((red, blue))
    ]
    ((got, _),) = ranks.run(_measure, 1, checkpoint, root, with_samples(batch, seen), {})
    assert np.abs(np.asarray(got[0]) - np.asarray(got[1])).max() > 1e-3
    with pytest.raises(AssertionError, match=r"placeholders that no engine sampled, .* need \[15\]"):
        wrong = dataclasses.replace(seen[0], tokens=np.delete(seen[0].tokens, 5))
        ranks.run(_measure, 1, checkpoint, root, with_samples(batch, [wrong]), {})


SPLITS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_text_alone_is_trained_in_every_layout(split: str, tmp_path: Path, ranks: Ranks) -> None:
    checkpoint, text = write_vision_model(tmp_path / "model", num_hidden_layers=4), {"multimodal_keys": None}
    batch = random_batch(seed=3)
    want, gradients, _ = _reference(tmp_path, checkpoint, batch)
    for number, megatron in enumerate(({}, SPLITS[split])):
        got, own = ranks.run(_measure, 1 + number, checkpoint, tmp_path / str(number), batch, megatron, text)[0]
        assert max(np.abs(np.asarray(a) - b).max() for a, b in zip(got, want, strict=True)) < 1e-5
        for name, expected in gradients.items():
            error = float((own[name] - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
            assert error < TOLERANCE, f"gradient of {name} differs by {error:.1e}"
