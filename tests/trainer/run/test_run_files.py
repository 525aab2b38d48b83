"""The log keeps private numbers apart, and survives being cut off."""

import json

import numpy as np
import pytest

from jaxdp_episodic.trainer.run.run_files import (
    HELD_OUT,
    PRIVATE,
    RunLog,
    read_log,
    releasable_records,
)

RECORDS = [
    {"step": 0, "epsilon": 0.0, HELD_OUT: {"test": {"mean": 0.5}}},
    {"step": 1, "epsilon": 0.25, PRIVATE: {"mean_loss": 1.5, "seconds": 0.1}},
    {"step": 2, PRIVATE: {"mean_loss": 1.25}},
]


def test_written_and_read_back(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        for record in RECORDS:
            log.write(record)
        log.sync()
    assert read_log(path) == RECORDS
    assert path.stat().st_mode & 0o777 == 0o600


def test_arrays_and_infinities_are_json(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.write({"step": np.int64(3), "epsilon": np.float32(np.inf), "x": np.nan})
    assert json.loads(path.read_text()) == {"step": 3, "epsilon": "inf", "x": "nan"}


def test_what_is_releasable_holds_nothing_private():
    released = releasable_records(RECORDS)
    assert released == [{"step": 0, "epsilon": 0.0}, {"step": 1, "epsilon": 0.25}]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "eps')
    assert read_log(path) == [{"step": 1}]
    with RunLog(path, keep_through=1) as log:
        log.write({"step": 2})
    assert read_log(path) == [{"step": 1}, {"step": 2}]


def test_a_damaged_line_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2: not valid JSON"):
        read_log(path)
    path.write_text('{"step": 1}\n[1]\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2: must be an object"):
        read_log(path)


def test_steps_that_will_be_taken_again_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        for step in range(6):
            log.write({"step": step})
    with RunLog(path, keep_through=3) as log:
        log.write({"step": 4, "again": True})
    assert [r["step"] for r in read_log(path)] == [0, 1, 2, 3, 4]
    assert read_log(path)[-1]["again"]
    assert path.stat().st_mode & 0o777 == 0o600
