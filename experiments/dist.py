"""Builds sdist and wheel, and tests the wheel alone under every Python found.

For each of Python 3.11 to 3.13, in a new environment, it installs the wheel, asks one
question, answers a config of the sdist with the program, and imports the modules of
each extra, whose error must name the missing extra. It repeats this with most extras
installed. In another environment it tests the accountant alone: every
small question with NumPy and SciPy, then every question with JAX. It needs Python and a
package index.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Extras that are installed for a second look; the others are large.
EXTRAS = "plot sweep explore onnx dp-accounting jax-privacy".split()
VERSIONS = ("3.11", "3.12", "3.13")
# Extra -> the package that it installs, and our module that needs it.
MODULES = {
    "plot": ("matplotlib.figure", "jaxdp_episodic.tools.plots.figures"),
    "sweep": ("pyarrow.parquet", "jaxdp_episodic.files.parquet_file"),
    "ray": ("ray", "jaxdp_episodic.tools.sweep.run"),
    "explore": ("http.server", "jaxdp_episodic.tools.explore.server"),
    "onnx": ("onnxruntime", "jaxdp_episodic.trainer.learners.features"),
    "data": ("datasets", "jaxdp_episodic.trainer.data.adapters"),
    "dp-accounting": (
        "dp_accounting",
        "jaxdp_episodic.accountant.interop.dp_accounting",
    ),
    "jax-privacy": ("jax_privacy", "jaxdp_episodic.accountant.interop.jax_privacy"),
    "opacus": ("opacus", "jaxdp_episodic.accountant.interop.opacus"),
}
CONFIG = "configs/omniglot.toml"
ALONE = ROOT / "experiments/accountant_alone.py"
# Gaussian noise 1 at delta 1e-5: Balle and Wang (2018), arXiv:1805.06530, Theorem 8.
QUESTION = """
import sys
import jaxdp_episodic as jde
step = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=1.0), noise_multiplier=1.0
)
answer = jde.epsilon(step, num_steps=1, delta=1e-5)
assert abs(answer - 4.3771781) < 1e-6, answer
assert not {"jax", "torch", "matplotlib"} & set(sys.modules)
print(f"{answer:.6f}")
"""
# Without its extra, our module can be imported, or names the extra.
IMPORTS = """
import importlib, json, sys
modules, installed = json.loads(sys.argv[1])
for extra, (theirs, ours) in modules.items():
    text = "imports"
    try:
        if extra in installed:
            importlib.import_module(theirs)
        importlib.import_module(ours)
    except ImportError as error:
        text = f"{type(error).__name__}: {error}"
        assert extra not in installed, text
        assert "pip install '.[" in text, text
    print(f"    {extra:14} {text}")
"""


def main() -> None:
    """Builds the distributions and tries them."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--pythons", nargs="*", help="more interpreters to try")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(arguments.out, Path(folder))
        config = extracted(sdist, Path(folder))
        pythons = dict(found(arguments.pythons or []))
        for version, python in pythons.items():
            print(f"Python {version}", flush=True)
            attempt(python, wheel, config, Path(folder) / version)
            attempt_alone(python, wheel, Path(folder) / f"{version}-alone")
    missing = [v for v in VERSIONS if v not in pythons]
    print(f"works under {', '.join(pythons)}", end="")
    print(f"; not found: {', '.join(missing)}" if missing else "")
    if not pythons:
        sys.exit("none of the Pythons was found")


def build(out: Path, folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made from it."""
    python = environment(sys.executable, folder / "build")
    run(python, "-m", "pip", "install", "--quiet", "build")
    shutil.rmtree(out, ignore_errors=True)
    run(python, "-m", "build", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    for made in (sdist, wheel):
        print(f"{made.name}  {made.stat().st_size / 1e6:.2f} MB", flush=True)
    return sdist, wheel


def extracted(sdist: Path, folder: Path) -> Path:
    """The config, as it is in the sdist."""
    with tarfile.open(sdist) as archive:
        member = f"{sdist.name.removesuffix('.tar.gz')}/{CONFIG}"
        archive.extract(member, folder, filter="data")
    return folder / member


def found(more: list[str]) -> Iterator[tuple[str, str]]:
    """Working interpreters, the first of each version: named, on the path, of pyenv."""
    seen = set()
    for version in VERSIONS:
        for place in (*more, *on_path(version), *of_pyenv(version)):
            text = subprocess.run(
                [place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
                check=False,
            )
            if text.stdout.strip() == version and version not in seen:
                seen.add(version)
                yield version, place


def on_path(version: str) -> Iterator[str]:
    """Every ``python3.x`` of the path: the first one may be a stub that fails."""
    for folder in os.get_exec_path():
        if place := shutil.which(f"python{version}", path=folder):
            yield place


def of_pyenv(version: str) -> Iterator[str]:
    """The interpreters that pyenv has installed."""
    if shutil.which("pyenv"):
        root = Path(run("pyenv", "root").strip())
        yield from map(str, root.glob(f"versions/{version}.*/bin/python"))


def attempt(python: str, wheel: Path, config: Path, folder: Path) -> None:
    """Installs the wheel into an empty environment and uses it."""
    own = environment(python, folder)
    # Compiles only imported modules to byte code: a third of the time.
    options = ("--quiet", "--no-compile", "-c", ROOT / "constraints.txt")
    install = (own, "-m", "pip", "install", *options)
    run(*install, wheel)
    print(f"  epsilon {run(own, '-W', 'error', '-c', QUESTION, cwd=folder).strip()}")
    program = own.with_name("jaxdp-episodic")
    text = run(program, "epsilon", config, cwd=folder).splitlines()[0]
    print(f"  jaxdp-episodic epsilon {CONFIG}: {text}")
    for installed in ([], EXTRAS):
        if installed:
            run(*install, f"{wheel}[{','.join(installed)}]")
        print(f"  extras {', '.join(installed) or 'none'}")
        names = json.dumps([MODULES, installed])
        print(run(own, "-c", IMPORTS, names, cwd=folder).rstrip(), flush=True)


def attempt_alone(python: str, wheel: Path, folder: Path) -> None:
    """Installs only what the accountant needs, and asks it every question."""
    own = environment(python, folder)
    install = (own, "-m", "pip", "install", "--quiet", "--no-compile")
    run(*install, "--no-deps", wheel)
    for packages in (["numpy", "scipy"], ["jax", "jaxlib"]):
        run(*install, "-c", ROOT / "constraints.txt", *packages)
        text = run(own, "-W", "error", ALONE, cwd=folder).splitlines()[-1]
        print(f"  accountant with {', '.join(packages)}: {text}", flush=True)


def environment(python: str, folder: Path) -> Path:
    """The interpreter of a new, empty environment."""
    run(python, "-m", "venv", "--clear", folder)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; prints all of it and stops if the command fails."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
