"""Stand-in, for tests on machines without a GPU: torchvision from PyPI is built for CUDA and cannot register its operators here.

SGLang needs only its transforms. Python runs this file at start when its folder is on PYTHONPATH.
"""

import sys
import types

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
