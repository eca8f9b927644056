"""The kernel seam: what a layer computes on a device, in plain PyTorch (`reference`) or in kernels of a GPU (`fused`).

Each op is one file: its formula in plain PyTorch, which runs on a CPU and is the oracle of its tests, and the fused
form with its gradient. `select` says which form each op has on this device; it is asked once, when a trainer starts.

Invariants
1. A reference has the bits of the formula that it stands for, in value and gradient.
2. Kernels (`kernels/`) are imported when they are first called: Triton is not installed where there is no GPU.
3. A tensor on a CPU is computed by the reference, whatever was chosen for a GPU.
"""
