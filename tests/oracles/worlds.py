"""How far apart two worlds of an audit are, from their draws without noise."""

import numpy as np
from scipy.stats import norm

from jaxdp_episodic.trainer.audit.game import likelihood_ratio


def divergence(worlds, noise, epsilon, number, num_steps=1):
    """The hockey-stick divergence of what two worlds release, larger direction."""
    rng = np.random.default_rng(5)
    sums = [world.runs(number, num_steps, rng) / noise for world in worlds]
    if num_steps > 1:  # the mean of (1 - e^(epsilon - loss))_+ over fresh releases
        ratio = likelihood_ratio(*sums, is_joint=num_steps)
        fresh = [world.runs(number, num_steps, rng) / noise for world in worlds]
        losses = [ratio(one + rng.normal(size=one.shape)) for one in fresh]
        there, gone = losses
        return max(
            np.maximum(1 - np.exp(epsilon - loss), 0).mean() for loss in (there, -gone)
        )
    x = np.linspace(-14, 14, 4001)
    densities = []
    for one in sums:
        means, counts = np.unique(one, return_counts=True)
        densities.append(norm.pdf(x[:, None], means).dot(counts / counts.sum()))
    there, gone = densities
    gains = there - np.exp(epsilon) * gone, gone - np.exp(epsilon) * there
    return max(np.trapezoid(np.maximum(gain, 0), x) for gain in gains)
