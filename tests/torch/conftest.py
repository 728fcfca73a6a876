"""Tests that need PyTorch. oneDNN may believe in AMX where a sandbox forbids it, and then the
process dies of an illegal instruction; the tests keep to AVX-512 unless told otherwise."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
