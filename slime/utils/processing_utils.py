"""Public name of tokenizers, for plugins."""

from slime.rollout.sources import tokenizer_of as load_tokenizer

__all__ = ["load_tokenizer"]
