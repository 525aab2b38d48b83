"""What the tests of training run under."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True, scope="session")
def _compile_once(tmp_path_factory):
    """Every trainer compiles its own step: those that are alike share the result."""
    limit = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, limit)
    jax.config.update(limit, 0.2)
    compilation_cache.set_cache_dir(str(tmp_path_factory.mktemp("compiled")))
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update(limit, before)
