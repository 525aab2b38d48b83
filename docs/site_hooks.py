"""What the site takes from outside docs/: MathJax, and the files that pages link to."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

# Folders beside docs/ whose files pages may link to; on the site they lie in its root.
SHOWN = {"configs": ("*.toml", "cluster/*"), "experiments": ("*.py", "*.csv")}
# One file with its fonts in it, as published in the package django-static-mathjax.
MATHJAX = ("es5/tex-svg.js", "LICENSE")


def on_files(files: Any, config: Any) -> Any:
    """Adds MathJax with its licence, the configs and the experiments to the site."""
    mathjax = importlib.resources.files("mathjax") / "static" / "mathjax"
    for name in MATHJAX:
        source = mathjax.joinpath(name)
        uri = f"assets/mathjax/{Path(name).name}"
        files.append(File.generated(config, uri, content=source.read_bytes()))
    root = Path(config.config_file_path).parent
    for folder, patterns in SHOWN.items():
        found = (path for name in patterns for path in (root / folder).glob(name))
        for path in sorted(found):
            uri = path.relative_to(root).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Points links to those folders, right in a clone, at their copies on the site."""
    return re.sub(rf"\]\(\.\./({'|'.join(SHOWN)})/", r"](\1/", markdown)
