"""These tests need a CUDA device. Elsewhere they are not even imported: that would import Triton
before the kernels' tests can choose its interpreter."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
