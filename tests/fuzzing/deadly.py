"""Readers with planted defects, which the fuzzer must report."""

import os
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st

from fuzzing.targets import Target


def deadly_targets() -> list[Target]:
    """Returns a reader that ends the process, and one that never ends."""
    numbers = st.integers(0, 10**6)
    return [Target("ends", numbers, _ends), Target("stays", numbers, _stays)]


def _ends(case: Any, folder: Path) -> None:
    del folder
    if case > 1_000:
        os.abort()


def _stays(case: Any, folder: Path) -> None:
    del folder
    if case > 1_000:
        time.sleep(600)
