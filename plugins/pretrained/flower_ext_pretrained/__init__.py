"""Pretrained models in a `Task`: features of frozen models, language models, LoRA adapters.

Import names from the modules of this package:

==============  ============================================================================
`features`      features of examples, which a frozen model computes once, before training
`hugging_face`  pretrained models of Transformers, and LoRA adapters of PEFT on them
`next_token`    causal language models, with a loss that predicts the next token, and scores
==============  ============================================================================
"""
