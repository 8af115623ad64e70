"""Parameters of a run where programs of a single process compute with them: for text, and for tasks."""

from __future__ import annotations

import jax

from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.step.state.inference_sharding import inference_shardings
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import to_host


def local_params(setup: TrainingSetup, params: Params) -> Params:
    """The parameters whole in this process; all processes of a run call it together.

    Args:
        setup: of the run.
        params: all parameters, as the run has them.

    Returns:
        Where a step gathers layers they are cut over the devices of this process, of which none may hold them all.
        Otherwise they are whole on one, as they were for training: results are then those of any number of devices.
    """
    if not setup.gathers_layers:
        return to_host(params)  # pyright: ignore[reportReturnType]
    whole = params if jax.process_count() == 1 else to_host(params)
    return jax.device_put(whole, inference_shardings(setup.model, setup.sharding.mesh.local_devices))
