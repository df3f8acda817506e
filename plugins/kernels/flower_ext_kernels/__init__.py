"""Machine code that trains dense and convolutional networks, for flower_ext.

====================  =====================================================================
module                contents
====================  =====================================================================
`network`             trains jobs whose model is a chain of layers; the plug-in's entry point
`chain`               recognises such models
`layer_table`         describes a chain of layers to the machine code
`native`              compiles `sgd`, stores the machine code, and loads it
`sgd`                 trains networks, one after the other
`passes`              the forward and the backward pass of a mini-batch
`dense`               dense layers
`images`              convolutions and pooling
`norms_and_dropout`   normalisation and dropout
`prefetch`            prefetching of the next job's features and weights
`products`            products of matrices, exponentials, and activations
`tiles`               products of small matrices, and pooling, in the processor's vector registers
====================  =====================================================================
"""
