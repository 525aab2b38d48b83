"""What needs a package that is not there says so, and which extra brings it."""

import importlib
import re
import sys
from pathlib import Path

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
    with pytest.raises(
        ImportError, match=r"clone .* pip install '\.\[opacus\]' brings it"
    ):
        importlib.import_module(module)


def test_nothing_advises_to_install_by_a_name_that_is_on_no_index():
    """Anybody could register it."""
    root = Path(__file__).parents[3]
    folders = ("jaxdp_episodic", "docs", "configs", "experiments")
    files = [path for name in folders for path in (root / name).rglob("*.*")]
    for path in [*files, *root.glob("*.md"), root / "Makefile"]:
        if path.suffix in (".py", ".md", ".toml", ".js", ".html", ""):
            advised = re.findall(
                r"pip install[^\n]*?jaxdp[-_]episodic\b[^/\n]*",
                path.read_text(encoding="utf-8"),
            )
            assert advised == [], path
