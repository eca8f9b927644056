"""FlashAttention 2 for systems that ask for the package `flash_attn`, with the kernels that torch itself ships.

The package has no wheels: it must be compiled, which takes an hour. torch contains the same kernels behind an operator
with a backward pass, so `install` writes a package `flash_attn` that calls it. transformers then accepts
`attn_implementation="flash_attention_2"`. Causal attention only, without dropout, windows and caches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VERSION = "2.8.3"
PADDING = """from einops import rearrange
from transformers.modeling_flash_attention_utils import _pad_input as pad_input, _unpad_input as unpad_input


def index_first_axis(rows, indices):
    return rows[indices]
"""
METADATA = f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {VERSION}\nSummary: calls torch's FlashAttention 2\n"


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:
    """Attention of packed sequences: q [total, heads, size], k and v [total, groups, size] -> [total, heads, size]."""
    import torch

    if dropout_p:
        raise NotImplementedError(f"dropout_p is {dropout_p}; this stand-in has no dropout")
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    ends = (x.to(torch.int32) for x in (cu_seqlens_q, cu_seqlens_k))
    longest = (int(max_seqlen_q), int(max_seqlen_k))
    return torch.ops.aten._flash_attention_forward(*rows, *ends, *longest, 0.0, causal, False, scale=softmax_scale)[0]


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> Any:
    """Attention of a batch: q [batch, length, heads, size], k and v with groups for heads -> the shape of q."""
    import torch

    if dropout_p:
        raise NotImplementedError(f"dropout_p is {dropout_p}; this stand-in has no dropout")
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    longest = (q.shape[1], k.shape[1])
    return torch.ops.aten._flash_attention_forward(
        *rows, None, None, *longest, 0.0, causal, False, scale=softmax_scale
    )[0]


flash_attn_with_kvcache = None


def install(folder: Path) -> None:
    """Writes the package `flash_attn` and its metadata into a folder for PYTHONPATH."""
    package, info = folder / "flash_attn", folder / f"flash_attn-{VERSION}.dist-info"
    for new in (package, info):
        new.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(Path(__file__).read_text() + f'\n\n__version__ = "{VERSION}"\n')
    (package / "bert_padding.py").write_text(PADDING)
    (info / "METADATA").write_text(METADATA)
    (info / "top_level.txt").write_text("flash_attn\n")
    (info / "RECORD").write_text("flash_attn/__init__.py,,\nflash_attn/bert_padding.py,,\n")
