"""Operations of a training step that have a plain form and one for a GPU: chosen once, by name."""
