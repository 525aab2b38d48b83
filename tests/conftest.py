"""What every test runs under."""

import os

# Read when jax is first imported, so before anything else: a silent promotion is how
# a float32 slips into an accountant.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("project", derandomize=True, deadline=None)
hypothesis.settings.load_profile("project")


@pytest.fixture(autouse=True)
def _x64_flag_is_left_alone():
    """Fails any test after which the caller's x64 setting has changed."""
    before = _x64_flag()
    yield
    assert _x64_flag() == before


def _x64_flag() -> bool:
    # jax makes the attributes of its configuration at run time, unseen by pyright.
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
