"""Law: a model that sees images is trained like any other: engine and trainer read the same tokens and see the same.

A tiny Qwen3-VL of random weights is asked for the colour of pictures; two steps of GRPO, evaluation and an export.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from slime.core.files import ImageFolder
from slime.observability.sinks import read_jsonl
from tests.support.e2e import RealRun, recorded_groups, started_and_finished
from tests.support.vision import IMAGE_ID, write_colours, write_vision_model

pytestmark = pytest.mark.slow
NUM_STEPS, LIMIT = 2, 1e-4
"""Worst gap of a log-prob, in float32."""


WAYS: dict[str, tuple[str, list[str]]] = {
    "here": ("train.py", []),
    "workers": (
        "train_async.py",
        [
            *("--rollout-num-workers", "2", "--actor-num-gpus-per-node", "2", "--pause-generation-mode", "retract"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "256", "--update-weight-transport", "distributed"),
        ],
    ),
}
"""Name -> the loop, and who works on groups and batches."""


@pytest.fixture(scope="module", params=WAYS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RealRun]:
    script, more = WAYS[request.param]
    root = tmp_path_factory.mktemp("vision-run")
    model, data = write_vision_model(root / "model"), write_colours(root / "data")
    flags = [
        *("--hf-checkpoint", model, "--prompt-data", data, "--input-key", "problem", "--label-key", "answer"),
        *("--multimodal-keys", '{"image": "images"}', "--apply-chat-template", "--no-bf16"),
        *("--custom-rm-path", "recipes.tiny.tasks:digit_fraction"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "16"),
        *("--num-rollout", str(NUM_STEPS), "--lr", "1e-3", "--lr-decay-style", "constant", "--use-kl-loss"),
        *("--eval-prompt-data", "held", f"{data}@[0:4]", "--eval-interval", "1"),
        *("--save-debug-rollout-data", root / "rollouts" / "{rollout_id}.jsonl", "--mismatch-limit", str(LIMIT)),
        *("--save-hf", root / "hf-{rollout_id}", "--save", root / "save", "--save-interval", "1"),
    ]
    return root, started_and_finished(root / "run", [*flags, *more], script=script)


def test_engine_and_trainer_agree_on_what_was_sampled_of_images(run: tuple[Path, RealRun]) -> None:
    _, real = run
    lines = read_jsonl(real.run_dir / "metrics.jsonl")
    # In the asynchronous loop a batch is older than the trainer, and a probe of the newest samples tells.
    gaps = [value for line in lines for name, value in line.items() if name.endswith("logprob_abs_diff_max")]
    assert len(gaps) >= NUM_STEPS and 0 < max(gaps) <= LIMIT, gaps
    assert real.left() == []


def test_samples_have_the_tokens_of_their_images_and_images_are_kept_once(run: tuple[Path, RealRun]) -> None:
    root, real = run
    kept = ImageFolder.of_run(str(real.run_dir))
    groups = [
        group
        for step in range(NUM_STEPS)
        for group in recorded_groups(str(root / "rollouts" / "{rollout_id}.jsonl"), step)
    ]
    digests = {digest for group in groups for sample in group for digest in sample.images}
    assert len(groups) == 4 * NUM_STEPS and len(digests) >= 4
    for sample in (sample for group in groups for sample in group):
        prompt = sample.tokens[: sample.prompt_length]
        assert prompt.count(IMAGE_ID) >= 4 * len(sample.images) > 0
        assert sample.response_length
    assert all(kept.read(digest).startswith(b"\x89PNG") for digest in digests)


def test_the_export_is_a_whole_checkpoint(run: tuple[Path, RealRun]) -> None:
    root, _ = run
    source, folder = load_file(root / "model" / "model.safetensors"), root / f"hf-{NUM_STEPS - 1}"
    written = load_file(folder / "model.safetensors")
    assert written.keys() == source.keys()
    same = {name for name in source if torch.equal(written[name], source[name])}
    assert {name for name in source if "visual" in name} <= same, "the tower is frozen"
    assert "model.language_model.embed_tokens.weight" not in same, "the language model is trained"
    assert json.loads((folder / "preprocessor_config.json").read_text())["patch_size"] == 4
    transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder)


def test_an_agent_sees_pictures_in_its_prompt_and_in_what_its_tool_returns(tmp_path: Path) -> None:
    """Law: over HTTP and by `current().chat`, engine and trainer agree, and a sample has its own turns' images."""
    model, data = write_vision_model(tmp_path / "model"), write_colours(tmp_path / "data")
    flags = [
        *("--hf-checkpoint", model, "--prompt-data", data, "--input-key", "problem", "--label-key", "answer"),
        *("--multimodal-keys", '{"image": "images"}', "--no-bf16", "--mismatch-limit", str(LIMIT)),
        *("--custom-generate-function-path", "tests.support.plugins.seeing_agent.generate"),
        *("--custom-rm-path", "recipes.tiny.tasks:digit_fraction", "--lr", "1e-3", "--lr-decay-style", "constant"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "12"),
        *("--num-rollout", str(NUM_STEPS), "--save-debug-rollout-data", tmp_path / "rollouts" / "{rollout_id}.jsonl"),
    ]
    real = started_and_finished(tmp_path / "run", flags)
    lines = read_jsonl(real.run_dir / "metrics.jsonl")
    gaps = [value for line in lines for name, value in line.items() if name.endswith("logprob_abs_diff_max")]
    assert len(gaps) == NUM_STEPS and 0 < max(gaps) <= LIMIT, gaps
    recorded = str(tmp_path / "rollouts" / "{rollout_id}.jsonl")
    groups = [group for step in range(NUM_STEPS) for group in recorded_groups(recorded, step)]
    assert len(groups) == 4 * NUM_STEPS and real.left() == []
    numbers = set()
    for sample in (sample for group in groups for sample in group):
        agent, versions = sample.metadata["agent"], [-1] * sample.prompt_length + list(sample.token_versions or ())
        shown = [token == IMAGE_ID and version < 0 for token, version in zip(sample.tokens, versions, strict=True)]
        num_shown = sum(now and not before for before, now in itertools.pairwise([False, *shown]))
        assert num_shown == len(sample.images) and sample.response_length
        numbers.add((agent["branch"], agent["turns"], len(sample.images)))
    assert {("first", 3, 3), ("first", 3, 4), ("compaction", 1, 2), ("compaction", 1, 3)} <= numbers, numbers
    assert ("sub-agent", 1, 0) in numbers, "a conversation without images"


def test_no_engine_tokenised_a_prompt_again(run: tuple[Path, RealRun]) -> None:
    _, real = run
    logs = "".join(path.read_text(errors="replace") for path in (real.run_dir / "logs").glob("*"))
    assert not re.search(r"falling back to decode\+retokenize", logs)
