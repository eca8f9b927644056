"""Public name of tokenizers, for plugins."""

from slime.rollout.clients import tokenizer_of as load_tokenizer

__all__ = ["load_tokenizer"]
