"""Copies of the parameters in each process, for generating text and evaluating tasks without the other processes."""

from __future__ import annotations

import jax

from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.step.state.inference_sharding import inference_shardings
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import to_host


def gather_full_params(setup: TrainingSetup, params: Params) -> Params:
    """Gathers the full parameters in each process. All processes of a run must call this function.

    Args:
        setup: model, optimizer, shardings and compiled functions of the run.
        params: all parameters, sharded as in training.

    Returns:
        If a training step gathers one layer at a time, the parameters sharded over the devices of this process, because
        they may not fit on one device. Otherwise unsharded parameters on one device, as in training, so that results do
        not depend on the number of devices.
    """
    if not setup.gathers_layers:
        return to_host(params)  # pyright: ignore[reportReturnType]
    full_params = params if jax.process_count() == 1 else to_host(params)
    return jax.device_put(full_params, inference_shardings(setup.model, setup.sharding.mesh.local_devices))
