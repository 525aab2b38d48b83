"""A fixture: training runs that draw no pictures."""

import pytest


@pytest.fixture(scope="module")
def undrawn():
    """Skips the pictures; `test_run` draws one."""
    with pytest.MonkeyPatch.context() as patch:
        run = "jaxdp_episodic.tools.train.run"
        for name in ("draw_run", "draw_reliability"):
            patch.setattr(f"{run}.{name}", lambda *_, **__: None)
        patch.setattr(f"{run}.reports.meaning_of", lambda _: "")
        yield
