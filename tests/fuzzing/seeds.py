"""Valid files and descriptions, which the strategies break."""

import io
import json
from typing import Any

import numpy as np
from PIL import Image

REQUEST = b"""version = 1
num_steps = 100
delta = 1e-5
method = "rdp"

[step]
type = "GaussianStep"
noise_multiplier = 1.5
clip_unit = "school"
privacy_unit = "pupil"

[step.sampling]
type = "MultistageSampling"
levels = [
  { type = "Poisson", name = "school", sampling_probability = 0.1 },
  { type = "WithoutReplacement", name = "pupil", size = 5 },
]

[population]
levels = ["school", "pupil"]
sizes = [12, 30, 7]
"""
CALIBRATION = b"""version = 1
calibrate = "noise_multiplier"
num_steps = 100
epsilon = 2.0
delta = 1e-5

[step]
type = "GaussianStep"

[step.sampling]
type = "Poisson"
name = "user"
sampling_probability = 0.01
"""
SWEEP = b"""version = 1
num_steps = 1_000
delta = 1e-5
method = "rdp"

[step]
type = "GaussianStep"
clip_unit = "class"

[step.sampling]
type = "MultistageSampling"
levels = [
  { type = "Poisson", name = "class", sampling_probability = 0.1 },
  { type = "WithoutReplacement", name = "example", population = 40 },
]

[[axes]]
field = "noise_multiplier"
geomspace = [0.5, 8.0, 5]

[[axes]]
field = "example.size"
linspace = [1, 40, 4]
"""
PLAN = b"""version = 1
epsilon = 4.0
delta = 1e-5
privacy_unit = "example"
schemes = ["poisson"]

[population]
levels = ["class", "example"]
sizes = [20, 20, 20, 20, 20, 20, 20, 20]

[episode]
ways = 4
shots = 1
examples = [4]

[compute]
episodes_per_step = 2
total_episodes = 100

[learning]
alignment = 0.3
"""
TRAINING = b"""version = 1
epsilon = 8.0
delta = 1e-5
num_steps = 300
l2_clip_norm = 0.1
clipping = { kind = "quantile", quantile = 0.5, minimum = 0.01 }

[data]
type = "Glyphs"
size = 14

[step]
privacy_unit = "example"

[step.sampling]
type = "GroupedClasses"
num_classes = 1_800
ways = 5
episodes = { type = "Poisson", name = "episode", sampling_probability = 0.5 }
examples = { type = "WithoutReplacement", name = "example", size = 4, population = 20 }

[learner]
kind = "protonet"
shots = 1

[model]
kind = "conv_embedding"
channels = [8, 8]
embedding = 8

[optimizer]
kind = "adam"
schedule = "cosine"

[evaluation]
splits = ["validation"]
queries = 5
num_episodes = 10
"""
SEARCH = b"""version = 1
epsilon = 8.0
delta = 1e-5
held_out_is_public = true

[trials]
type = "NegativeBinomialTrials"
expected_runs = 4.0

[hyperparameters]
"optimizer.learning_rate" = { type = "LogUniform", low = 1e-3, high = 2e-2 }
"num_steps" = { type = "Integers", low = 3, high = 5 }
"step.sampling.ways" = { type = "Choice", values = [5, 10] }

""" + TRAINING.replace(
    b"version = 1\nepsilon = 8.0\ndelta = 1e-5\n", b"[run]\n"
).replace(b"\n[", b"\n[run.").replace(b"[run.run]", b"[run]")

POISSON = {"type": "Poisson", "name": "class", "sampling_probability": 0.1}
FIXED = {"type": "WithoutReplacement", "name": "example", "size": 3, "population": 9}
STAGES = {"type": "MultistageSampling", "levels": [POISSON, FIXED]}
GROUPED = {
    "type": "GroupedClasses",
    "num_classes": 40,
    "ways": 5,
    "episodes": {"type": "Poisson", "name": "episode", "sampling_probability": 0.5},
    "examples": FIXED,
}
INDEPENDENT = {"type": "IndependentEpisodes", "sampling": STAGES, "num_episodes": 4}
TREE = {
    "type": "Population",
    "children_counts": [[3], [2, 0, 4]],
    "level_names": ["class", "example"],
}
STEP = {
    "type": "GaussianStep",
    "sampling": STAGES,
    "noise_multiplier": 1.0,
    "clip_unit": "class",
    "population": TREE,
}
SPECS: tuple[dict[str, Any], ...] = tuple(
    {"version": 1, **spec}
    for spec in (
        POISSON,
        FIXED,
        STAGES,
        GROUPED,
        INDEPENDENT,
        TREE,
        STEP,
        {"type": "GaussianStep", "sampling": GROUPED, "noise_multiplier": [1.0, 2.0]},
        {
            "type": "ComposedSteps",
            "steps": [STEP, {**STEP, "noise_multiplier": 2.0}],
            "counts": [10, 20],
        },
    )
)
GAUSSIAN = {"class_name": "GaussianDpEvent", "noise_multiplier": 1.0}
DRAWN = {"class_name": "PoissonSampledDpEvent", "sampling_probability": 0.1}
SIZED = {"class_name": "SampledWithoutReplacementDpEvent", "source_dataset_size": 9}
EVENTS: tuple[dict[str, Any], ...] = (
    {**DRAWN, "event": GAUSSIAN},
    {**SIZED, "sample_size": 3, "event": GAUSSIAN},
    {
        "class_name": "ComposedDpEvent",
        "events": [
            {"class_name": "SelfComposedDpEvent", "event": GAUSSIAN, "count": 2},
            {**DRAWN, "event": {"class_name": "ComposedDpEvent", "events": [GAUSSIAN]}},
            {"class_name": "LaplaceDpEvent", "noise_multiplier": 2.0},
            {"class_name": "NoOpDpEvent"},
        ],
    },
)
ROW = {
    "id": 7,
    "num_steps": 100,
    "delta": 1e-5,
    "step": {**STEP, "population": None},
    "population": {"sizes": [12, 30, 7], "levels": ["class", "example"]},
}
ROWS = (ROW, {**ROW, "population": None}, {"version": 1, **ROW, "method": "rdp"})
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
CSV_ROWS = b"""id,num_steps,delta,step.type,step.sampling.type,step.sampling.name,\
step.sampling.sampling_probability,step.noise_multiplier,population
1,100,1e-5,GaussianStep,Poisson,user,0.1,1.0,
2,200,1e-5,GaussianStep,Poisson,user,0.2,1.0,"{""sizes"": [1, 2], ""levels"": [""u""]}"
"""
CSV_TABLE = b"school,pupil,score\na,1,0.5\na,2,1.5\nb,3,-2\n"


def npz(compressed: bool = False) -> bytes:
    """A small archive of arrays."""
    file = io.BytesIO()
    save = np.savez_compressed if compressed else np.savez
    save(
        file,
        features=np.arange(12.0).reshape(6, 2),
        labels=np.array(["a", "b", "a", "c", "b", "c"]),
        targets=np.arange(6.0),
        school=np.array([1, 1, 2, 2, 3, 3]),
        pupil=np.arange(6),
    )
    return file.getvalue()


def image(kind: str) -> bytes:
    """A picture of 6 x 5 pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def parquet(columns: dict[str, Any]) -> bytes:
    """A small Parquet file; needs pyarrow."""
    import pyarrow
    from pyarrow import parquet as arrow_parquet

    file = io.BytesIO()
    arrow_parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


PARQUET_TABLE = {
    "school": ["a", "a", "b"],
    "pupil": [1, 2, 3],
    "score": [0.5, 1.5, -2.0],
}
PARQUET_ROWS = {
    "num_steps": [100, 200],
    "delta": [1e-5, 1e-6],
    "step.type": ["GaussianStep"] * 2,
    "step.noise_multiplier": [1.0, 2.0],
    "step.sampling.type": ["Poisson"] * 2,
    "step.sampling.name": ["u"] * 2,
    "step.sampling.sampling_probability": [0.1, 0.2],
}
