"""Private training on episodes: models, learners, private gradients, the trainer.

Doors: `assemble`, `episode`, `precision`, `processes`, `run`, `run_files`, `search`,
`search_space`, `statistics`, `trainer`.
"""

from jaxdp_episodic.accountant.questions.adaptive_budget import (
    AdaptiveBudget as AdaptiveBudget,
)
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError as BudgetExhaustedError,
    PrivacyBudget as PrivacyBudget,
    plan_budget as plan_budget,
)
from jaxdp_episodic.tools.train.booked import Booking as Booking
from jaxdp_episodic.tools.train.run import run_training as run_training
from jaxdp_episodic.trainer.config.training_adaptive import (
    NextWhenStalled as NextWhenStalled,
    Released as Released,
    SpendRest as SpendRest,
    StopWhenStalled as StopWhenStalled,
)
from jaxdp_episodic.trainer.config.training_config import (
    TrainingConfig as TrainingConfig,
    read_config as read_config,
)
from jaxdp_episodic.trainer.config.training_parts import (
    ClippingConfig as ClippingConfig,
)
from jaxdp_episodic.trainer.config.training_start import StartConfig as StartConfig
from jaxdp_episodic.trainer.gradient.private_gradient import (
    PrivateGradient as PrivateGradient,
)
from jaxdp_episodic.trainer.gradient.processes import RunEndedError as RunEndedError
from jaxdp_episodic.trainer.learners.adapted import film as film
from jaxdp_episodic.trainer.learners.episode import (
    Episode as Episode,
    Learner as Learner,
    classification_episode as classification_episode,
    regression_episode as regression_episode,
)
from jaxdp_episodic.trainer.learners.features import FixedFeatures as FixedFeatures
from jaxdp_episodic.trainer.learners.learners import (
    ANIL as ANIL,
    MAML as MAML,
    BayesianRegression as BayesianRegression,
    Classifier as Classifier,
    ProtoNet as ProtoNet,
    Supervised as Supervised,
)
from jaxdp_episodic.trainer.learners.models import (
    MLP as MLP,
    ConvNet as ConvNet,
    Linear as Linear,
    PatchConv as PatchConv,
    refuse_shared_state as refuse_shared_state,
    split_model as split_model,
)
from jaxdp_episodic.trainer.learners.optimizers import (
    averaged as averaged,
    noise_corrected_adam as noise_corrected_adam,
)
from jaxdp_episodic.trainer.run.adaptive import AdaptiveTrainer as AdaptiveTrainer
from jaxdp_episodic.trainer.run.evaluation import (
    Evaluation as Evaluation,
    PrivateValidation as PrivateValidation,
    Score as Score,
)
from jaxdp_episodic.trainer.run.ledger import RuleError as RuleError
from jaxdp_episodic.trainer.run.loading import (
    load_parameters as load_parameters,
    load_release as load_release,
)
from jaxdp_episodic.trainer.run.release import (
    Classified as Classified,
    Release as Release,
)
from jaxdp_episodic.trainer.run.run_files import StepProgress as StepProgress
from jaxdp_episodic.trainer.run.selection import Selection as Selection, Stage as Stage
from jaxdp_episodic.trainer.run.trainer import Trainer as Trainer
from jaxdp_episodic.trainer.statistics.mixed import MixedModel as MixedModel
from jaxdp_episodic.trainer.statistics.statistics import (
    PrivateStatistics as PrivateStatistics,
)
