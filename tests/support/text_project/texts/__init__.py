"""Texts and their classes, for a pretrained model with adapters."""
