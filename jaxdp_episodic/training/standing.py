"""Where a run stands: its state, its secrets and its ledger, in every process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp_episodic.accounting.budget import PrivacyBudget
from jaxdp_episodic.training import run_files
from jaxdp_episodic.training.checkpoint import (
    Checkpoints,
    Secrets,
    Snapshot,
    TrainingState,
    noise_key,
    released_params,
)
from jaxdp_episodic.training.description import agreed
from jaxdp_episodic.training.ledger import Ledger, taken_up
from jaxdp_episodic.training.private_gradient import PrivateGradient
from jaxdp_episodic.training.processes import all_processes


class Standing:
    """A run's state and how far it is; what `Trainer` moves on.

    Where there are several processes the first one's is the run's, and the others are
    given what their shares of the steps need, before the first of them: the entropy of
    the draws, the parameters, and private statistics that were released.

    Args:
      gradient: of the steps, which knows the devices.
      state: before the first step.
      secrets: of a new run.
      run: what it is; see `described_run`.
      budget: of the run.
      environment: of this process; see `described_environment`.
      noise: "gaussian" or "discrete".

    Attributes:
      run: what the run is.
      ledger: counts its charges; in other processes than the first a copy in memory.
      environment: that of all processes, once they have joined.
    """

    def __init__(
        self,
        gradient: PrivateGradient,
        state: TrainingState,
        secrets: Secrets,
        run: Mapping[str, Any],
        budget: PrivacyBudget,
        environment: Mapping[str, Any],
        noise: str,
    ) -> None:
        self.run, self.budget, self.noise = run, budget, noise
        self.ledger, self.environment = Ledger(budget), dict(environment)
        self._gradient, self._secrets = gradient, secrets
        # One attribute: whenever an interrupt comes, the two belong together.
        self._now = (gradient.on_devices(state), 0)
        self._processes = all_processes()
        self._has_agreed = self._is_joined = False
        self._folder: Path | None = None
        self._num_resumed = 0

    @property
    def state(self) -> TrainingState:
        """Parameters and optimizer state as they stand."""
        return self._now[0]

    @property
    def params(self) -> Any:
        """The parameters to evaluate and release; see `released_params`."""
        return released_params(self.state)

    @property
    def num_steps_taken(self) -> int:
        """Steps up to which the run stands, those given up by `resume` included."""
        return self._now[1]

    @property
    def num_steps_charged(self) -> int:
        """Steps charged so far: those taken, and those to take again first.

        Those are steps that were broken off, or that came after the checkpoint that was
        resumed. `step` takes them with the same draw and noise, uncharged.
        """
        return self.ledger.charged

    def snapshot(self) -> Snapshot:
        """Returns the run as it stands, secrets included.

        It counts the steps that its state contains: one that was charged and broken
        off is repeated with the same draw and noise.
        """
        state, taken = self._now
        return Snapshot(state, taken, self._secrets, self.run)

    def go_back_to(self, snapshot: Snapshot) -> None:
        """Goes back to a step before; those behind it stay charged."""
        self._now = (snapshot.state, snapshot.charged_steps)

    def _noise_key(self, number: int) -> bytes:
        """The key of a step's noise."""
        return noise_key(self._secrets, number)

    def _noise(self, number: int) -> Any:
        """A step's noise, which is in the first process's hands alone."""
        if not self._processes.is_first:
            return None
        multiplier = float(self.budget.step.noise_multiplier)
        key = self._noise_key(number)
        return self._gradient.noise(self.state.params, key, multiplier)

    def _shared(self, tree: Any) -> Any:
        """The first process's arrays, on this one's devices."""
        shared = self._processes.shared(tree)
        return shared if shared is tree else self._gradient.on_devices(shared)

    def _take_up(self, folder: Path) -> None:
        """Takes up the checkpoint and the ledger in a folder."""
        run_files.refuse_without_checkpoint(folder)
        with Checkpoints(folder / run_files.CHECKPOINTS) as checkpoints:
            snapshot = checkpoints.restore(self.state, self.run)
        self.ledger, taken = taken_up(
            folder / run_files.LEDGER, snapshot, self.budget, self.environment
        )
        state = self._gradient.on_devices(TrainingState(*snapshot.state))
        self._secrets = snapshot.secrets
        self._now = (state, taken)
        self._folder = folder.resolve()
        self._num_resumed = snapshot.charged_steps

    def _join(self) -> None:
        """Makes the trainers of all processes one run, once."""
        if not self._is_joined:
            with self._processes.together():
                self._agree()
                self._share()

    def _agree(self) -> None:
        """Refuses processes with another run than the first; asked once."""
        if self._has_agreed:
            return
        leaves = jax.tree.leaves(self.state.params)
        kinds = [f"{leaf.dtype} {leaf.shape}" for leaf in leaves]
        run = {**self.run, "parameters": kinds}
        self.environment = agreed(self._processes, run, self.environment)
        self._has_agreed = True

    def _share(self) -> None:
        """Gives all processes what the first one has: where the run stands."""
        entropy, ledger = self._secrets.sampler_entropy, self.ledger
        shared = self._processes.shared_value(
            [f"{entropy:x}", self.num_steps_taken, ledger.charged, self._num_resumed]
        )
        state = self.state
        params, start = self._shared((state.params, state.start))
        if not self._processes.is_first:
            entropy, taken, charged, self._num_resumed = shared
            self._secrets = Secrets(int(entropy, 16), np.zeros(0, np.uint32))
            self.ledger = Ledger(self.budget, charged=charged)
            self._now = (state._replace(params=params, start=start), taken)
        self._is_joined = True
