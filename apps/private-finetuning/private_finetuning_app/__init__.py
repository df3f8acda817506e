"""Private fine-tuning of a pretrained model as one Flower app."""
