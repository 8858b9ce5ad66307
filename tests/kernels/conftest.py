"""These tests run the kernels in Triton's interpreter, so they need no GPU. It must be chosen before the import."""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.*, where the cases are built
