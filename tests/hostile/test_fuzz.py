"""Every reader gives a clear error for files that Hypothesis has broken.

``experiments/trust/fuzz.py`` runs the full number of cases.
"""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzzing.targets import outcome, targets

TARGETS = {target.name: target for target in targets()}


def fuzz(name: str, cases: int) -> None:
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:

        @settings(
            max_examples=cases, suppress_health_check=list(HealthCheck), database=None
        )
        @given(target.cases)
        def run(case):
            outcome(target, case, Path(folder))

        run()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_hundred_cases(name):
    fuzz(name, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_cases(name):
    fuzz(name, 1000)
