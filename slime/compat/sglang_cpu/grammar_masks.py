"""Answers that follow a JSON schema, a regular expression or a grammar, on a CPU.

xgrammar, SGLang's default, computes which tokens may come next on any machine and brings a kernel for each kind of
device. SGLang calls those for accelerators alone and refuses all others in the middle of a forward pass, which ends the
scheduler and with it the server. On a CPU the mask goes to xgrammar's own function, which has a kernel for it.
"""

from __future__ import annotations

import types
from typing import Any

from slime.compat.report import PatchReport
from slime.compat.sglang_cpu.after_import import after_import, is_in_place
from slime.core.errors import EngineError

APPLIES = "sglang.srt.constrained.xgrammar_backend"


def _apply(logits: Any, vocab_mask: Any) -> None:
    """Tokens whose bit is not set get -inf. `logits` [requests, V] on a CPU; `vocab_mask` [requests, V / 32] int32."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _on_grammar(_grammar: Any, logits: Any, vocab_mask: Any) -> None:
    _apply(logits, vocab_mask)


def _use_cpu_kernel(module: types.ModuleType) -> None:
    module.XGrammarGrammar.apply_vocab_mask = _on_grammar
    module.XGrammarGrammarBackend.apply_vocab_mask = staticmethod(_apply)
    if _allowed_of_a_mask(module) != [1, 33]:
        raise EngineError(
            f"got no effect from the CPU patch of {APPLIES}, because SGLang or xgrammar changed; install the pinned "
            "versions or start engines with --sglang-grammar-backend none"
        )


def _allowed_of_a_mask(module: types.ModuleType) -> list[int]:
    """Which of 40 tokens SGLang's class leaves possible under a mask with bits 1 and 33 set."""
    import torch

    logits = torch.zeros(1, 40)
    mask = torch.tensor([[1 << 1, 1 << 1]], dtype=torch.int32)
    module.XGrammarGrammarBackend.apply_vocab_mask(logits=logits, vocab_mask=mask)
    return [i for i, logit in enumerate(logits[0].tolist()) if logit == 0]


def masks_on_a_cpu(upstream: str) -> PatchReport:
    """Sees to it that xgrammar's masks reach logits that live on a CPU."""
    after_import(APPLIES, _use_cpu_kernel)
    return PatchReport(
        name="grammar masks of xgrammar",
        symptom="RuntimeError: Unsupported device: cpu, at a request with json_schema or regex; the server ends",
        upstream=upstream,
        removal="apply_vocab_mask in xgrammar_backend.py knows the CPU",
        applied=True,
        took_effect=is_in_place(APPLIES),
    )
