"""Reinforcement learning of a language model on checkable problems: the whole method in one process.

    python examples/one_file.py                  # a tiny random model learns max(3,8)=8, in seconds, on a CPU
    python examples/one_file.py <folder>         # your own Hugging Face folder, with its tokenizer

Each iteration of the loop draws prompts, samples several answers to each prompt from the policy, grades the answers,
compares each answer with the other answers to its prompt, and updates the weights so that better answers become more
likely. There is no Ray, no server and no Megatron. slime has a package for each part, because separate engines sample
and train a large model:

    here                      there
    problems                  datasets: slime/data/; issuing prompts, and the ledger: slime/buffer/
    sample_group              SGLang servers: slime/rollout/ sends requests, slime/serving/ runs the servers
    reward                    slime/rewards/, in processes that can be killed
    Answer                    Sample (slime/core/sample.py), and TrainSample (slime/core/batch.py) in training
    group_advantages          slime/algorithms/advantages/
    token_weights             slime/algorithms/aggregation/, over all ranks of the step
    log_probs                 slime/training/model/: packed, sharded over the vocabulary, layers and sequence
    policy_loss, train        slime/algorithms/policy_loss/ and slime/training/step/
    MasterAdamW               Megatron's distributed optimizer
    (one set of weights)      slime/weights/: sends weights to the engines after every step, and compares digests
    main                      train.py

A test trains the same checkpoint on the same answers with `train` and with the Megatron backend. Loss, gradient norm
and new weights are equal up to rounding in float32 (tests/contract/training/test_one_file.py).
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """The settings of a run, named like the flags of train.py."""

    rollout_batch_size: int = 16
    """Prompts per rollout."""
    n_samples_per_prompt: int = 16
    """Answers to each prompt; together they are a group."""
    global_batch_size: int = 128
    """Answers per optimizer step. With these defaults, there are two optimizer steps per rollout."""
    micro_batch_size: int = 64
    """Answers per forward and backward pass. This affects only memory."""
    rollout_max_response_len: int = 3
    """Maximum tokens of an answer."""
    rollout_temperature: float = 1.0
    """Divides the logits in sampling and in training, so that the trained policy is the sampling policy."""
    eps_clip: float = 0.2
    """A token whose probability is below 1 - eps_clip times its old probability is not pushed down further."""
    eps_clip_high: float = 0.28
    """A token whose probability is above 1 + eps_clip_high times its old probability is not pushed up further."""
    lr: float = 2e-3
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    clip_grad: float = 1.0
    """Largest norm of the gradient of a step."""


# --- problems and their grader ----------------------------------------------------------------------------------------


def problems(seed: int) -> Iterator[tuple[str, str]]:
    """Yields endless pairs (prompt, label); the label is the larger of two digits."""
    rng = random.Random(seed)
    while True:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        yield f"max({a},{b})=", str(max(a, b))


def reward(response: str, label: str) -> float:
    """Returns 1 if the first number of the response is correct, else 0."""
    number = re.search(r"\d+", response)
    return float(number is not None and number[0] == label)


class Characters:
    """The tokenizer of the tiny model: a token is a character. It has the methods of a Hugging Face tokenizer."""

    alphabet = "0123456789max(,)= "
    eos_token_id = len(alphabet)

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(character) for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.alphabet[i] for i in ids if i < self.eos_token_id)


# --- generation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One sequence to train on: T tokens, the last R of which are the response."""

    tokens: Tensor
    """[T] int64."""
    mask: Tensor
    """[R] float32: 1 where a token is trained. Tool output inside a response would have 0."""
    old_log_probs: Tensor
    """[R] float32: log-prob of each response token under the policy that sampled it."""
    reward: float
    group: int
    """Identifies the prompt; answers are compared within a group."""


@torch.no_grad()
def sample_group(model: Any, prompt: Sequence[int], eos: int | None, settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """Samples responses to one prompt; returns (ids [R], log-probs [R]) of each, up to its end token.

    The sampled ids are kept, because decoding a response and encoding it again may give different ids, whose log-probs
    are unknown.
    """
    read, cache = torch.tensor([list(prompt)] * settings.n_samples_per_prompt, device=model.device), None
    ids, log_probs = [], []
    for _ in range(settings.rollout_max_response_len):
        out = model(read, past_key_values=cache, use_cache=True)
        scores = (out.logits[:, -1].float() / settings.rollout_temperature).log_softmax(-1)
        read, cache = torch.multinomial(scores.exp(), 1), out.past_key_values
        ids.append(read)
        log_probs.append(scores.gather(1, read))
    all_ids, all_log_probs = torch.cat(ids, 1), torch.cat(log_probs, 1)
    ended = (all_ids == (-1 if eos is None else eos)).int()  # -1 is not a token id
    lengths = (ended.cumsum(1) == ended).sum(1).tolist()  # up to and including the first end token, which was sampled
    return [(all_ids[i, :n], all_log_probs[i, :n]) for i, n in enumerate(lengths)]


def rollout(model: Any, tokenizer: Any, asked: Sequence[tuple[str, str]], settings: Settings) -> list[Answer]:
    """Samples and grades answers to each (prompt, label)."""
    answers = []
    for group, (text, label) in enumerate(asked):
        prompt = tokenizer.encode(text)
        for ids, log_probs in sample_group(model, prompt, tokenizer.eos_token_id, settings):
            score = reward(tokenizer.decode(ids.tolist(), skip_special_tokens=True), label)
            tokens = torch.cat([torch.tensor(prompt, device=ids.device), ids])
            answers.append(Answer(tokens, torch.ones_like(log_probs), log_probs, score, group))
    return answers


# --- the algorithm ----------------------------------------------------------------------------------------------------


def group_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """GRPO (Shao et al. 2024, arXiv:2402.03300): each reward's distance from its group's mean, in standard deviations.

    The group's mean replaces a critic. A group with equal rewards has no gradient.
    """
    scores, group_of = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
    out = torch.zeros_like(scores)
    for group in group_of.unique():
        own = scores[group_of == group]
        if own.max() > own.min():
            out[group_of == group] = (own - own.mean()) / (own.std() + 1e-6)
    return out.tolist()


def token_weights(masks: Sequence[Tensor]) -> list[Tensor]:
    """Returns each token's weight in the loss of an optimizer step: a mean over answers of the mean over their tokens.

    The denominators are those of the whole step. A common mistake is to use those of a micro-batch, which makes the
    gradient depend on how the step is split.
    """
    return [mask / mask.sum().clamp(min=1) / len(masks) for mask in masks]


def log_probs(model: Any, answers: Sequence[Answer], temperature: float) -> list[Tensor]:
    """Returns the log-probs [R] of each answer's response tokens. The logits at a position predict the next token."""
    # Padding is at the end. The model is causal, so no real position can see the padding.
    tokens = torch.nn.utils.rnn.pad_sequence([a.tokens for a in answers], batch_first=True)
    scores = (model(tokens).logits.float() / temperature).log_softmax(-1)
    chosen = scores[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0]
    return [row[len(a.tokens) - len(a.mask) - 1 : len(a.tokens) - 1] for row, a in zip(chosen, answers, strict=True)]


def policy_loss(new: Tensor, old: Tensor, advantage: float, settings: Settings) -> Tensor:
    """Returns the clipped loss of each token [R] (Schulman et al. 2017, PPO, arXiv:1707.06347).

    The upper bound is DAPO's (Yu et al. 2025, arXiv:2503.14476). `old` is the same for all optimizer steps of a
    rollout. In the first of them the ratio is 1, and the gradient is that of REINFORCE.
    """
    ratio = (new - old).exp()
    bounded = ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip_high)
    return torch.maximum(-ratio * advantage, -bounded * advantage)


class MasterAdamW:
    """AdamW on float32 copies of the weights.

    An update is often smaller than the distance between two bfloat16 numbers, so rounding would lose it. The float32
    copies accumulate the updates, and the model gets rounded values. Gradients of micro-batches are also summed in
    float32.
    """

    def __init__(self, model: Any, settings: Settings) -> None:
        self.settings = settings
        self.weights = list(model.parameters())
        self.masters = [w.detach().float().clone() for w in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        matrices, vectors = ([m for m in self.masters if (m.ndim > 1) is is_matrix] for is_matrix in (True, False))
        decay = settings.weight_decay, 0.0  # no weight decay for norm weights and biases
        groups = [{"params": p, "weight_decay": d} for p, d in zip((matrices, vectors), decay, strict=True)]
        self.adam = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.adam_betas)

    def collect(self) -> None:
        """Adds the model's gradients of one micro-batch to the sums, and clears them."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is not None:
                master.grad += weight.grad.float()
                weight.grad = None

    @torch.no_grad()
    def step(self) -> float:
        """Clips the gradient, updates the weights and clears the sums; returns the gradient norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.settings.clip_grad))
        assert norm < float("inf"), f"the gradient norm is {norm}; no weight was changed"
        self.adam.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
            master.grad.zero_()
        return norm


def train(model: Any, optimizer: MasterAdamW, answers: Sequence[Answer], settings: Settings) -> list[dict[str, float]]:
    """Trains on all answers; returns the loss and the gradient norm of each optimizer step."""
    advantages = group_advantages([a.reward for a in answers], [a.group for a in answers])
    out = []
    for start in range(0, len(answers), settings.global_batch_size):
        step = slice(start, start + settings.global_batch_size)
        weights = token_weights([a.mask for a in answers[step]])
        parts = list(zip(answers[step], advantages[step], weights, strict=True))
        loss = 0.0
        for first in range(0, len(parts), settings.micro_batch_size):
            micro_batch = parts[first : first + settings.micro_batch_size]
            scored = log_probs(model, [a for a, _, _ in micro_batch], settings.rollout_temperature)
            losses = []
            for new, (answer, advantage, weight) in zip(scored, micro_batch, strict=True):
                # Where the mask is 0, set the ratio to 1, because 0 times infinity is not 0.
                old = torch.where(answer.mask > 0, answer.old_log_probs, new.detach())
                losses.append((weight * policy_loss(new, old, advantage, settings)).sum())
            torch.stack(losses).sum().backward()
            optimizer.collect()
            loss += sum(part.item() for part in losses)
        out.append({"loss": loss, "grad_norm": optimizer.step()})
    return out


# --- the loop ---------------------------------------------------------------------------------------------------------


def tiny_model() -> Any:
    """Returns a random model of the Qwen3 architecture with the tokenizer `Characters`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=Characters.eos_token_id + 1, **sizes, **heads))


def load(folder: Path) -> tuple[Any, Any]:
    """Loads model and tokenizer from a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Runs the loop; returns the mean reward of each rollout."""
    parser = argparse.ArgumentParser(description="GRPO of a language model, in one file.")
    parser.add_argument("folder", nargs="?", type=Path, help="a Hugging Face model (default: a tiny random one)")
    parser.add_argument("--num-rollout", type=int, default=60, help="iterations of the loop")
    parser.add_argument("--lr", type=float, help="learning rate (default: 2e-3 for the tiny model, 1e-5 for yours)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    settings = Settings(lr=options.lr or (1e-5 if options.folder else 2e-3))
    torch.manual_seed(options.seed)
    model, tokenizer = load(options.folder) if options.folder else (tiny_model(), Characters())
    model.eval()  # no dropout: sampling and training must see the same policy
    optimizer, source = MasterAdamW(model, settings), problems(options.seed)
    curve = []
    for rollout_id in range(options.num_rollout):
        asked = [next(source) for _ in range(settings.rollout_batch_size)]
        answers = rollout(model, tokenizer, asked, settings)
        norm = train(model, optimizer, answers, settings)[-1]["grad_norm"]
        curve.append(sum(a.reward for a in answers) / len(answers))
        print(f"{rollout_id:4d}  reward {curve[-1]:.3f}  gradient {norm:6.3f}  {'#' * round(40 * curve[-1])}")
    return curve


if __name__ == "__main__":
    main()
