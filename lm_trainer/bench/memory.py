"""Measures the memory of a training step, and how much gradient checkpointing and a blockwise loss save."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

import jax

from lm_trainer.core.batch import Batch
from lm_trainer.profile.timing import BenchResult, Spread, format_mebibytes, measure_interleaved, time_call
from lm_trainer.run.build.example_batch import example_batch
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.gather import with_resolved_gather
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.dry_run import configure_and_build_setup
from lm_trainer.run.weights.pretrained import resolve_model
from lm_trainer.step.dispatch.memory import bytes_per_device
from lm_trainer.step.state.train_state import TrainState

POLICIES = ("save_all", "dots", "dots_no_batch", "recompute")
BLOCKS = (None, 1024, 512)


def measure_memory(config: RunConfig, *, repeats: int) -> BenchResult:
    """Compiles the gradient with each way of saving memory, reads the memory analysis of XLA, and times all variants.

    Raises:
        UserError: as for `configure_and_build_setup`.
    """
    setup, vocab_size = configure_and_build_setup(config := resolve_model(config, "bench"))
    rows, seq_len = setup.step.local_rows(), config.model.seq_len
    batch = example_batch(config, len(rows), vocab_size)
    state = setup.init()
    plan = setup.step.plans.at(0)
    variants = dict(_config_variants(with_resolved_gather(config, vocab_size), plan.rows * seq_len))
    programs = {name: configure_and_build_setup(variant, vocab_size)[0] for name, variant in variants.items()}
    temporary = {name: _temporary_bytes(other, batch) for name, other in programs.items()}
    runs = {name: _build_timed_gradient(other, state, batch) for name, other in programs.items()}
    # The first calls are not timed, because they allocate memory.
    for run in runs.values():
        run()
    seconds = {name: Spread.from_values(values) for name, values in measure_interleaved(runs, repeats).items()}
    held = _state_bytes(state)
    values = {
        "bytes_per_device": held,
        "microbatch_rows": plan.rows,
        "seq_len": seq_len,
        "gradient": {
            name: {"temporary_bytes": temporary[name], "seconds": spread.as_dict()} for name, spread in seconds.items()
        },
        "peak_bytes": _peak_bytes(),
    }
    width = max(map(len, seconds))
    table = [
        ("parameters", f"{format_mebibytes(held['parameters'])} on each device"),
        ("optimizer", f"{format_mebibytes(held['optimizer'])} on each device"),
        ("microbatch", f"{plan.rows} rows of {seq_len} tokens"),
        *(
            (
                f"gradient, {name:<{width}}",
                f"{_format_bytes(temporary[name]):>12} beside it, {spread.format_milliseconds()}",
            )
            for name, spread in seconds.items()
        ),
        (
            "peak",
            f"{format_mebibytes(_peak_bytes())}, "
            f"{'of a device' if _device_peak_bytes() else 'of the process, with all of the above'}",
        ),
    ]
    return BenchResult(table, values)


def _config_variants(config: RunConfig, tokens: int) -> Iterator[tuple[str, RunConfig]]:
    """Yields the configuration unchanged and with one setting changed, each with a description of the change.

    Args:
        config: the configuration.
        tokens: number of tokens in a microbatch.
    """
    model = config.model
    yield "as configured", config
    # If training runs layer by layer, the activations that a policy saves are not temporary memory of a program.
    for policy in () if config.trainer.gathers_layers else POLICIES:
        changed = model.model_copy(update={"gradient_checkpointing": policy})
        # The configured policy is already the first row.
        if changed.remat != model.remat:
            yield f"gradient_checkpointing: {policy}", config.model_copy(update={"model": changed})
    for block in BLOCKS:
        if block != model.cross_entropy_block_size and (block or 0) < tokens:
            changed = model.model_copy(update={"cross_entropy_block_size": block})
            name = f"cross_entropy_block_size: {'null' if block is None else block}"
            yield name, config.model_copy(update={"model": changed})


def _build_timed_gradient(setup: TrainingSetup, state: TrainState, batch: Batch) -> Callable[[], float]:
    """Returns a function that computes the gradient of a full batch and returns the time in seconds."""
    placed = setup.step.put(batch)
    return lambda: time_call(lambda: jax.block_until_ready(setup.step.gradient(state, placed)))


def _temporary_bytes(setup: TrainingSetup, batch: Batch) -> int | None:
    """Returns the temporary memory for the gradient of a microbatch in bytes, without inputs and outputs."""
    memory = setup.step.compile(batch).memory()
    return None if memory is None else memory.temp_size_in_bytes


def _state_bytes(state: TrainState) -> dict[str, int]:
    """Returns the number of bytes of the training state on each device, as they are between two steps."""
    parts = {"parameters": (state.params, state.frozen), "optimizer": state.opt_state}
    return {name: bytes_per_device(tree) for name, tree in parts.items()}


def _device_peak_bytes() -> int | None:
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max((s["peak_bytes_in_use"] for s in stats if s), default=None)


def _peak_bytes() -> int:
    return _device_peak_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _format_bytes(count: int | None) -> str:
    return "unknown" if count is None else format_mebibytes(count)
