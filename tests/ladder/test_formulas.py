"""Batch, rates, periods and checkpoints of the ladder, against figures worked out by hand and a twin that counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lm_trainer.config.loader import load
from lm_trainer.core.errors import UserError
from lm_trainer.ladder import ModelLadder, TransformerSize, WSDSChinchillaRunConfigurator
from lm_trainer.ladder.plan import plan_rung
from lm_trainer.ladder.rungs import run_config
from lm_trainer.profile.flops import parameter_count
from tests.conftest import ROOT

VOCABULARY = 100_352
OLMO: dict[str, Any] = {
    "name": "olmo3",
    "dir": "ladders/olmo3",
    "sizes": [*TransformerSize],
    "max_devices": 64,
    "device_type": "NVIDIA H100 80GB HBM3",
    "model_configurator": {"type": "olmo3"},
    "run_configurator": {"chinchilla_multiple": 4},
    "trainer": {"elastic_shards": 64},
}

# size: body and N as OLMo-core counts them; batch and halved learning rate worked out with logarithms:
# 327680 * exp(2 / 3 * ln(N / 108e6)) and 0.00235 * exp(-1 / 3 * ln(N / 108e6)).
SIZES = {
    "60M": (18.89e6, 57_422_208, 215_057, 2.900787e-3),
    "100M": (50.36e6, 101_736_960, 314_886, 2.397266e-3),
    "190M": (113.3e6, 190_354_176, 478_126, 1.945457e-3),
    "370M": (268.5e6, 371_262_464, 746_371, 1.557096e-3),
    "760M": (604.1e6, 758_220_288, 1_201_428, 1.227281e-3),
    "1B": (1073.9e6, 1_279_395_840, 1_702_828, 1.030878e-3),
    "3B": (2835.6e6, 3_169_537_280, 3_117_679, 7.618635e-4),
    "7B": (6476.5e6, 6_887_575_552, 5_230_522, 5.881936e-4),
    "13B": (12688.6e6, 13_202_396_160, 8_071_160, 4.735053e-4),
}


def ladder(**changes: Any) -> ModelLadder:
    return ModelLadder.model_validate({**OLMO, **changes})


@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_formulas(size: str) -> None:
    olmo_ladder = ladder()
    body, num_params, batch, rate = SIZES[size]
    spec = olmo_ladder.get_model_config(size).spec(VOCABULARY)
    assert olmo_ladder.get_num_params(size, VOCABULARY) == num_params
    assert parameter_count(spec) - 2 * VOCABULARY * spec.hidden_dim == pytest.approx(body, rel=1e-3)
    recipe = olmo_ladder.run_configurator
    assert recipe.configure_target_batch_size(num_params) == pytest.approx(batch, abs=1)
    assert recipe.learning_rate(num_params, batch) == pytest.approx(rate, rel=1e-6)
    windows = [block.attention.window for block in spec.blocks[:4]]
    assert windows == [4096, 4096, 4096, None]
    assert spec.blocks[-1].attention.window is None


def test_the_published_plan_of_190m() -> None:
    # On 64 H100s OLMo-core trains 190M with 524,288 tokens a step.
    olmo_ladder = ladder()
    shape = olmo_ladder.batch_shape("190M", vocab_size=VOCABULARY, compat="olmo")
    assert shape == (524_288, 65_536, 8, 8)
    recipe, num_params = olmo_ladder.run_configurator, 190_354_176
    periods = recipe.periods(num_params, shape.batch_size)
    assert [period.multiple for period in periods] == [0.5, 1, 2, 4]
    assert [period.end for period in periods] == [3631, 7261, 14523, 29046]
    assert [period.pre_decay for period in periods] == [3267, 6898, 13796, 27593]
    assert recipe.configure_duration(num_params, shape.batch_size) == 29046 * 524_288
    intervals = recipe.configure_checkpoint_intervals(num_params, shape.batch_size)
    assert intervals[:2] == [
        (3267 * 524_288, "period 1, 0.5xC pre-decay"),
        (3631 * 524_288, "period 1, 0.5xC post-decay"),
    ]
    assert [tokens // 524_288 for tokens, _ in intervals] == [3267, 3631, 6898, 7261, 13796, 14523, 27593, 29046]
    optimizer = recipe.configure_optimizer(num_params, shape.batch_size)
    assert optimizer.model_dump(include={"beta1", "beta2", "weight_decay", "max_grad_norm", "skip_bad_steps"}) == {
        "beta1": 0.9,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "skip_bad_steps": True,
    }


@pytest.mark.parametrize("size", ["60M", "190M", "1B", "7B"])
@pytest.mark.parametrize("stepped", [False, True])
def test_schedule_step_by_step(size: str, stepped: bool) -> None:
    """A twin that walks through the tokens, with whole steps of warm-up and decay."""
    recipe = WSDSChinchillaRunConfigurator(chinchilla_multiple=2, decay_fraction=0.2, stepped_schedule=stepped)
    num_params = SIZES[size][1]
    batch = 4 * recipe.configure_target_batch_size(num_params)
    schedule = recipe.configure_lr_scheduler(num_params, batch)
    peak = 0.0047 * (num_params / 108e6) ** (-1 / 3) / 2
    warmup, step = math.ceil(num_params / batch), 0
    for multiple, previous in ((0.5, 0), (1, 0.5), (2, 1)):
        start, end = (round(int(20 * num_params * c) / batch) for c in (previous, multiple))
        decay_tokens = round(0.2 * (end - start) * batch)
        decay = math.ceil(decay_tokens / batch)
        top = peak / math.sqrt(multiple) if stepped else peak
        for step in range(start, end):
            rising = step / warmup if step < warmup else 1.0
            falling = (end - step) / decay if end - step < decay else 1.0
            assert schedule(step) == pytest.approx(top * min(rising, falling), rel=1e-12), (multiple, step)
    assert step == recipe.configure_duration(num_params, batch) // batch - 1
    assert schedule(step + 1) == 0


def test_beta2_follows_the_batch() -> None:
    recipe = WSDSChinchillaRunConfigurator(chinchilla_multiple=1)
    assert recipe.configure_optimizer(10**8, 524_288).beta2 == 0.95  # pyright: ignore[reportAttributeAccessIssue]
    assert recipe.configure_optimizer(10**8, 524_287).beta2 == 0.99  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["adam", "lion", "muon", "soap"])
def test_any_optimizer(name: str) -> None:
    recipe = WSDSChinchillaRunConfigurator.model_validate({"chinchilla_multiple": 1, "optimizer": {"type": name}})
    optimizer = recipe.configure_optimizer(10**8, 2**18)
    assert optimizer.type == name  # pyright: ignore[reportAttributeAccessIssue]
    schedule = optimizer.schedule(recipe.configure_duration(10**8, 2**18) // 2**18)
    assert schedule(2000) == recipe.learning_rate(10**8, 2**18)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("ladder_*.yaml")), ids=lambda path: path.stem)
def test_every_ladder_is_valid(path: Path) -> None:
    config = load(path, [], ModelLadder).config
    runs = [run_config(config, size, vocab_size=VOCABULARY) for size in config.sizes]
    assert len({run.trainer.num_train_steps for run in runs}) >= 4
    # A plan rehearses a step, which takes seconds for each size.
    assert plan_rung(config, config.sizes[0], vocab_size=VOCABULARY).steps == runs[0].trainer.num_train_steps


EXPERTS: dict[str, Any] = {
    "hidden_dim": 8,
    "intermediate_dim": 12,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
}


@pytest.mark.parametrize(
    ("model", "unused"),
    [
        ({**EXPERTS, "type": "mixtral", "n_routed_experts": 4, "num_experts_per_tok": 1}, 2 * 3 * (3 * 8 * 12)),
        # With biases.
        (
            {**EXPERTS, "type": "gpt_oss", "head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 3},
            2 * 1 * (3 * 8 * 12 + 2 * 12 + 8),
        ),
    ],
    ids=["mixtral", "gpt_oss"],
)
def test_parameters_of_experts_that_a_token_does_not_use_do_not_count(model: dict[str, Any], unused: int) -> None:
    sizes = {"2k": model, "3k": {**model, "num_layers": 3}}
    mixtures = ladder(
        sizes=["2k", "3k"], model_configurator={"type": "transformer", "models": sizes}, sequence_length=16
    )
    all_params = parameter_count(mixtures.get_model_config("2k").spec(61))
    assert mixtures.get_num_params("2k", 61) == all_params - 61 * 8 - unused
    run = run_config(mixtures, "3k", vocab_size=61)
    assert run.model.type == model["type"]
    num_params, tokens = (
        mixtures.get_num_params("3k", 61),
        run.trainer.num_train_steps * run.trainer.train_batch_size * 16,
    )
    assert tokens == pytest.approx(4 * 20 * num_params, rel=0.2)


def test_every_field_of_the_recipe_matters() -> None:
    base = {"chinchilla_multiple": 1.0}

    def run(**changes: Any) -> Any:
        recipe = WSDSChinchillaRunConfigurator.model_validate({**base, **changes})
        return recipe.configure_optimizer(10**8, 2**18), recipe.configure_duration(10**8, 2**18)

    for changes in (
        {"chinchilla_multiple": 2},
        {"decay_fraction": 0.2},
        {"tokens_per_param": 30},
        {"lr_multiplier": 2},
        {"stepped_schedule": True},
        {"optimizer": {"type": "lion"}},
    ):
        assert run(**changes) != run(), changes


def test_the_batch_is_the_same_on_all_hardware() -> None:
    few, many = ladder(max_devices=1), ladder(max_devices=64)
    for size in ("60M", "190M", "7B"):
        shape_of_few, shape_of_many = (candidate.batch_shape(size, vocab_size=VOCABULARY) for candidate in (few, many))
        assert shape_of_few[:3] == shape_of_many[:3]
        target = few.run_configurator.configure_target_batch_size(SIZES[size][1])
        assert abs(shape_of_few.batch_size - target) <= 0.1 * target
        assert shape_of_few.batch_size == shape_of_few.microbatch * shape_of_few.shards
        assert shape_of_few.devices == 1
        assert shape_of_many.devices == shape_of_many.shards


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": ["190m"]}, "there is no size '190m'; did you mean 190M"),
        ({"sizes": ["190M", "190M"]}, "names one twice"),
        ({"run_configurator": {"chinchilla_multiple": 3}}, r"power of two .*, got 3; the nearest is 4"),
        ({"run_configurator": {"chinchilla_multiple": 0.25}}, "greater than or equal to 0.5"),
        ({"run_configurator": {"chinchilla_multiple": 1, "decay_fraction": 0.5}}, "less than 0.5"),
        (
            {"run_configurator": {"chinchilla_multiple": 1, "optimizer": {"type": "adam", "learning_rate": 0.1}}},
            "learning_rate follows",
        ),
        ({"trainer": {"num_train_steps": 5}}, "num_train_steps: the ladder decides it"),
        ({"trainer": {"checkpointer": {"base_path": "x"}}}, "checkpointer.base_path: the ladder decides it"),
        ({"trainer": {"max_eval_batches": 8}}, "max_eval_batches: batches grow with the size"),
        ({"data_loader": {"tokenizer": "bytes"}}, "tokenizer belongs to tokenizer of the ladder"),
        ({"data_loader": {"train_urls": ["a.txt"]}}, "train_urls belongs to instance_sources"),
        (
            {"instance_sources": [{"train_urls": "a.txt"}, {"train_urls": "b.txt"}]},
            "give each of several sources a label",
        ),
        ({"model_configurator": {"type": "olmo3", "model_construction_kwargs": {"heads": 3}}}, "kwargs.heads"),
        (
            {"model_configurator": {"type": "transformer", "models": {"a": {"type": "gpt2", "seq_len": 9}}}},
            "models.a.seq_len: sequence_",
        ),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ladder(**changes)


def test_phases_that_do_not_fit() -> None:
    recipe = WSDSChinchillaRunConfigurator(chinchilla_multiple=1, tokens_per_param=2)
    with pytest.raises(
        UserError, match=r"warm-up \(400 steps\) and the first decay \(40 steps\) do not fit into the 400"
    ):
        recipe.configure_optimizer(400 * 2**18, 2**18)
    with pytest.raises(UserError, match="too few for a decay"):
        WSDSChinchillaRunConfigurator(chinchilla_multiple=1).configure_optimizer(1000, 10_000)
    with pytest.raises(UserError, match="no microbatch for size 190M, sequence_length 8192 and device_type 'cpu'"):
        ladder(device_type="cpu").batch_shape("190M", vocab_size=VOCABULARY, compat="olmo")


@pytest.mark.parametrize("determinism", ["elastic", pytest.param("layerwise", marks=pytest.mark.slow)])
def test_memory_is_estimated_close_to_what_xla_says(determinism: str) -> None:
    settings = [f"trainer.determinism={determinism}"]
    config = load(ROOT / "configs" / "ladder_nano.yaml", settings, ModelLadder).config
    estimate, compiled = (plan_rung(config, "26k", vocab_size=512, compiled=compile_it) for compile_it in (False, True))
    assert estimate.activation_bytes != compiled.activation_bytes
    assert estimate.activation_bytes == pytest.approx(compiled.activation_bytes, rel=0.15)
    assert estimate.state_bytes == compiled.state_bytes


@pytest.mark.slow
def test_with_a_parametrization_all_sizes_have_the_rate_of_the_base() -> None:
    base = TransformerSize.size_60M.shape._asdict()
    base = {**base, "num_kv_heads": base["num_heads"]}
    transferred = ladder(parametrization={"type": "completep", "base": base})
    for size in ("60M", "370M"):
        config = run_config(transferred, size, vocab_size=VOCABULARY)
        assert config.optimizer.learning_rate == pytest.approx(SIZES["60M"][3], rel=1e-6)
        assert config.parametrization.type == "completep"
        assert plan_rung(transferred, size, vocab_size=VOCABULARY).learning_rate == config.optimizer.learning_rate
        # The other values of the recipe depend on the size.
        standard = run_config(ladder(), size, vocab_size=VOCABULARY)
        assert config.trainer.num_train_steps == standard.trainer.num_train_steps
        assert config.optimizer.warmup == standard.optimizer.warmup
