"""``python -m launch``: the same as ``tidemill``."""

import gc
import sys

from launch.cli.main import main

code = main()
gc.freeze()  # or the collection at exit walks all that torch has made, for seconds, and whoever drains this process waits for them
sys.exit(code)
