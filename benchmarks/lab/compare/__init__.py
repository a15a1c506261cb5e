"""Which method learns a task best at which size?"""
