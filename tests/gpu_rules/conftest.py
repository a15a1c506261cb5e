"""Of these files only the test that starts a process for them is collected, doctests included."""

import os

collect_ignore = [] if "GPU_RULES" in os.environ else ["rules.py", "pretended_gpu.py"]
