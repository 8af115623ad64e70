"""Measures the speed of decoding with a key-value cache, relative to the limit set by reading weights from memory."""

from __future__ import annotations

import jax
import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.generate.engine import Generation
from lm_trainer.generate.layout import to_decoding_layout
from lm_trainer.generate.sampling import GenerateSettings
from lm_trainer.nn.mixer_spec import cache_sizes
from lm_trainer.profile.bandwidth import CopyProbe
from lm_trainer.profile.timing import BenchResult, Spread, format_si, measure_interleaved, time_call
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.dry_run import configure_and_build_setup
from lm_trainer.run.weights.pretrained import resolve_model


def measure_decode(config: RunConfig, *, rows: int, prompt: int, new: int, repeats: int) -> BenchResult:
    """Times the prefill of `rows` prompts with `prompt` tokens each and the decoding of `new` tokens for each prompt.

    The model has random weights.

    Raises:
        UserError: if prompt and new tokens do not fit into the model's context, or as for `configure_and_build_setup`.
    """
    program, vocab_size = configure_and_build_setup(config := resolve_model(config, "bench"))
    context = config.model.spec(vocab_size).num_positions
    if prompt + new > context:
        raise UserError(
            f"--prompt {prompt} and --new {new} are {prompt + new} tokens, but the model's context has {context}; "
            f"make one of them smaller"
        )
    with jax.default_device(jax.local_devices()[0]):
        params = jax.jit(program.model.init)()
    dtype = config.trainer.mp.compute_dtype
    # Casts the weights once, so that each decoding step reads them in the compute dtype instead of float32.
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    model = to_decoding_layout(program.model.merge(params), dtype)
    prompts = np.random.default_rng(0).integers(0, vocab_size, (rows, prompt)).tolist()

    settings = GenerateSettings(max_new_tokens=new, temperature=0, dtype=dtype)
    generation = Generation.prepare(model, prompts, settings)
    prefilled = jax.block_until_ready(generation.prefill())
    probe = CopyProbe(jax.local_devices()[0])
    runs = {
        "read": lambda: time_call(lambda: jax.block_until_ready(generation.prefill())),
        "write": lambda: time_call(lambda: jax.block_until_ready(generation.decode(*prefilled))),
        "copy": lambda: probe.num_bytes / probe.run(),
    }
    # The first calls are not timed, because they compile.
    for run in runs.values():
        run()
    timings = measure_interleaved(runs, repeats)
    first, token = (
        Spread.from_values(timings["read"]),
        Spread.from_values([seconds / new for seconds in timings["write"]]),
    )
    bandwidth = Spread.from_values(timings["copy"])
    # Each decoding step reads all weights and the full cache at least once, so the bandwidth gives a lower bound for
    # its time.
    read = float(sum(x.nbytes for x in jax.tree.leaves(params)) + _cache_bytes(config, vocab_size, rows, prompt + new))
    fraction = read / token.median / bandwidth.median
    values = {
        "num_params": sum(x.size for x in jax.tree.leaves(params)),
        "rows": rows,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "dtype": config.trainer.mp.compute,
        "prefill_seconds": first.as_dict(),
        "prefill_tokens_per_second": rows * prompt / first.median,
        "seconds_per_token": token.as_dict(),
        "tokens_per_second": rows / token.median,
        "bytes_read_per_token": read,
        "copy_bytes_per_second": bandwidth.as_dict(),
        "bandwidth_fraction": fraction,
        "samples": repeats,
    }
    table = [
        ("device", f"1 x {jax.local_devices()[0].device_kind}, computing in {config.trainer.mp.compute}"),
        ("work", f"{rows} x {prompt} tokens read, {rows} x {new} written, without sampling; {repeats} samples"),
        ("prompt", f"{first.format_milliseconds()}, {values['prefill_tokens_per_second']:,.0f} tokens/s"),
        ("each token", f"{token.format_milliseconds()}, {values['tokens_per_second']:,.0f} tokens/s in all rows"),
        ("reads for it", f"{format_si(read)}B of weights and cache, {format_si(read / token.median)}B/s"),
        ("of measured bandwidth", f"{fraction:.1%} of {format_si(bandwidth.median)}B/s (a plain copy)"),
    ]
    return BenchResult(table, values)


def _cache_bytes(config: RunConfig, vocab_size: int, rows: int, length: int) -> int:
    """Returns the number of bytes of the keys and values of all layers for `length` cached tokens in each row."""
    sizes = [cache_sizes(block.mixer) for block in config.model.spec(vocab_size).blocks]
    width = sum(heads * (key + value) for heads, key, value in filter(None, sizes))
    return rows * length * width * config.trainer.mp.compute_dtype.itemsize
