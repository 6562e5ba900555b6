"""Skeletons: how parts make a model, and what calling one gives back."""
