"""Everything here needs a CUDA device; elsewhere it is skipped with the reason."""

import pytest


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def _missing() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(items):
    reason = _missing()
    for item in items:
        if "tests/cuda/" in str(item.path) and reason:
            item.add_marker(pytest.mark.skip(reason=reason))
