"""The Megatron-core training backend: model construction, packed attention, log-probs, training step, checkpoints.

Apart from layers in `models` and patches in `compat`, only this package imports megatron. Each train actor owns one
`backend.MegatronBackend`. Importing the package is cheap; importing its modules loads torch and megatron.
"""
