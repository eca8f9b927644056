"""Training, the Megatron-core backend: model build, packed attention, log-probs, step, checkpoint.

The only room that imports megatron, besides `compat`. Each train actor holds a `backend.MegatronBackend`.
Importing this package is cheap; its modules import torch and megatron.
"""
