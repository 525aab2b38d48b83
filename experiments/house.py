"""Sizes of the package, and what one exact epsilon walks through.

``python experiments/house.py`` prints lines, files and private constants of each room,
and for two questions the files entered, the functions called and the deepest stack: how
much somebody must read who follows a number from the question to the kernel.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxdp_episodic as jde

PACKAGE = Path(jde.__file__).parent
# A room is a folder this deep below the package.
ROOM_DEPTH = 2


def sizes() -> dict[str, Counter[str]]:
    """Returns lines, files, private constants, and those of them in tuples, by room."""
    found: dict[str, Counter[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts[:-1][:ROOM_DEPTH]
        room = found.setdefault("/".join(parts) or "top", Counter())
        text = path.read_text(encoding="utf-8")
        room.update(files=1, lines=text.count("\n"))
        for node in ast.parse(text).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            for target in targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                named = [getattr(name, "id", "") for name in names]
                number = sum(n.startswith("_") and n.isupper() for n in named)
                room["constants"] += number
                room["in tuples"] += number * isinstance(target, ast.Tuple)
    return found


def walk(question: Callable[[], Any]) -> tuple[int, int, int]:
    """Returns files entered, functions called, and the depth of the package's stack."""
    called: set[tuple[str, str, int]] = set()
    depth, deepest = 0, 0

    def seen(frame: Any, event: str, _: Any) -> None:
        nonlocal depth, deepest
        code = frame.f_code
        if event not in ("call", "return") or str(PACKAGE) not in code.co_filename:
            return
        depth += 1 if event == "call" else -1
        deepest = max(deepest, depth)
        if not code.co_name.startswith("<"):
            called.add((code.co_filename, code.co_name, code.co_firstlineno))

    sys.setprofile(seen)
    try:
        question()
    finally:
        sys.setprofile(None)
    return len({name for name, _, _ in called}), len(called), deepest


def main() -> None:
    """Prints both tables."""
    rooms = sizes()
    columns = ("lines", "files", "constants", "in tuples")
    print(f"{'room':28}" + "".join(f"{name:>11}" for name in columns))
    for name in sorted(rooms):
        print(f"{name:28}" + "".join(f"{rooms[name][c]:11,}" for c in columns))
    total = sum(rooms.values(), Counter())
    print(f"{'all':28}" + "".join(f"{total[c]:11,}" for c in columns))

    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=0.01), noise_multiplier=1.1
    )
    tasks = jde.GroupedClasses(
        num_classes=20,
        ways=5,
        episodes=jde.RandomAllocation("episode", steps_per_epoch=20),
        examples=jde.WithoutReplacement("example", size=5, population=20),
    )
    epoch = jde.GaussianStep(
        tasks, noise_multiplier=1.1, neighboring_relation="replace_one"
    )
    for name, asked, steps in (("Poisson", step, 1000), ("epochs", epoch, 40)):
        for ask in range(2):  # the first imports, and fills what is kept

            def question(asked: Any = asked, steps: int = steps) -> Any:
                return jde.epsilon(asked, delta=1e-6, num_steps=steps, method="exact")

            files, functions, deepest = walk(question)
            if ask:
                print(f"{name}: {files} files, {functions} functions, {deepest} deep")


if __name__ == "__main__":
    main()
