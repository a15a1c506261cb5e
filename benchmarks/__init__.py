"""What was measured, and how: a folder for each question; README.md lists them."""
