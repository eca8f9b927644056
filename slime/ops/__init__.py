"""The layer ops that have kernels: each op has a plain PyTorch form (`reference`) and a GPU kernel form (`fused`).

Each file implements one op. The reference runs on any device and is the oracle for the op's tests; the fused form has
its own backward pass. `select` chooses the form of each op once, when a trainer starts.

Invariants
1. A reference is bitwise equal to its formula, in both value and gradient.
2. Modules in `kernels/` are imported on first use, because a machine without a GPU may not have Triton.
3. CPU tensors always use the reference, even if the fused form was chosen for the GPU.
"""
