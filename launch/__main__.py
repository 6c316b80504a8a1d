"""``python -m tidemill``: the same as ``tidemill``."""

import gc
import sys

from tidemill.launch.cli.main import main

code = main()
gc.freeze()  # or the collection at exit walks all objects of torch, for seconds, by which every drain would take longer
sys.exit(code)
