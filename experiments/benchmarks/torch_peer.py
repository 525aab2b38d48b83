"""The private training step in PyTorch (torch.func), as a process that is told to step.

Imports nothing of the library. Parameters come by the library's names and are turned
into PyTorch's layout, gradients go back the same way. What it computes is what
`training.py` describes: each episode's gradient, clipped, summed, with noise.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

Params = dict[str, torch.Tensor]


def timed(run: Callable[[], object], steps: int) -> dict[str, float]:
    """Seconds of a step, by the clock and of processors, in the mean of some."""
    by_clock, of_processors = time.perf_counter(), time.process_time()
    for _ in range(steps):
        run()
    return {
        "seconds": (time.perf_counter() - by_clock) / steps,
        "cpu_seconds": (time.process_time() - of_processors) / steps,
    }


def main() -> None:
    """Answers commands, one JSON object a line; see `training.Worker`."""
    setting = json.loads(sys.argv[1])
    torch.manual_seed(0)
    cases = {name: Case(name, spec) for name, spec in setting["cases"].items()}
    # Threads wait for each other in busy loops: on a busy machine one is faster.
    threads = {f"{n} threads": n for n in range(setting["threads"], 0, -1)}
    print(json.dumps({"variants": list(threads)}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        case = cases[command["case"]]
        torch.set_num_threads(threads[command["variant"]])
        if "write" in command:
            total = clipped_sum(case)
            arrays = library_layout(total, case.side)
            np.savez(command["write"], allow_pickle=False, **arrays)
            answer = {}
        else:
            answer = timed(partial(step, case), command["steps"])
        print(json.dumps(answer), flush=True)


class Case:
    """Data, parameters and loss of one learner."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self.spec = spec
        stored = np.load(Path(spec["file"]))
        slots = torch.from_numpy(stored["slots"])  # (B, ways, slots, H, W, 1) or (…, D)
        self.ways, shots = slots.shape[1], spec["shots"]
        images = slots.permute(0, 1, 2, 5, 3, 4) if slots.ndim == 6 else slots
        self.support = images[:, :, :shots].flatten(1, 2)
        self.query = images[:, :, shots:].flatten(1, 2)
        labels = torch.arange(self.ways)
        self.support_labels = labels.repeat_interleave(shots)
        self.query_labels = labels.repeat_interleave(slots.shape[2] - shots)
        self.side = stored["slots"].shape[3]  # of the last convolution's output
        for _ in spec["channels"]:
            self.side = (self.side + 1) // 2
        flat = {k[6:]: stored[k] for k in stored.files if k.startswith("param:")}
        self.params = torch_layout(flat, self.side)
        losses = {"maml": self.maml, "protonet": self.protonet}
        self.loss = losses.get(name, self.linear)

    def apply(self, params: Params, images: torch.Tensor) -> torch.Tensor:
        """Convolutions of stride 2 with GroupNorm, then a linear map."""
        for i in range(len(self.spec["channels"])):
            block = f"blocks/{i}/"
            images = F.conv2d(
                images,
                params[block + "conv/kernel"],
                params[block + "conv/bias"],
                stride=2,
                padding=1,
            )
            scale, bias = params[block + "norm/scale"], params[block + "norm/bias"]
            images = F.relu(
                F.group_norm(images, self.spec["groups"], scale, bias, eps=1e-6)
            )
        return F.linear(images.flatten(1), params["head/kernel"], params["head/bias"])

    def maml(self, params: Params, support: Any, query: Any) -> torch.Tensor:
        """Second-order MAML: query loss after the inner steps."""

        def support_loss(inner: Params) -> torch.Tensor:
            return F.cross_entropy(self.apply(inner, support), self.support_labels)

        for _ in range(self.spec["inner_steps"]):
            gradient = grad(support_loss)(params)
            rate = self.spec["inner_learning_rate"]
            params = {name: p - rate * gradient[name] for name, p in params.items()}
        return F.cross_entropy(self.apply(params, query), self.query_labels)

    def protonet(self, params: Params, support: Any, query: Any) -> torch.Tensor:
        """Cross-entropy of minus the squared distances to the class means."""
        embedded = self.apply(params, torch.cat([support, query]))
        near, far = embedded[: len(support)], embedded[len(support) :]
        prototypes = near.reshape(self.ways, -1, near.shape[-1]).mean(1)
        logits = -(far[:, None] - prototypes[None]).square().sum(-1)
        return F.cross_entropy(logits, self.query_labels)

    def linear(self, params: Params, support: Any, query: Any) -> torch.Tensor:
        """Cosines of a linear embedding; each of the two examples once as support."""
        both = torch.stack([support, query])
        embedded = F.normalize(both @ params["kernel"], dim=-1)
        near, far = embedded
        logits = self.spec["temperature"] * torch.stack([far @ near.T, near @ far.T])
        labels = self.support_labels.repeat(2)
        return F.cross_entropy(logits.flatten(0, 1), labels)


def clipped_sum(case: Case) -> Params:
    """Gradients of all episodes side by side, clipped and summed."""
    each = vmap(grad(case.loss), in_dims=(None, 0, 0))
    gradients = each(case.params, case.support, case.query)
    square = sum(g.flatten(1).square().sum(1) for g in gradients.values())
    factor = (case.spec["l2_clip_norm"] / torch.sqrt(square)).clamp(max=1.0)
    return {
        name: torch.einsum("b,b...->...", factor, g) for name, g in gradients.items()
    }


def step(case: Case) -> Params:
    """The clipped sum, noised and divided."""
    deviation = case.spec["l2_clip_norm"] * case.spec["noise_multiplier"]
    return {
        name: (t + deviation * torch.randn_like(t)) / len(case.support)
        for name, t in clipped_sum(case).items()
    }


def torch_layout(params: dict[str, np.ndarray], side: int) -> Params:
    """Kernels (9 in, out) become (out, in, 3, 3); the head reads channels first."""
    result = {}
    for name, value in params.items():
        tensor = torch.from_numpy(value)
        if name.endswith("conv/kernel"):
            tensor = tensor.reshape(3, 3, -1, tensor.shape[1]).permute(3, 2, 0, 1)
        elif name == "head/kernel":
            tensor = tensor.reshape(side, side, -1, tensor.shape[1])
            tensor = tensor.permute(3, 2, 0, 1).flatten(1)
        result[name] = tensor.contiguous()
    return result


def library_layout(params: Params, side: int) -> dict[str, np.ndarray]:
    """The inverse of `torch_layout`."""
    result = {}
    for name, tensor in params.items():
        if name.endswith("conv/kernel"):
            tensor = tensor.permute(2, 3, 1, 0).flatten(0, 2)
        elif name == "head/kernel":
            channels = tensor.shape[1] // side**2
            tensor = tensor.reshape(-1, channels, side, side)
            tensor = tensor.permute(2, 3, 1, 0).flatten(0, 2)
        result[name] = tensor.detach().numpy()
    return result


if __name__ == "__main__":
    main()
