"""A tool environment of up to three turns: `python -m examples.run chat_tools`. The tool is a Python function."""

from slime.rollout.context import current

FLAGS = "--custom-generate-function-path examples.chat_tools:generate"


def rows():
    return [{"prompt": f"What is {a} + {b}?", "label": str(a + b)} for a in range(2, 10) for b in range(2, 10)]


def add(a: float, b: float) -> float:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def generate(args, sample, sampling_params):
    chat, messages = current().chat, [{"role": "user", "content": sample.prompt}]
    for _ in range(3):
        reply = await chat.ask(messages, tools=[add])
        messages += [reply.message, *await chat.run(reply, [add])]
        if not reply.calls:
            break
    return chat.samples(sample, reward=float(sample.label in reply.text))
