"""Tiny real models: a character tokenizer with a chat template, and random-weight checkpoints of real architectures.

Everything is written in Hugging Face format, so the engines load it like any other model. A 128-entry vocabulary, two
layers and 64 hidden units keep a forward pass in the millisecond range on one core.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

PAD, EOS, BOS, UNK, USER, ASSISTANT = "<pad>", "<eos>", "<bos>", "<unk>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, EOS, BOS, UNK, USER, ASSISTANT)
VOCAB_SIZE = 128
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<eos>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FORGETFUL_TEMPLATE = CHAT_TEMPLATE.replace(
    "+ message['content']",
    "+ (message['content'][-1:] if message['role'] == 'assistant' and not loop.last else message['content'])",
)
"""Cuts every answer but the last, as templates do that drop earlier reasoning."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def write_tokenizer(
    directory: Path, *, special_tokens: tuple[str, ...] = SPECIAL_TOKENS, chat_template: str = CHAT_TEMPLATE
) -> None:
    """Writes a tokenizer in which every printable ASCII character is one token. `special_tokens` begin with ours."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [c for c in string.printable if c not in "\x0b\x0c\r"]
    vocab = {token: i for i, token in enumerate((*special_tokens, *characters))}
    vocab.update({f"<unused{i}>": i for i in range(len(vocab), VOCAB_SIZE)})
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNK,
        additional_special_tokens=list(special_tokens[SPECIAL_TOKENS.index(USER) :]),
    )
    fast.chat_template = chat_template
    fast.save_pretrained(directory)


def write_tiny_model(
    directory: Path, family: str = "qwen3", *, seed: int = 0, tied: bool = False, **overrides: Any
) -> Path:
    """Writes a random float32 checkpoint ("qwen3", "qwen3_moe" or "llama") with its tokenizer; returns `directory`."""
    import torch
    import transformers

    config_class, model_class, own = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            transformers.Qwen3MoeForCausalLM,
            {
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
            },
        ),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"head_dim": 16}),
    }[family]
    config = config_class(**{**SHAPE, **own, "tie_word_embeddings": tied, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at one; random ones make every mapping mistake visible
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # routers start near zero; a wide one makes a wrong choice visible
                torch.nn.init.normal_(parameter, std=0.5)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory
