"""Every reader gives a clear error for files that Hypothesis has broken.

``experiments/trust/fuzz.py`` runs the full number of cases.
"""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzzing.children import CASE, fuzzed_in_child
from fuzzing.deadly import deadly_targets
from fuzzing.targets import outcome, targets

SLOW = pytest.mark.slow
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


@SLOW
@pytest.mark.parametrize("name", TARGETS)
def test_many_cases(name):
    fuzz(name, 1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "longest", "signal"),
    [("ends", 60.0, "SIGABRT"), pytest.param("stays", 1.0, "SIGKILL", marks=SLOW)],
)
def test_a_case_that_ends_the_process_is_kept(tmp_path, name, longest, signal):
    result = fuzzed_in_child(name, 100, tmp_path, find=deadly_targets, longest=longest)
    number, case = (tmp_path / CASE).read_text().split()
    assert int(case) > 1_000
    assert result["cases"] == int(number)
    assert result["failure"] == f"case {number} ended the process: {signal}"
