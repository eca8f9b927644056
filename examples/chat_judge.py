"""A judge scores each answer: `python -m examples.run chat_judge`. It reads with its own chat template.

The judge is the model called "judge" in `--sglang-config`, or the policy itself without such a model.
"""

from examples.chat_tools import rows  # noqa: F401
from slime.rollout.context import current

FLAGS = "--custom-generate-function-path examples.chat_judge:generate"
QUESTION = "The question was: {}\nThe right answer is {}.\nA student answered: {}\nIs the student right? Say yes or no."


async def generate(args, sample, sampling_params):
    chat, models = current().chat, current().models
    reply = await chat.ask([{"role": "user", "content": sample.prompt}])
    judge = models["judge" if "judge" in models else "default"]
    verdict = await judge.chat(QUESTION.format(sample.prompt, sample.label, reply.text), max_new_tokens=4)
    return chat.samples(sample, reward=float("yes" in verdict.text.lower()))
