"""Small trained parts of a public network, beside statistics of its features.

Results are in ``small_heads.csv``; see `study` for the command. The network is trained
without privacy on the first 900 training classes of the glyphs. Private are the next
450, as they are ("same") or turned by 90 degrees and inverted ("other"), on which the
network is worse. Scores are 5-way 1-shot on the glyphs' test classes, changed likewise.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from drawing import markdown
from flax import nnx
from study import Results, Run, Study, cpu_seconds, shown, trained

from jaxdp_episodic.data import load_glyphs
from jaxdp_episodic.trainer.learners.models import split_model
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from jaxdp_episodic.trainer.run.release import flat_params, whole_params
from jaxdp_episodic.training import (
    ConvNet,
    Evaluation,
    FixedFeatures,
    ProtoNet,
    load_parameters,
    read_config,
)

PUBLIC, PRIVATE = slice(0, 900), slice(900, 1350)
CHANNELS, EMBEDDING = (16, 32, 32), 32
STEPS = 150
PICTURES = ("same", "other")
TRAINED = ("head", "film", "lora", "all", "scratch")
METHODS = ("statistics", *TRAINED)
EPSILONS = (1.0, 8.0)

CONFIG = """
version = 1
epsilon = {epsilon}
delta = 1e-5
{steps}
[data]
type = "Npz"
path = "{train}"
test = "{test}"
[step]
privacy_unit = "example"
neighboring_relation = "zero_out"
[step.sampling]
type = "GroupedClasses"
num_classes = {classes}
ways = 5
episodes = {{ type = "Poisson", name = "episode", sampling_probability = 0.5 }}
[step.sampling.examples]
type = "WithoutReplacement"
name = "example"
size = 2
population = 20
[evaluation]
splits = ["test"]
queries = 5
num_episodes = 600
[learner]
shots = 1
"""
EPISODES = """
kind = "protonet"
distance = "cosine"
temperature = 4.0
resplits = true
[optimizer]
learning_rate = {rate}
ema = 0.97
[model]
kind = "conv_embedding"
channels = [16, 32, 32]
embedding = 32
"""


class SmallHeads(Study):
    """What of a network is trained privately: its head, FiLM, LoRA, or all of it."""

    name, keys, repeats = "small_heads", ("pictures", "method", "epsilon"), 1

    def runs(self) -> list[Run]:
        """All methods on both kinds of pictures."""
        return [(p, m, e) for e in EPSILONS for p in PICTURES[::-1] for m in METHODS]

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Scores of the public network as it is, and after the private run."""
        del repeat
        begun, (pictures, method, epsilon) = time.process_time(), run
        config, tables = self._config(pictures, method, epsilon)
        untrained = Evaluation(tables.load("test"), ways=5, shots=1, queries=5)
        apply, params = self._body("__call__")
        before = untrained(ProtoNet(apply, ways=5, distance="cosine"), params).mean
        if method == "statistics":
            hidden, params = self._body("hidden")
            features = FixedFeatures(lambda x: hidden(params, x), name="public body")
            tables = Tables(config, self.out, features=features, keeps_features=False)
        scores, trainer, spent = trained(config, tables, self.out / "run")
        size = sum(leaf.size for leaf in flat_params(trainer.params).values())
        values = {"untrained": before, "test": scores["test"], "parameters": size}
        return values | {"ledger": spent} | cpu_seconds(begun)

    def _config(self, pictures: str, method: str, epsilon: float) -> Any:
        train = self._arrays("train", PRIVATE, pictures)
        text = CONFIG.format(
            epsilon=epsilon,
            steps=""
            if method == "statistics"
            else f"num_steps = {self.steps or STEPS}",
            train=train,
            test=self._arrays("test", slice(None), pictures),
            classes=450,
        )
        if method == "statistics":
            return self._read(text + 'kind = "plda"\n')
        rate = 0.01 if method in ("all", "scratch") else 0.02
        text = text.replace("delta = 1e-5", "delta = 1e-5\nl2_clip_norm = 0.1")
        text += EPISODES.format(rate=rate)
        if method != "scratch":
            text += f'parameters = "{self._public()}"\ntrain = "{method}"\n'
        return self._read(text)

    def _read(self, text: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.toml"
            path.write_text(text)
            config = read_config(path)
        return config, Tables(config, self.out, keeps_features=False)

    def _arrays(self, split: str, classes: slice, pictures: str) -> Path:
        """The file of some classes of the glyphs, which is made once."""
        first, last, _ = classes.indices(10**6)
        path = self.out / f"{split}-{pictures}-{first}-{last}.npz"
        if not path.exists():
            table = load_glyphs(split, size=14)
            place, images = table.class_places, np.asarray(table.features)
            here = (place >= first) & (place < last)
            images = images[here]
            if pictures == "other":
                images = 1 - np.rot90(images, axes=(1, 2))
            np.savez(path, features=images, labels=place[here])
        return path

    def _public(self) -> Path:
        """The file of the network's parameters, which is made once."""
        path = self.out / "public.npz"
        if not path.exists():
            text = CONFIG.format(
                epsilon="inf",
                steps=f"num_steps = {self.steps or 2 * STEPS}\nnoise = 'gaussian'",
                train=self._arrays("train", PUBLIC, "same"),
                test=self._arrays("test", slice(None), "same"),
                classes=900,
            )
            text = text.replace("delta = 1e-5", "delta = 1e-5\nl2_clip_norm = 1.0")
            text += EPISODES.format(rate=0.01)
            config, tables = self._read(text)
            trainer, evaluations, _ = assembled(config, tables)
            trainer.train(self.out / "public", log_every=10**6)
            params = whole_params(trainer.learner, trainer.params)
            print(evaluations["test"](trainer.learner, trainer.params), flush=True)
            np.savez(path, **flat_params(params))
        return path

    def _body(self, method: str) -> Any:
        body = ConvNet((14, 14, 1), CHANNELS, EMBEDDING, rngs=nnx.Rngs(0))
        apply, params = split_model(body, method)
        return apply, load_parameters(self._public(), params)

    def tables(self, found: Results) -> dict[str, str]:
        """Test accuracy of every method."""
        runs = [(p, e) for p in PICTURES for e in EPSILONS]
        head = ["trained privately", "parameters"]
        head += [f"{p}, epsilon {e:g}" for p, e in runs]
        rows = []
        for method in METHODS:
            cells = [shown(found.column("test", (p, method, e))) for p, e in runs]
            sizes = found.column("parameters", ("other", method, 1.0))
            size = f"{sizes[0]:,.0f}" if method in TRAINED and len(sizes) else ""
            rows.append([method, size, *cells])
        first = [found.column("untrained", (p, "statistics", e)) for p, e in runs]
        first = [f"{one[0]:.4f}" if len(one) else "" for one in first]
        rows.insert(0, ["nothing", "", *first])
        return {self.name: markdown(head, rows)}


if __name__ == "__main__":
    SmallHeads().main(__doc__)
