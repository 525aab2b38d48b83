"""What needs a package that is not there says so, and which extra brings it."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("jaxdp_episodic.accountant.interop.opacus", "opacus.accountants"),
        ("jaxdp_episodic.trainer.draw.step_loader", "torch"),
    ],
)
def test_a_missing_package_is_named(module, needed, monkeypatch):
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(ImportError, match=r"jaxdp-episodic\[opacus\]"):
        importlib.import_module(module)
