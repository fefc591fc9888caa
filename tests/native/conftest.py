"""These tests run the cases of tests/ops on kernels that were compiled apart from the Python module."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "ops"))
