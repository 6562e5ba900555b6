"""Between checkpoints and models: lazy tensors, layouts, loading and saving."""
