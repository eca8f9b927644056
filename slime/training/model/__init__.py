"""The trained model: Megatron's decoder with the layers of a model family. It returns log-probs instead of logits."""
