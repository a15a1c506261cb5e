"""What pytest leaves out here: the tutorial on a language model is run as a whole by tests/test_tutorial.py."""

collect_ignore = ["make-my-lora-smaller.md"]
