"""The recipes for clusters, run with stand-ins for Slurm's commands."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from sweep_runs import SWEEP, contents
from training_runs import TINY

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "configs" / "cluster"
SCRIPTS = sorted(RECIPES.glob("*.sbatch"))
PROGRAM = "jaxdp-episodic"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")

# Runs a command as often as --ntasks or the job says, with Slurm's variables for each;
# it ends with the highest exit code.
SRUN = """
number=$SLURM_NTASKS
while [[ ${1:-} == --* ]]; do
  [[ $1 == --ntasks=* ]] && number=${1#*=}
  shift
done
tasks=()
for ((i = 0; i < number; i++)); do
  SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=$number \\
    SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1 "$@" &
  tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
echo $$ > "$NOTES.srun"
worst=0
for task in "${tasks[@]}"; do
  while kill -0 "$task" 2>/dev/null; do wait "$task"; status=$?; done
  wait "$task" || status=$?
  ((status > worst)) && worst=$status
done
exit "$worst"
"""
# A stand-in that records calls of our program.
NOTES = 'echo "$(basename "$0") $*" >> "$NOTES"\n'


@pytest.fixture
def cluster(tmp_path):
    """Runs a script as Slurm would, with stand-ins for some commands."""

    def run(script, *arguments, commands=(), wait=True, **environment):
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        for name, text in {"srun": SRUN, "scontrol": NOTES, **dict(commands)}.items():
            (tools / name).write_text(f"#!/bin/bash\n{text}")
            (tools / name).chmod(0o755)
        process = subprocess.Popen(
            ["bash", str(script), *map(str, arguments)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "NOTES": str(tmp_path / "notes"),
                "SLURM_JOB_ID": "7",
                "SLURM_NTASKS": "2",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if not wait:
            return process
        output, errors = process.communicate(timeout=600)
        return process.returncode, output + errors

    return run


def noted(tmp_path):
    """Calls of stand-ins since the last check."""
    file = tmp_path / "notes"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return sorted(lines)


def test_the_scripts_parse_and_shellcheck_has_no_complaint():
    assert len(SCRIPTS) == 3
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", *SCRIPTS], check=True)


def test_an_array_evaluates_shards_and_a_last_job_collects(cluster, tmp_path):
    script, fake = RECIPES / "sweep.sbatch", {PROGRAM: NOTES}
    arguments = ("a file", "dir", 64)
    cluster(script, *arguments, commands=fake, SLURM_ARRAY_TASK_ID="3")
    cluster(script, *arguments[:2], commands=fake)
    assert noted(tmp_path) == [
        "jaxdp-episodic sweep a file --out dir",
        "jaxdp-episodic sweep a file --out dir --shard 3/64",
    ]
    code, said = cluster(script, "file", "dir", commands=fake, SLURM_ARRAY_TASK_ID="3")
    assert code and "the number of parts" in said
    code, said = cluster(script, "file", commands=fake)
    assert code and "the folder of the sweep" in said and not noted(tmp_path)


def test_training_resumes_an_existing_run(cluster, tmp_path):
    script, fake = RECIPES / "train.sbatch", {PROGRAM: NOTES}
    asked = "jaxdp-episodic train c.toml --out run --distributed"
    (tmp_path / "run").mkdir()
    for name, more in (("run.sqlite.tmp-1", ""), ("run.sqlite", " --resume")):
        (tmp_path / "run" / name).write_text("a run")
        assert cluster(script, "c.toml", "run", commands=fake)[0] == 0
        assert noted(tmp_path) == [asked + more] * 2


@pytest.mark.parametrize(("code", "requeued"), [(143, 1), (2, 0)])
def test_a_job_out_of_time_is_requeued(cluster, tmp_path, code, requeued):
    script, fake = RECIPES / "train.sbatch", {PROGRAM: f"exit {code}"}
    assert cluster(script, "c.toml", "run", commands=fake)[0] == code
    assert noted(tmp_path) == ["scontrol requeue 7"] * requeued


# A Ray cluster of two nodes, which are this machine.
RAY = {
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_CPUS_PER_TASK": "1",
}


def test_a_ray_cluster_is_started_and_ended(cluster, tmp_path):
    wait = 'case "$2" in --head*) exec sleep 9;; esac\n'
    until = 'until [ "$(grep -c start "$NOTES")" = 2 ]; do sleep 0.02; done\n'
    fakes = {"ray": NOTES + wait, PROGRAM: until + NOTES, "scontrol": "echo 127.0.0.1"}
    out = tmp_path / "out"
    script = RECIPES / "sweep_ray.sbatch"
    assert cluster(script, "file", out, commands=fakes, **RAY)[0] == 0
    start = "ray start {} --num-cpus=1{} --disable-usage-stats --block"
    assert set(noted(tmp_path)) == {
        "ray health-check --address 127.0.0.1:6379",
        start.format("--head --port=6379", " --include-dashboard=false"),
        start.format("--address=127.0.0.1:6379", ""),
        f"jaxdp-episodic sweep file --out {out} --engine ray "
        "--ray-address 127.0.0.1:6379",
    }


@pytest.fixture
def manifests():
    """The objects of the Kubernetes manifest."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return list(yaml.safe_load_all((RECIPES / "train.yaml").read_text()))


@pytest.mark.parametrize("version", ["1.27", "1.32", "1.36"])
def test_kubernetes_takes_the_manifest(manifests, version):
    reason = "kubernetes-validate (PyPI) is not installed"
    validator = pytest.importorskip("kubernetes_validate", reason=reason)
    assert [m["kind"] for m in manifests] == ["Service", "PersistentVolumeClaim", "Job"]
    for manifest in manifests:
        validator.validate(manifest, version, strict=True)


def test_every_pod_starts_its_process(manifests, cluster, tmp_path):
    job = manifests[-1]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert int(variable["value"]) == job["completions"] == job["parallelism"]
    assert container["command"] == ["/bin/sh", "-euc"]
    script = tmp_path / "pod.sh"
    shared = tmp_path / "shared"
    (text,) = container["args"]
    script.write_text("set -eu\n" + text.replace("/shared", str(shared)))
    pod = {"NUM_PROCESSES": variable["value"], "JOB_COMPLETION_INDEX": "3"}
    expected = (
        f"jaxdp-episodic train /config/config.toml --out {shared}/run --distributed "
        "--coordinator train-0.train:55527 --num-processes 4 --process-index 3"
    )
    assert cluster(script, commands={PROGRAM: NOTES}, **pod)[0] == 0
    (shared / "run").mkdir(parents=True)
    (shared / "run/run.sqlite").write_text("a run")
    assert cluster(script, commands={PROGRAM: NOTES}, **pod)[0] == 0
    assert noted(tmp_path) == [expected, expected + " --resume"]


OURS = f'exec "{sys.executable}" -m jaxdp_episodic "$@"'


@pytest.mark.slow
def test_an_array_writes_the_table_of_one_process(cluster, tmp_path):
    (tmp_path / "sweep.toml").write_text(SWEEP)
    script, ours = RECIPES / "sweep.sbatch", {PROGRAM: OURS}
    assert cluster(script, "sweep.toml", "one", commands=ours)[0] == 0
    tasks = [
        cluster(
            script,
            *("sweep.toml", "many", 3),
            commands=ours,
            wait=False,
            SLURM_ARRAY_TASK_ID=str(task),
        )
        for task in (1, 2, 3)
    ]
    tasks[1].kill()  # a lost node
    codes = [task.wait() for task in tasks if task.communicate()]
    assert codes[0] == codes[2] == 0 and codes[1]
    assert cluster(script, "sweep.toml", "many", commands=ours)[0] == 0
    one, many = (contents(tmp_path / name) for name in ("one", "many"))
    for name in ("manifest.json", "table.parquet"):
        assert one[name] == many[name]


@pytest.mark.slow
def test_a_sweep_on_a_ray_cluster(cluster, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed (the extra [ray])")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    ours = {PROGRAM: OURS, "scontrol": "echo 127.0.0.1"}
    code, said = cluster(
        RECIPES / "sweep_ray.sbatch",
        *("sweep.toml", tmp_path / "out"),
        commands=ours,
        RAY_PORT="6397",
        **RAY,
    )
    assert code == 0, said
    assert "evaluated  2,880" in said


@pytest.mark.slow
def test_a_run_out_of_time_resumes(cluster, tmp_path):
    """Two processes that SIGTERM ends during their work."""
    steps = TINY.replace("num_steps = 3", "num_steps = 120\ncheckpoint_every = 10")
    (tmp_path / "run.toml").write_text(steps)
    number = str(os.getpid())  # a port that no other test uses
    start = (RECIPES / "train.sbatch", "run.toml", "run")
    job = {"commands": {PROGRAM: OURS}, "SLURM_JOB_ID": number}
    process = cluster(*start, wait=False, **job)
    store = tmp_path / "run" / "run.sqlite"
    end = time.monotonic() + 600
    while time.monotonic() < end and process.poll() is None:
        if store.exists() and read_ledger(store).charged >= 10:
            break
        time.sleep(0.1)
    os.kill(int((tmp_path / "notes.srun").read_text()), signal.SIGTERM)
    said = process.communicate(timeout=300)
    assert process.returncode == 143, said
    assert noted(tmp_path) == [f"scontrol requeue {number}"]
    code, said = cluster(*start, **job)
    assert code == 0, said
    assert "resumed after step" in said and (tmp_path / "run/report.md").exists()
