"""pytest reads the pages of this folder, not its programs and not what Sphinx made."""

collect_ignore = ["conf.py", "_extensions", "_build", "auto_examples"]
