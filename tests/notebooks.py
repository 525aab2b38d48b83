"""Runs the notebooks of the documentation: ``python tests/notebooks.py`` writes their
outputs anew.

A cell is Python; a line that begins with ``!`` is a command, as in Jupyter. What is
kept is what Jupyter would show: printed text, the last value, pictures.
"""

import ast
import base64
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
DOTS_PER_INCH = 72  # pictures of about 15 kB


def read(path):
    """A notebook, as JSON holds it."""
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell):
    """The text of a cell."""
    return "".join(cell["source"])


def command(line):
    """Runs a command of a notebook and prints its output."""
    words = shlex.split(line)
    if words[0] == "jaxdp-episodic":
        words = [sys.executable, "-m", "jaxdp_episodic", *words[1:]]
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout, end="")


def run_cell(text, name, namespace):
    """Runs a cell; returns its outputs in the notebook's format."""
    import matplotlib.pyplot as plt

    lines = [
        f"_command({line[1:]!r})" if line.startswith("!") else line
        for line in text.splitlines()
    ]
    body = ast.parse("\n".join(lines), name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    namespace["_command"] = command
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs = []
    if printed.getvalue():
        outputs.append(stream(printed.getvalue()))
    for number in plt.get_fignums():
        picture = io.BytesIO()
        figure = plt.figure(number)
        figure.savefig(picture, dpi=DOTS_PER_INCH, metadata={"Software": None})
        plt.close(figure)
        outputs.append(shown("image/png", base64.b64encode(picture.getvalue())))
    if value is not None and not outputs:
        outputs.append(shown("text/plain", repr(value).encode()))
    return outputs


def stream(text):
    """What a cell prints."""
    return {
        "name": "stdout",
        "output_type": "stream",
        "text": text.splitlines(keepends=True),
    }


def shown(kind, content):
    """What a cell displays."""
    return {
        "data": {kind: content.decode()},
        "metadata": {},
        "output_type": "display_data",
    }


def run(path, folder):
    """The notebook with its outputs, run in a folder that is empty."""
    import matplotlib

    matplotlib.use("Agg")
    notebook, namespace = read(path), {"__name__": "__main__"}
    with contextlib.chdir(folder):
        count = 0
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                cell["execution_count"] = count
                name = f"{path.name}, {count}"
                cell["outputs"] = run_cell(source(cell), name, namespace)
    return notebook


def printed(notebook):
    """What each code cell prints, and of its pictures their number."""
    return [
        (
            "".join(t for o in cell["outputs"] for t in o.get("text", ())),
            sum("image/png" in o.get("data", ()) for o in cell["outputs"]),
        )
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


if __name__ == "__main__":
    for one in NOTEBOOKS:
        if len(sys.argv) == 1 or one.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as there:
                found = json.dumps(run(one, there), indent=1, ensure_ascii=False)
            one.write_text(found + "\n", encoding="utf-8")
