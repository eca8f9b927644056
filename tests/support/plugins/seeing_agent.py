"""An agent that sees: its prompt has images, and so has what its tool returns. Half of the executions use OpenAI's SDK,
the others `current().chat`.
"""

from __future__ import annotations

import asyncio
import io
from typing import Any

from openai import AsyncOpenAI
from PIL import Image

from slime.agent.execution import execution
from slime.core.sample import Sample
from slime.public.http import encode_image_for_rollout_engine
from slime.rollout.context import current
from tests.support.vision import COLOURS, drawn

CALL_ID = "call_0"


def photograph(text: str) -> Image.Image:
    """The tool: a picture whose size and colour follow from what the model said."""
    colour = COLOURS[list(COLOURS)[len(text) % len(COLOURS)]]
    return Image.open(io.BytesIO(drawn(16 + 8 * (len(text) % 3), 24, [colour])))


async def over_http(sample: Any, sampling_params: dict[str, Any]) -> list[Sample]:
    images = iter(sample.multimodal_inputs["images"])

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        return part if part["type"] == "text" else as_part(next(images))

    def as_part(image: Any) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": encode_image_for_rollout_engine(image)}}

    async with execution(sampling_params) as agent:
        async with AsyncOpenAI(base_url=f"{agent.url}/v1", api_key=agent.key, max_retries=0) as client:

            async def ask(messages: list[Any]) -> Any:
                made = await client.chat.completions.create(model="m", messages=messages)
                return made.choices[0].message.model_dump(exclude_none=True)

            begun: list[Any] = [{**m, "content": [sent(part) for part in m["content"]]} for m in sample.prompt]
            messages = list(begun)
            for number in range(2):
                said = await ask(messages)
                result = [as_part(photograph(said["content"])), {"type": "text", "text": f"photo {number}"}]
                messages += [said, {"role": "tool", "tool_call_id": CALL_ID, "content": result}]
            await ask(messages)
            await ask([*begun, {"role": "user", "content": [as_part(photograph("short"))]}])
            await ask([{"role": "user", "content": "in short: a photo"}])
        return agent.samples(sample)


async def by_chat(sample: Any) -> list[Sample]:
    chat, messages = current().chat, list(sample.prompt)
    for number in range(2):
        reply = await chat.ask(messages)
        result = [{"type": "image", "image": photograph(reply.text)}, {"type": "text", "text": f"photo {number}"}]
        messages += [reply.message, {"role": "tool", "tool_call_id": CALL_ID, "content": result}]
    await chat.ask(messages)
    shown = [{"type": "image", "image": photograph("short")}]
    await chat.ask([*sample.prompt, {"role": "user", "content": shown}])
    await chat.ask("in short: a photo")
    return chat.samples(sample)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Sample]:
    await asyncio.sleep(0)
    return await (by_chat(sample) if sample.index % 2 else over_http(sample, sampling_params))
