"""On a CPU, slime computes the attention of a batch of requests in one call, and gets what SGLang's loop gets."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import importlib, random, torch
from slime.compat.sglang_cpu import activate
activate("cpu")
native = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
batched = native.TorchNativeAttnBackend
importlib.reload(native)  # SGLang's own methods
own = native.TorchNativeAttnBackend
assert own._run_sdpa_forward_decode is not batched._run_sdpa_forward_decode
rng = random.Random(5)
torch.manual_seed(5)
one_call = 0
sdpa = torch.nn.functional.scaled_dot_product_attention


def counted(*args, **named):
    global one_call
    one_call += 1
    return sdpa(*args, **named)


torch.nn.functional.scaled_dot_product_attention = counted
for case in range(40):
    num, kv_heads, group = rng.choice([2, 3, 7]), rng.choice([1, 3]), rng.choice([1, 4])
    width, width_v = rng.choice([(16, 16), (24, 16)])
    lens = [rng.randint(1, 30) for _ in range(num)]
    decode = case % 2 == 0
    new = [1 if decode else rng.randint(1, n) for n in lens]
    cache = torch.full((600, kv_heads, width), torch.nan)  # slots that no request uses are NaN
    table, free = torch.zeros(12, 64, dtype=torch.int32), torch.randperm(599)[: sum(lens)] + 1
    rows = torch.randperm(12)[:num]
    for row, n in zip(rows, lens):
        table[row] = int((cache[:, 0, 0].isnan()).nonzero()[-1])  # what follows the request is unused
        table[row, :n], free = free[:n].int(), free[n:]
    for row, n in zip(rows, lens):
        cache[table[row, :n].long()] = torch.randn(n, kv_heads, width)
    query = torch.randn(sum(new) + 3, kv_heads * group, width)  # three tokens of padding
    lengths, fresh = torch.tensor(lens), torch.tensor(new)
    more = (None,) if decode else (lengths - fresh, fresh, None)
    window = rng.choice([None, 4])
    named = dict(scaling=0.3, enable_gqa=group > 1, causal=not decode, is_cross_attn=False, sliding_window_size=window)
    name = "_run_sdpa_forward_decode" if decode else "_run_sdpa_forward_extend"
    outs = []
    for backend in (own, batched):
        out = torch.zeros(len(query), kv_heads * group, width_v)
        values = cache[..., :width_v]
        attend = getattr(backend, name)
        attend(None if window is None else own, query, out, cache, values, table, rows, lengths, *more, **named)
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
assert one_call > 25, one_call
"""


@pytest.mark.slow
def test_a_batch_gets_what_each_request_gets() -> None:
    """Law for prefill and decoding, prefixes, grouped heads, sliding windows, narrow values. Unused slots are NaN."""
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
