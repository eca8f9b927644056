"""Laws of images in agents' conversations: an image may come in any turn, and a sample has those of its own path.

transformers' own processor and template are the oracle of ids and patches.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from slime.agent.messages import Message, Picture
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate, Placed
from slime.core.errors import DataError
from slime.core.files import ImageFolder
from slime.core.sample import Sample
from slime.data import images as limits
from slime.data.chat import ChatRenderer
from slime.data.images import ConversationImages
from slime.rollout.client.call import Generation
from tests.support.agent_room import END, Room, agent_room
from tests.support.chat_templates import with_template
from tests.support.vision import (
    CHATML_TEMPLATE,
    COLOURS,
    IMAGE,
    conversation_images,
    data_uri,
    drawn,
    published_processor,
    small_processor,
)

RED, BLUE = (drawn(40, 24, [COLOURS[name]]) for name in ("red", "blue"))
WIDE = drawn(56, 20, [COLOURS["green"], COLOURS["white"]])
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@cache
def seeing_tokenizer() -> Any:
    return with_template("qwen3", CHATML_TEMPLATE)


def in_room(folder: Path, work: Callable[[Room], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        async with agent_room(template=CHATML_TEMPLATE, image_folder=folder, **settings) as room:
            return await work(room)

    return asyncio.run(run())


def samples_of(room: Room) -> list[Sample]:
    return room.adapter.finish_session(room.key, Sample(index=0, group_index=0), reward=1.0)


# ---- the three APIs, with their own SDKs ---------------------------------------------------------------------------


async def over_chat(room: Room) -> None:
    shown: Any = {"type": "image_url", "image_url": {"url": data_uri(RED), "detail": "high"}}
    result: Any = [{"type": "text", "text": "Here:"}, {"type": "image_url", "image_url": {"url": data_uri(WIDE)}}]
    async with openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key=room.key, max_retries=0) as client:
        history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is "}, shown]}]
        for more in (lambda call: {"role": "tool", "tool_call_id": call, "content": result}, None):
            made = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
            message = made.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            if more is not None and message.tool_calls:
                history.append(more(message.tool_calls[0].id))
        history.append({"role": "user", "content": [shown, {"type": "text", "text": "again?"}]})
        await client.chat.completions.create(model="m", messages=history, tools=TOOLS)


async def over_responses(room: Room) -> None:
    shown: Any = {"type": "input_image", "image_url": data_uri(RED), "detail": "auto"}
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    output = [{"type": "input_text", "text": "Here:"}, {"type": "input_image", "image_url": data_uri(WIDE)}]
    async with openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key=room.key, max_retries=0) as client:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "What is "}, shown]}]
        for number in range(2):
            made = await client.responses.create(model="m", input=items, tools=tools)
            items += [item.model_dump(exclude_none=True) for item in made.output]
            if not number:
                items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": output})
        items.append({"role": "user", "content": [shown, {"type": "input_text", "text": "again?"}]})
        await client.responses.create(model="m", input=items, tools=tools)


def claude_image(file: bytes) -> Any:
    data = base64.b64encode(file).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


async def over_messages(room: Room) -> None:
    tools: Any = [{"name": "look", "description": "", "input_schema": {"type": "object"}}]
    async with anthropic.AsyncAnthropic(base_url=room.url, api_key=room.key, max_retries=0) as client:
        asked = [{"type": "text", "text": "What is "}, claude_image(RED)]
        history: list[Any] = [{"role": "user", "content": asked}]
        for number in range(2):
            counted = await client.messages.count_tokens(model="m", messages=history, tools=tools)
            made = await client.messages.create(model="m", max_tokens=99, messages=history, tools=tools)
            assert counted.input_tokens == made.usage.input_tokens
            history.append({"role": "assistant", "content": [block.model_dump() for block in made.content]})
            if not number:
                content = [{"type": "text", "text": "Here:"}, claude_image(WIDE)]
                use = history[-1]["content"][-1]["id"]
                result = {"type": "tool_result", "tool_use_id": use, "content": content}
                history.append({"role": "user", "content": [result]})
        history.append({"role": "user", "content": [claude_image(RED), {"type": "text", "text": "again?"}]})
        await client.messages.create(model="m", max_tokens=99, messages=history, tools=tools)


def the_conversation() -> list[dict[str, Any]]:
    """What each of the functions above says, in transformers' form."""

    def opened(file: bytes) -> Any:
        return {"type": "image", "image": Image.open(io.BytesIO(file))}

    return [
        {"role": "user", "content": [{"type": "text", "text": "What is "}, opened(RED)]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": [{"type": "text", "text": "Here:"}, opened(WIDE)]},
        {"role": "assistant", "content": "Green."},
        {"role": "user", "content": [opened(RED), {"type": "text", "text": "again?"}]},
        {"role": "assistant", "content": "Red."},
    ]


@pytest.mark.parametrize("talk", [over_chat, over_responses, over_messages])
def test_a_conversation_has_the_ids_and_the_patches_of_transformers_own_processor(
    talk: Callable[[Room], Awaitable[None]], tmp_path: Path
) -> None:
    """Law: images of a user and of a tool, in the first turn and later: one sample with the oracle's ids and patches."""

    async def work(room: Room) -> None:
        room.says(CALL, "Green.", "Red.")
        await talk(room)
        assert [len(body.get("image_data", ())) for body in room.model.requests] == [1, 2, 3]
        [sample] = samples_of(room)
        text = room.tokenizer.apply_chat_template(the_conversation(), tools=TOOLS, tokenize=False)
        files = [Image.open(io.BytesIO(file)) for file in (RED, WIDE, RED)]
        oracle = published_processor(room.tokenizer)(text=[text], images=files, return_tensors="np")
        ids = oracle["input_ids"][0].tolist()
        assert sample.tokens == ids[: len(sample.tokens)] and len(ids) - len(sample.tokens) == 1, "a line break"
        kept = [ImageFolder(tmp_path).read(digest) for digest in sample.images]
        patches, grids = small_processor(room.tokenizer).patches(kept)
        assert np.array_equal(patches, oracle["pixel_values"]) and np.array_equal(grids, oracle["image_grid_thw"])
        assert sample.images[0] == sample.images[2] != sample.images[1]
        assert room.adapter._template.images is not None and len(list(tmp_path.iterdir())) == 2
        assert sample.response.count(IMAGE) == 2, "the text has one placeholder for each image"

    in_room(tmp_path, work)
