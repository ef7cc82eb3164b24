"""Tests that need a CUDA device. On other machines these modules are not imported: an import would
load Triton before the kernel tests can choose its interpreter."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
