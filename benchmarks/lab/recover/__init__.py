"""What is left of a LoRA when it is compressed, and what comes back by a few steps of training?"""
