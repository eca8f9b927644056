"""The kernel seam: each op of a layer, in plain PyTorch (`reference`) or as GPU kernels (`fused`).

Each file has one op: its formula in plain PyTorch, which runs on a CPU and is the oracle of the op's tests, and the
fused form with its gradient. `select` chooses the form of each op once, when a trainer starts.

Invariants
1. Value and gradient of a reference are bitwise those of its formula.
2. Kernels (`kernels/`) are imported when they are first called, because Triton may be missing on a machine without GPU.
3. The reference computes every CPU tensor, even if the fused form was chosen for the GPU.
"""
