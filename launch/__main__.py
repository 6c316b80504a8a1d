"""``python -m launch``: the same as ``tidemill``."""

import sys

from launch.cli import main

sys.exit(main())
