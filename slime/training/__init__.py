"""Training: the Megatron-core backend. Model build, packed attention, log-probs, step, checkpoint.

The only room that imports megatron (`compat` helps it). `backend.MegatronBackend` is what the train actors hold.
Nothing heavy happens on importing this package; its modules import torch and megatron.
"""
