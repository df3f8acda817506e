"""A causal language model, fine-tuned by LoRA with privacy for each client or each author."""
