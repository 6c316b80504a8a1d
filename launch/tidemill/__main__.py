"""``python -m tidemill``: the same as ``tidemill``."""

import gc
import os
import sys

if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
    # A queue.py beside the configuration would hide Python's own; the command adds the directory at the end.
    # (A types.py does so: ``python -m`` imports it before this. The script ``tidemill`` begins without the directory.)
    sys.path.pop(0)

from tidemill.launch.cli.main import main

code = main()
gc.freeze()  # or the collection at exit walks all objects of torch, for seconds, by which every drain would take longer
sys.exit(code)
