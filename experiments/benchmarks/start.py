"""The first answer: wall time, CPU time and memory of fresh processes, nothing cached.

    make bench-start

Each row is a process, started several times in turn with the others, so that changes of
the machine's speed affect all of them; the median is printed. Each process gets a new
cache folder. Peers that are not installed are named and skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile

from harness import ROOT, Cost, cost_of, table

DESIGNS = {
    "sampled Gaussian": 'jde.Poisson("example", sampling_probability=0.01)',
    "multistage": (
        'jde.MultistageSampling(jde.Poisson("task", sampling_probability=0.05), '
        'jde.WithoutReplacement("example", size=8, population=40)), clip_unit="task"'
    ),
    "grouped classes": (
        "jde.GroupedClasses(num_classes=1_623, ways=5, "
        'episodes=jde.Poisson("episode", sampling_probability=0.2), '
        'examples=jde.WithoutReplacement("example", size=4, population=20))'
    ),
    "8 independent episodes": (
        'jde.IndependentEpisodes(jde.WithoutReplacement("example", size=4, '
        "population=1_000), num_episodes=8)"
    ),
}
OURS = """
import jaxdp_episodic as jde
step = jde.GaussianStep({design}, noise_multiplier=2.0)
run = dict(num_steps=300, delta=1e-5)
{question}
"""
SAMPLED = {
    "pld epsilon": 'jde.epsilon(step, method="pld", **run)',
    "rdp epsilon": 'jde.epsilon(step, method="rdp", **run)',
    "privacy_report": "jde.privacy_report(step, **run)",
    "epsilon_interval": "jde.epsilon_interval(step, **run)",
}
WARM = """
import time
for method in ("exact", "pld", "rdp"):
    times = []
    for _ in range(51):
        start = time.perf_counter()
        jde.epsilon(step, method=method, **run)
        times.append(time.perf_counter() - start)
    print(f"{method} {1e3 * sorted(times)[25]:.1f} ms", end="  ")
print()
"""
PEERS = {
    "dp_accounting": """
import dp_accounting
from dp_accounting import {module}
event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(2.0))
{module}.{accountant}().compose(event, 300).get_epsilon(1e-5)
""",
    "opacus": """
from opacus.accountants import {accountant}
accountant = {accountant}()
accountant.history = [(2.0, 0.01, 300)]
accountant.get_epsilon(1e-5)
""",
}
ACCOUNTANTS = (
    ("dp_accounting", "pld", "PLDAccountant"),
    ("dp_accounting", "rdp", "RdpAccountant"),
    ("opacus", "", "PRVAccountant"),
    ("opacus", "", "RDPAccountant"),
)
COMMANDS = ("epsilon configs/omniglot.toml", "calibrate configs/omniglot_noise.toml")
SLOW = (
    "curve configs/two_phases.toml --out {out}/c.png",
    "plan configs/plan_glyphs.toml --out {out}/plan",
)


def rows(slow: bool) -> dict[str, list[str]]:
    """Returns the commands by name."""
    codes = {}
    for name, design in DESIGNS.items():
        question = "jde.epsilon(step, **run)"
        codes[f"exact epsilon, {name}"] = OURS.format(design=design, question=question)
    for name, question in SAMPLED.items():
        design = DESIGNS["sampled Gaussian"]
        codes[name] = OURS.format(design=design, question=question)
    for library, module, accountant in ACCOUNTANTS:
        if importlib.util.find_spec(library):
            code = PEERS[library].format(module=module, accountant=accountant)
            codes[f"{library} {accountant}"] = code
        else:
            print(f"{library} {accountant}: not installed here, left out")
    found = {name: [sys.executable, "-c", code] for name, code in codes.items()}
    for command in COMMANDS + SLOW * slow:
        words = [sys.executable, "-m", "jaxdp_episodic", *command.split()]
        found[f"$ {command}"] = words
    return found


def main() -> None:
    """Prints the table, and the times of warm calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each row")
    parser.add_argument("--slow", action="store_true", help="curve and plan as well")
    options = parser.parse_args()
    os.chdir(ROOT)
    commands = rows(options.slow)
    found: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(options.runs):
        for name, command in commands.items():
            with tempfile.TemporaryDirectory() as folder:
                filled = [part.replace("{out}", folder) for part in command]
                found[name].append(cost_of(filled, XDG_CACHE_HOME=folder))
    print(f"median of {options.runs} fresh processes, {os.cpu_count()} cores")
    rows_of = []
    for name, costs in found.items():
        columns = zip(*(cost[:3] for cost in costs), strict=True)
        wall, cpu, mib = (statistics.median(column) for column in columns)
        rows_of.append({"process": name, **Cost(wall, cpu, mib, "").row()})
    print(table(rows_of))
    code = OURS.format(design=DESIGNS["sampled Gaussian"], question=WARM)
    warm = cost_of([sys.executable, "-c", code]).output.strip()
    print(f"a warm call in a process: {warm}")


if __name__ == "__main__":
    main()
