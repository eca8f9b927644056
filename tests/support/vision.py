"""A tiny Qwen3-VL of random weights with its tokenizer and image processor, and rows with images that PIL draws."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.core.files import ImageFolder
from slime.data.images import ConversationImages
from tests.support import tiny
from tests.support.tiny import SHAPE, VOCAB_SIZE, write_tokenizer

VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL_TOKENS = (*tiny.SPECIAL_TOKENS, VISION_START, VISION_END, IMAGE, VIDEO)
VISION_START_ID, VISION_END_ID, IMAGE_ID, VIDEO_ID = (
    SPECIAL_TOKENS.index(mark) for mark in (VISION_START, VISION_END, IMAGE, VIDEO)
)
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_PARTS = (
    "{% macro parts(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' or 'image' in part %}{% set seen.count = seen.count + 1 %}"
    "{% if add_vision_id %}Picture {{ seen.count }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
CHATML_TEMPLATE = (
    "{% set seen = namespace(count=0) %}" + _PARTS + "{% if tools %}{{ '<|im_start|>system\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' ~ parts(m.content) ~ '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'system' %}{{ '<|im_start|>system\n' ~ m.content ~ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ parts(m.content) }}{% for c in m.tool_calls or [] %}"
    "{% set c = c.function or c %}"
    "{{ '<tool_call>\n{\"name\": \"' ~ c.name ~ '\", \"arguments\": ' ~ c.arguments | tojson ~ '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes images, tools, and results of tools in the form of Qwen3-VL; a system message has text only."""
PATCH, MERGE = 4, 2
SIDE = PATCH * MERGE
"""Pixels of an image that one token stands for, along each side."""
VISION_SHAPE: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": SHAPE["hidden_size"],
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4 * SIDE * SIDE, "longest_edge": 64 * SIDE * SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_vision_model(
    directory: Path, *, seed: int = 0, tied: bool = False, samples_media: bool = False, **overrides: Any
) -> Path:
    """A float32 checkpoint of `Qwen3VLForConditionalGeneration`; `overrides` are of the language model.

    `samples_media`: its logits of the placeholders and of the tokens around them are wide, so it samples them often.
    """
    import torch
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {**SHAPE, "num_hidden_layers": 3, "head_dim": 32, "rope_parameters": rope, "tie_word_embeddings": tied}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.Qwen3VLConfig(
            text_config={**text, **overrides},
            vision_config=VISION_SHAPE,
            tie_word_embeddings=tied,
            image_token_id=IMAGE_ID,
            video_token_id=VIDEO_ID,
            vision_start_token_id=VISION_START_ID,
            vision_end_token_id=VISION_END_ID,
        )
        model = transformers.Qwen3VLForConditionalGeneration(config).to(torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                low = 0.5 if name.endswith("weight") else -0.2
                torch.nn.init.uniform_(parameter, low, low + (1.0 if low > 0 else 0.4))
            else:  # wide ones, so that an image changes what is said of it
                torch.nn.init.normal_(parameter, std=0.15 if "visual" in name else 0.08)
        if samples_media:
            model.lm_head.weight.data[[VISION_START_ID, VISION_END_ID, IMAGE_ID, VIDEO_ID]] *= 6.0
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_processor(directory)
    return directory


def write_processor(directory: Path) -> None:
    """Tokenizer, chat template and the settings of the image and video processors."""
    write_tokenizer(directory, special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE)
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    video = {**IMAGE_PROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))


def small_processor(tokenizer: Any) -> Any:
    """The `ImageProcessor` of a tokenizer that knows Qwen's placeholders, with the tiny model's settings."""
    import tempfile

    from slime.models.qwen3_vl.processor import Qwen3VLImages

    config = {
        "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE),
        "vision_config": {"spatial_merge_size": MERGE},
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
        return Qwen3VLImages(config, Path(folder))


def conversation_images(tokenizer: Any, folder: Path) -> ConversationImages:
    """Images of conversations in the ids of a tokenizer, stored in `folder`."""
    others = [tokenizer.convert_tokens_to_ids(VIDEO)]
    return ConversationImages(small_processor(tokenizer), ImageFolder(folder), others)


def published_processor(tokenizer: Any) -> Any:
    """transformers' own processor for text and images, with the tiny model's settings."""
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = {name: value for name, value in IMAGE_PROCESSOR.items() if not name.endswith(("_type", "_class"))}

    class ForImages(Qwen3VLProcessor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, given: Any) -> None:
            """Would require a processor of videos, and with it torchvision."""

    return ForImages(Qwen2VLImageProcessorPil(**settings), tokenizer, chat_template=tokenizer.chat_template)


def data_uri(file: bytes, form: str = "png") -> str:
    return f"data:image/{form};base64,{base64.b64encode(file).decode()}"


def drawn(width: int, height: int, colours: Sequence[tuple[int, int, int]], form: str = "PNG") -> bytes:
    """The bytes of an image: vertical stripes of `colours`."""
    from PIL import Image

    image = Image.new("RGB", (width, height))
    for x in range(width):
        colour = colours[x * len(colours) // width]
        for y in range(height):
            image.putpixel((x, y), colour)
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


COLOURS = {"red": (220, 30, 20), "green": (30, 200, 40), "blue": (20, 40, 220), "white": (250, 250, 250)}


def picture(seed: int) -> bytes:
    """A PNG whose size and colours follow from `seed`."""
    import numpy as np

    rng = np.random.default_rng(seed)
    width, height = (int(n) for n in rng.integers(2 * SIDE, 7 * SIDE, 2))
    colours = [tuple(int(c) for c in rng.integers(0, 256, 3)) for _ in range(int(rng.integers(1, 5)))]
    return drawn(width, height, colours)


def seeing_batch(folder: Path, checkpoint: Path, *, seed: int = 0) -> Any:
    """A `TrainBatch` of four groups of two: without images, with one, with two, and with two in another order.

    A response of each group samples the placeholder's id, which is text there. Images lie in `folder`.
    """
    import numpy as np

    from slime.core.batch import TrainBatch
    from slime.core.hf_config import read_hf_config
    from slime.models import family_of
    from tests.support.training import random_batch, with_samples

    config = read_hf_config(str(checkpoint))
    processor, kept = family_of(config).images(config, checkpoint), ImageFolder(folder)
    pictures = [picture(seed + n) for n in range(2)]
    digests = [kept.put(png) for png in pictures]
    counts = processor.tokens_of(processor.patches(pictures)[1])
    batch = random_batch(seed=seed)
    samples = []
    for sample, which in zip(batch.samples, [(), (), (0,), (0,), (0, 1), (0, 1), (1, 0), (1, 0)], strict=True):
        rng = np.random.default_rng(seed + sample.group_index)  # the prompts of a group are equal
        ids = [2, *rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, 3)]
        for image in which:
            ids += [VISION_START_ID, *[IMAGE_ID] * counts[image], VISION_END_ID]
            ids += [*rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, 2)]
        response = sample.tokens[-sample.response_length :].copy()
        if sample.index % 2:
            response[len(response) // 2] = IMAGE_ID
        tokens = np.array([*ids, *response], np.int32)
        samples.append(dataclasses.replace(sample, tokens=tokens, images=tuple(digests[n] for n in which)))
    assert isinstance(batch, TrainBatch)
    return with_samples(batch, samples)


def write_colours(folder: Path) -> Path:
    """Rows of questions for colours in a parquet file, images as Hugging Face data sets have them: bytes and a path."""
    import pyarrow
    import pyarrow.parquet

    rows = []
    for number in range(12):
        names = [list(COLOURS)[(number + n) % len(COLOURS)] for n in range(1 + number % 2)]
        form, width = ("PNG", "JPEG")[number % 2], 24 + 8 * (number % 4)
        files = [drawn(width, 16 + 4 * n, [COLOURS[name]], form) for n, name in enumerate(names)]
        images = [{"bytes": file, "path": None} for file in files]
        question = "".join(f"<image>{n}" for n in range(len(names))) + "what?"
        rows.append({"problem": question, "answer": " ".join(names), "images": images})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "colours.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
