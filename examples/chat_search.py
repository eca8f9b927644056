"""A search before the answer: `python -m examples.run chat_search`. The reward is the F1 of the answer's words."""

from examples.agent_search import index, rows  # noqa: F401
from slime.core.sample import Sample
from slime.rewards.graders.answers import TokenF1
from slime.rollout.context import current

FLAGS = "--custom-generate-function-path examples.chat_search:generate"


def search(query: str) -> str:
    """Finds passages that contain these words.

    Args:
        query: The words.
    """
    return "\n".join(index(None).search(query))


async def generate(args, sample, sampling_params):
    chat, messages = current().chat, list(sample.prompt)
    reply = await chat.ask(messages, tools=[search])
    if reply.calls:
        reply = await chat.ask([*messages, reply.message, *await chat.run(reply, [search])])
    return chat.samples(sample, reward=TokenF1().grade(Sample(response=reply.text, label=sample.label), 1.0))
