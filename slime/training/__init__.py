"""Training, the Megatron-core backend: model build, packed attention, log-probs, step, checkpoint.

Besides layers of `models` and `compat`, only this package imports megatron. Each train actor has a
`backend.MegatronBackend`. Importing the package itself is cheap; its modules import torch and megatron.
"""
