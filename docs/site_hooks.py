"""What the site is made of beside its pages.

MathJax, the files outside docs/ that pages link to, and the notebooks as pages.
"""

from __future__ import annotations

import base64
import importlib.resources
import json
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
    for path in sorted(Path(config.docs_dir).glob("notebooks/*.ipynb")):
        page, pictures = converted(path)
        uri = path.relative_to(config.docs_dir).with_suffix(".md").as_posix()
        files.append(File.generated(config, uri, content=page))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def converted(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the pictures of its outputs by their file names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"~~~~text\n{''.join(output['text'])}~~~~")
            elif "image/png" in output["data"]:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![Picture {len(pictures)} of this notebook]({name})")
    parts.insert(
        1, f"This page is the notebook `docs/notebooks/{path.name}` of a clone."
    )
    return "\n\n".join(parts), pictures


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Points links that are right in a clone at what they are on the site."""
    markdown = re.sub(r"(\]\([\w./]*)\.ipynb\)", r"\1.md)", markdown)
    return re.sub(rf"\]\(\.\./({'|'.join(SHOWN)})/", r"](\1/", markdown)
