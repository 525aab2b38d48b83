"""Private training on episodes: models, learners, private gradients, the trainer."""

from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError,
    PrivacyBudget,
    plan_budget,
)
from jaxdp_episodic.tools.train.run import Booking, run_training
from jaxdp_episodic.trainer.config.training_adaptive import (
    NextWhenStalled,
    Released,
    SpendRest,
    StopWhenStalled,
)
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.config.training_parts import ClippingConfig, StartConfig
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.gradient.processes import RunEndedError
from jaxdp_episodic.trainer.learners.episode import (
    Episode,
    Learner,
    classification_episode,
    regression_episode,
)
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from jaxdp_episodic.trainer.learners.learners import (
    ANIL,
    MAML,
    BayesianRegression,
    Classifier,
    ProtoNet,
    Supervised,
)
from jaxdp_episodic.trainer.learners.models import (
    MLP,
    ConvNet,
    Linear,
    PatchConv,
    film,
    refuse_shared_state,
    split_model,
)
from jaxdp_episodic.trainer.learners.optimizers import averaged, noise_corrected_adam
from jaxdp_episodic.trainer.run.assemble import AdaptiveTrainer
from jaxdp_episodic.trainer.run.evaluation import Evaluation, PrivateValidation, Score
from jaxdp_episodic.trainer.run.ledger import RuleError
from jaxdp_episodic.trainer.run.loading import load_parameters, load_release
from jaxdp_episodic.trainer.run.loop import Selection, Stage
from jaxdp_episodic.trainer.run.release import Classified, Release
from jaxdp_episodic.trainer.run.run_files import StepProgress
from jaxdp_episodic.trainer.run.trainer import Trainer
from jaxdp_episodic.trainer.statistics.mixed import MixedModel
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics

__all__ = [
    "ANIL",
    "MAML",
    "MLP",
    "Booking",
    "AdaptiveBudget",
    "AdaptiveTrainer",
    "BayesianRegression",
    "BudgetExhaustedError",
    "Classifier",
    "Classified",
    "ClippingConfig",
    "ConvNet",
    "Episode",
    "Evaluation",
    "FixedFeatures",
    "Learner",
    "Linear",
    "MixedModel",
    "NextWhenStalled",
    "PatchConv",
    "PrivacyBudget",
    "PrivateGradient",
    "PrivateStatistics",
    "PrivateValidation",
    "ProtoNet",
    "Release",
    "Released",
    "RuleError",
    "RunEndedError",
    "Score",
    "Selection",
    "Stage",
    "SpendRest",
    "StartConfig",
    "StepProgress",
    "StopWhenStalled",
    "Supervised",
    "Trainer",
    "TrainingConfig",
    "averaged",
    "classification_episode",
    "film",
    "load_parameters",
    "load_release",
    "noise_corrected_adam",
    "plan_budget",
    "read_config",
    "refuse_shared_state",
    "regression_episode",
    "run_training",
    "split_model",
]
