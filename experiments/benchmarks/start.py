"""The first answer: wall time, CPU time and memory of fresh processes, nothing cached.

    make bench-start

Each row is a process of its own, started several times in turn with the others, so
that a drift of the machine's speed meets all of them alike; the median is printed. The
cache folder of the command line is a new one for every "first" row. Peers that are not
installed are left out by name.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

DESIGNS = {
    "sampled Gaussian": 'jde.Poisson("example", sampling_probability=0.01)',
    "multistage": (
        'jde.MultistageSampling(jde.Poisson("task", sampling_probability=0.05), '
        'jde.WithoutReplacement("example", size=8, population=40))'
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
CLIP = {"multistage": ', clip_unit="task"'}
OURS = """
import jaxdp_episodic as jde
step = jde.GaussianStep({design}, noise_multiplier=2.0{clip})
{question}
"""
EPSILON = "jde.epsilon(step, num_steps=300, delta=1e-5, method={method!r})"
OTHERS = {
    "privacy_report": "jde.privacy_report(step, num_steps=300, delta=1e-5)",
    "epsilon_interval": "jde.epsilon_interval(step, num_steps=300, delta=1e-5)",
    "plan_budget": (
        "from jaxdp_episodic.accountant.questions.budget import plan_budget\n"
        "plan_budget(step, epsilon=8.0, delta=1e-5, num_steps=300)"
    ),
}
WARM = """
import time
import jaxdp_episodic as jde
step = jde.GaussianStep({design}, noise_multiplier=2.0)
for method in ("exact", "pld", "rdp"):
    ask = lambda: jde.epsilon(step, num_steps=300, delta=1e-5, method=method)
    ask()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        ask()
        times.append(time.perf_counter() - start)
    print(f"{{method}} {{1e3 * sorted(times)[25]:.1f}} ms", end="  ")
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
from opacus.accountants import {module} as Accountant
accountant = Accountant()
accountant.history = [(2.0, 0.01, 300)]
accountant.get_epsilon(1e-5)
""",
}
COMMANDS = {
    "epsilon omniglot": ["epsilon", "configs/omniglot.toml"],
    "calibrate omniglot_noise": ["calibrate", "configs/omniglot_noise.toml"],
    "curve two_phases": ["curve", "configs/two_phases.toml", "--out", "{out}/c.png"],
    "plan plan_glyphs": ["plan", "configs/plan_glyphs.toml", "--out", "{out}/plan"],
}


class Cost(NamedTuple):
    """Of one process: seconds, seconds of CPU, mebibytes at the most."""

    wall: float
    cpu: float
    memory: float


def cost(command: list[str], environment: dict[str, str]) -> Cost:
    """Runs a command to its end; what it prints is thrown away.

    Raises:
      RuntimeError: it failed.
    """
    start = time.perf_counter()
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    process = os.posix_spawn(command[0], command, environment, file_actions=quiet)
    _, status, used = os.wait4(process, 0)
    wall = time.perf_counter() - start
    if status:
        raise RuntimeError(f"exit status {status}: {' '.join(command)}")
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def rows(slow: bool) -> dict[str, list[str]]:
    """The commands by name."""
    python = sys.executable
    table = {}
    for name, design in DESIGNS.items():
        question = EPSILON.format(method="exact")
        code = OURS.format(design=design, clip=CLIP.get(name, ""), question=question)
        table[f"exact epsilon, {name}"] = [python, "-c", code]
    design = DESIGNS["sampled Gaussian"]
    for method in ("pld", "rdp"):
        code = OURS.format(
            design=design, clip="", question=EPSILON.format(method=method)
        )
        table[f"{method} epsilon, sampled Gaussian"] = [python, "-c", code]
    for name, question in OTHERS.items():
        code = OURS.format(design=design, clip="", question=question)
        table[name] = [python, "-c", code]
    for name, arguments in COMMANDS.items():
        if slow or not name.startswith(("curve", "plan")):
            table[f"$ {name}"] = [python, "-m", "jaxdp_episodic", *arguments]
    if importlib.util.find_spec("dp_accounting"):
        for module, accountant in (("pld", "PLDAccountant"), ("rdp", "RdpAccountant")):
            code = PEERS["dp_accounting"].format(module=module, accountant=accountant)
            table[f"dp-accounting {module}"] = [python, "-c", code]
    if importlib.util.find_spec("opacus"):
        for name in ("PRVAccountant", "RDPAccountant"):
            code = PEERS["opacus"].format(module=name)
            table[f"opacus {name}"] = [python, "-c", code]
    return table


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each row")
    parser.add_argument("--slow", action="store_true", help="curve and plan as well")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    table = rows(arguments.slow)
    found: dict[str, list[Cost]] = {name: [] for name in table}
    for _ in range(arguments.runs):
        for name, command in table.items():
            with tempfile.TemporaryDirectory() as folder:
                environment = {**os.environ, "XDG_CACHE_HOME": folder}
                filled = [part.replace("{out}", folder) for part in command]
                found[name].append(cost(filled, environment))
    print(f"median of {arguments.runs} fresh processes, {os.cpu_count()} cores")
    print(f"{'':36}  wall s   CPU s     MiB")
    for name, costs in found.items():
        wall, cpu, memory = (statistics.median(c) for c in zip(*costs, strict=True))
        print(f"{name:36}  {wall:6.2f}  {cpu:6.2f}  {memory:6.0f}")
    for name in ("dp_accounting", "opacus"):
        if not importlib.util.find_spec(name):
            print(f"{name}: not installed here, left out")
    print("a warm call in a process: ", end="", flush=True)
    code = WARM.format(design=DESIGNS["sampled Gaussian"])
    os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code])


if __name__ == "__main__":
    main()
