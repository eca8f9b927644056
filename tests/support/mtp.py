"""Tiny checkpoints with a layer of multi-token prediction, and what it is in plain PyTorch, of transformers' layers.

transformers has no such layer. Here it is a model of one layer of transformers' own class, whose last norm is that of
the layer, called with the projected embeddings and hidden states in place of embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.core.batch import TrainBatch
from tests.support.families import load_model, new_model, write_family

ONE_LAYER: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm4_moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "mimo": {"num_hidden_layers": 1},
    "qwen3_next": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "qwen3_5": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
}
"""Family -> the config of such a layer as a model."""
NUM_LAYERS = 4
ANOTHER_SEED = 7


def names_of(family: str) -> dict[str, str]:
    """Our words -> names in files: of the norms, the projection, and the beginning of the layer's own tensors."""
    if family.startswith("qwen"):
        parts = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0.")
    elif family == "mimo":
        hf = "model.mtp_layers.0."
        parts = (*(f"{hf}{n}" for n in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")), hf)
    else:
        hf = f"model.layers.{NUM_LAYERS}."
        parts = (f"{hf}enorm", f"{hf}hnorm", f"{hf}eh_proj", f"{hf}shared_head.norm", hf)
    return dict(zip(("embedding", "hidden", "projection", "last", "layer"), parts, strict=True))


def write_with_mtp(directory: Path, family: str, **overrides: Any) -> Path:
    """A checkpoint of `write_family` and the tensors of the layer in a file beside; returns `directory`."""
    import torch
    from safetensors.torch import load_file, save_file

    write_family(directory, family, **overrides)
    names = names_of(family)
    of_layer = new_model(family, ANOTHER_SEED, **{**overrides, **ONE_LAYER[family]})
    scratch = directory / "scratch"
    of_layer.save_pretrained(scratch)
    (file,) = scratch.glob("*.safetensors")
    held = load_file(file)
    more = {n.replace("model.layers.0.", names["layer"]): t for n, t in held.items() if ".layers.0." in n}
    more[f"{names['last']}.weight"] = held["model.norm.weight"]
    for path in scratch.iterdir():
        path.unlink()
    scratch.rmdir()
    hidden = int(of_layer.config.hidden_size)
    with torch.random.fork_rng():
        torch.manual_seed(ANOTHER_SEED)
        low = -0.5 if family.startswith("qwen") else 0.5
        for norm in ("embedding", "hidden"):
            more[f"{names[norm]}.weight"] = torch.empty(hidden).uniform_(low, low + 1.0)
        more[f"{names['projection']}.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    (main,) = directory.glob("*.safetensors")
    tensors = load_file(main)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if family.startswith("qwen"):
        prefix = "model.language_model." if "text_config" in config else "model."
        assert f"{prefix}norm.weight" in tensors or "model.norm.weight" in tensors
    elif family == "mimo":
        path.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}, indent=2))
    else:
        more[f"{names['layer']}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        more[f"{names['layer']}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        path.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}, indent=2))
    save_file({**tensors, **{n: t.contiguous() for n, t in more.items()}}, main, metadata={"format": "pt"})
    return directory


class Reference:
    """The layer of a checkpoint in float32, and the model that it stands behind."""

    def __init__(self, checkpoint: Path, family: str) -> None:
        from safetensors.torch import load_file

        (file,) = checkpoint.glob("*.safetensors")
        tensors, self.names = load_file(file), names_of(family)
        self.model = load_model(checkpoint).requires_grad_(False)
        self._of_mimo = family == "mimo"
        self.layer = new_model(family, ANOTHER_SEED, **ONE_LAYER[family], attn_implementation="eager")
        self._zero_centred, self._eps = family.startswith("qwen"), float(self.model.config.rms_norm_eps)
        own = ("embedding", "hidden", "projection")
        self.around = {n: tensors[f"{self.names[n]}.weight"].requires_grad_() for n in own}

    def log_probs(self, tokens: Any) -> Any:
        """tokens [T] of one sequence -> [T - 2]: of tokens 2 to T - 1, each seen from two before it."""
        import torch

        hidden = self.model.model(tokens[None]).last_hidden_state[0, :-2].detach()
        embedded = self.model.get_input_embeddings()(tokens[1:-1])
        if self._of_mimo:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        parts = [self._norm(embedded, "embedding"), self._norm(hidden, "hidden")]
        both = torch.cat(parts[::-1] if self._of_mimo else parts, -1)
        inputs = torch.nn.functional.linear(both, self.around["projection"])
        states = self.layer.model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
        logits = self.model.get_output_embeddings()(states)
        return torch.log_softmax(logits, -1).gather(1, tokens[2:, None]).squeeze(1)

    def gradients(self, batch: TrainBatch, scratch: Path) -> tuple[float, Mapping[str, Any]]:
        """(mean negative log-prob over the trained tokens of the batch, file name -> its gradient).

        `scratch`: where transformers writes gradients under the names that they have in files.
        """
        import torch
        from safetensors.torch import load_file

        loss, count = torch.zeros(()), 0.0
        for sample in batch.samples:
            tokens, first = torch.from_numpy(sample.tokens).long(), sample.num_tokens - sample.response_length
            mask = torch.from_numpy(sample.loss_mask)
            count += float(mask.sum())
            seen = self.log_probs(tokens)[max(first - 2, 0) :]
            loss = loss - (seen * mask[len(mask) - len(seen) :]).sum()
        (loss / count).backward()
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        self.layer.save_pretrained(scratch)
        (file,) = scratch.glob("*.safetensors")
        held = {n: g for n, g in load_file(file).items() if not n.endswith("e_score_correction_bias")}
        found = {f"{self.names[n]}.weight": t.grad for n, t in self.around.items()}
        found |= {n.replace("model.layers.0.", self.names["layer"]): g for n, g in held.items() if ".layers.0." in n}
        found[f"{self.names['last']}.weight"] = held["model.norm.weight"]
        return float(loss.detach()) / count, found

    def _norm(self, x: Any, name: str) -> Any:
        import torch

        weight = self.around[name] + (1.0 if self._zero_centred else 0.0)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * weight
