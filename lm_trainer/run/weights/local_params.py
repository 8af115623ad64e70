"""Process-local parameters of a run, for generating text and evaluating tasks in each process separately."""

from __future__ import annotations

import jax

from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.step.state.inference_sharding import inference_shardings
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import to_host


def gather_full_params(setup: TrainingSetup, params: Params) -> Params:
    """Gathers the full parameters in each process; all processes of a run must call it.

    Args:
        setup: program of the run.
        params: all parameters, sharded as in training.

    Returns:
        If a step gathers single layers, the parameters sharded over this process's devices, because they may not fit on
        one. Otherwise unsharded on one device, as in training, so results do not depend on the number of devices.
    """
    if not setup.gathers_layers:
        return to_host(params)  # pyright: ignore[reportReturnType]
    full_params = params if jax.process_count() == 1 else to_host(params)
    return jax.device_put(full_params, inference_shardings(setup.model, setup.sharding.mesh.local_devices))
