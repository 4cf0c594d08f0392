"""Our providers, for tests that take either."""

from typing import Any

import pytest

from pagebench.kernels.providers import load_provider

PROVIDERS = ["triton", "cupy"]


def supported(name: str) -> Any:
    """The provider; skips the test where it cannot run."""
    provider = load_provider(name)
    if provider.unavailable() is not None:
        pytest.skip(str(provider.unavailable()))
    return provider
