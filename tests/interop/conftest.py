"""Tests with the real trainers, which live in an environment of their own; elsewhere they are not collected.

`.ci/run` makes that environment and sets `MESHLOAD_INTEROP`, with which a package that is missing is a failure.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

NEEDED = {"test_deepspeed.py": "deepspeed", "test_megatron_core.py": "megatron"}

collect_ignore_glob = ["runs_*.py", "checks_*.py"]  # programs that the tests launch
if "MESHLOAD_INTEROP" not in os.environ:
    collect_ignore_glob += [test for test, package in NEEDED.items() if find_spec(package) is None]
