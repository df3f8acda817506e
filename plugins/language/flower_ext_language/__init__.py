"""Language models as models of a `Task`, and LoRA adapters on pretrained models.

Import names from the modules of this package:

==============  ============================================================================
`hugging_face`  pretrained models of Transformers, and LoRA adapters of PEFT on them
`next_token`    causal language models, with a loss that predicts the next token, and scores
==============  ============================================================================
"""
