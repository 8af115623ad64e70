"""Models with code of the user (`model.type: custom`): the examples of the page, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from pydantic import TypeAdapter

from lm_trainer.core.tree import named_leaves
from lm_trainer.models import AnyModel, LlamaConfig
from lm_trainer.profile.flops import flops_per_token, parameter_count
from lm_trainer.run.config.run_config import RunConfig, config_hash, numeric_differences, numeric_identity
from tests.conftest import ROOT, Lmt, RunLmt, refused
from tests.reproduce.conftest import on_one_device

EXAMPLES = ("mlp", "gated", "hybrid")
PAGE = (ROOT / "docs/how-to/own-model.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE))
SHORT = {
    "num_train_steps": 4,
    "train_batch_size": 8,
    "elastic_shards": 8,
    "steps_per_eval": 4,
    "max_eval_batches": 1,
    "sample_tokens": 0,
    "token_probabilities": 0,
    "tracker": [],
    "log_jaxprs": False,
    "log_xla_hlo": False,
}


@pytest.fixture
def examples(in_tmp_path: Path) -> Path:
    """The files of the page, in the working directory. Their runs are short."""
    for name, text in FILES.items():
        if name.endswith(".yaml"):
            text = yaml.safe_dump({**yaml.safe_load(text), "trainer": SHORT})
        (in_tmp_path / name).write_text(text)
    return in_tmp_path


def model_of(name: str) -> Any:
    return TypeAdapter(AnyModel).validate_python(yaml.safe_load(FILES[f"{name}.yaml"])["model"])


def built(config: Any) -> Any:
    return jax.jit(lambda: config.build(257, rngs=nnx.Rngs(0)))()


def test_examples_are_short() -> None:
    assert {f"{name}.py" for name in EXAMPLES} <= FILES.keys()
    assert all(FILES[f"{name}.py"].count("\n") < 40 for name in EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_weights_and_flops_are_counted_from_the_part(examples: Path, name: str) -> None:
    config = model_of(name)
    shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(config.build(257, rngs=nnx.Rngs(0)), nnx.Param)))
    leaves = named_leaves(shapes)
    assert parameter_count(config.spec(257)) == sum(x.size for x in leaves.values())
    # Two for each weight of a matrix, besides the token table, which is looked up. The axis over layers is not one.
    matrices = {n: x for n, x in leaves.items() if x.ndim - n.startswith("blocks.") > 1 and n != "embed.tokens"}
    count = flops_per_token(config.spec(257), 64)
    products = count.qkv + count.attention_out + count.mlp + count.head
    assert products == 2 * sum(x.size for x in matrices.values())


def test_the_mlp_is_computed_by_the_class_of_the_file(examples: Path) -> None:
    model = built(model_of("mlp"))
    mlp = nnx.clone(model.blocks["0"].mlp)
    up, down, gain = (np.asarray(x[...][1]) for x in (mlp.up.weight, mlp.down.weight, mlp.norm.scale))
    row = jax.tree.map(lambda x: x[1], mlp)
    x_D = np.linspace(-1, 1, 32, dtype=np.float32)
    hidden = np.maximum(x_D @ up, 0.0) ** 2
    expected = (hidden / np.sqrt(np.mean(hidden**2) + 1e-5) * gain) @ down
    assert np.allclose(row(jnp.asarray(x_D)[None, None])[0, 0], expected, atol=1e-6)


def test_the_convolution_of_the_hybrid_reads_the_last_tokens_of_its_document(examples: Path) -> None:
    """A brute-force twin: each output is a sum over at most four tokens of the same document."""
    config = model_of("hybrid")
    assert [block.attention.module is None for block in config.spec(257).blocks] == [True, False, False, True]
    slots = [slot for slot, block in built(config).blocks.items() if hasattr(block.attention, "taps")]
    assert slots
    model = built(config)
    part = jax.tree.map(lambda x: x[0], model.blocks[slots[0]].attention)
    x_SD = np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32)
    positions = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3], np.int32)
    documents = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1])

    class Context:
        positions_BS = jnp.asarray(positions)[None]

    values = np.einsum("sd,dkh->skh", x_SD, np.asarray(part.values.weight[...]))
    taps, out = np.asarray(part.taps[...]), np.asarray(part.out.weight[...])
    expected = np.zeros((9, 32), np.float32)
    for query in range(9):
        mixed = np.zeros_like(values[0])
        for key in range(max(0, query - 3), query + 1):
            if documents[key] == documents[query]:
                mixed += values[key] * taps[query - key]
        expected[query] = np.einsum("kh,khd->d", mixed, out)
    got, _ = part(jnp.asarray(x_SD)[None], Context(), 0)
    assert np.allclose(got[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["gated", "hybrid"])
def test_decoding_with_a_cache_gives_the_same_logits(examples: Path, name: str) -> None:
    model = built(model_of(name))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 257, (2, 12)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12))
    full = jax.jit(lambda m: m(tokens, positions, jnp.zeros((2, 12), jnp.int32)))(model)

    @jax.jit
    def decode(m: Any) -> jax.Array:
        first, cache = m.decode(tokens[:, :7], positions[:, :7], m.init_cache(2, 16))
        second, cache = m.decode(tokens[:, 7:8], positions[:, 7:8], cache)
        third, _ = m.decode(tokens[:, 8:], positions[:, 8:], cache)
        return jnp.concatenate([first, second, third], axis=1)

    assert np.allclose(decode(model), full, atol=1e-5)


def test_the_digest_identifies_the_code_wherever_it_is(examples: Path) -> None:
    section = {"type": "custom", "family": "gpt2", "mlp": "mlp.py:SquaredRelu", "hidden_dim": 64, "num_heads": 4}
    config = RunConfig.model_validate({"model": section})
    (examples / "sub").mkdir()
    (examples / "sub/copy.py").write_text(FILES["mlp.py"])
    moved = RunConfig.model_validate({"model": {**section, "mlp": "sub/copy.py:SquaredRelu"}})
    assert config_hash(moved) == config_hash(config)
    (examples / "mlp.py").write_text(FILES["mlp.py"] + "\n# another version\n")
    changed = RunConfig.model_validate({"model": section})
    assert config_hash(changed) != config_hash(config)
    (difference,) = numeric_differences(numeric_identity(config), numeric_identity(changed), changed)
    assert difference.startswith("model.sha256: was")
    # The record of a run has the digest, and is read without the file.
    recorded = RunConfig.model_validate(config.model_dump(mode="json"))
    assert recorded == config
    with pytest.raises(Exception, match=r"mlp\.py is not the code that this model was made with"):
        recorded.model.spec(257)
    (examples / "mlp.py").unlink()
    with pytest.raises(Exception, match=r"there is no file .*mlp\.py; start the command where it is, or restore it"):
        RunConfig.model_validate(config.model_dump(mode="json")).model.spec(257)


def test_reading_a_configuration_does_not_run_the_code(lmt: Lmt, examples: Path) -> None:
    (examples / "mlp.py").write_text("raise SystemExit('the code has run')\n")
    (examples / "hybrid.py").write_text("raise SystemExit('the code has run')\n")
    for name in ("mlp", "hybrid"):
        for command in ("check", "show"):
            assert lmt("config", command, f"{name}.yaml").returncode == 0
    assert lmt("config", "diff", "mlp.yaml", "hybrid.yaml").returncode in (0, 1)


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("mlp", "model.hiden_dim=3", ["hiden_dim: unknown key; did you mean 'hidden_dim'?"]),
        ("mlp", "model.num_heads=3", ["num_heads=3"]),
        ("mlp", "model.family=lama", ["there is no family 'lama'; did you mean 'llama'?"]),
        ("mlp", "model.mlp=absent.py:Mlp", ["there is no file", "absent.py"]),
        ("mlp", "model.mlp=package.module:Mlp", ["expected file.py:name"]),
        ("mlp", "model.mlp=null", ["nothing is replaced", "type: llama alone"]),
        ("mlp", "model.factory=hybrid.py:Hybrid", ["write family: llama (or another family)"]),
        ("mlp", "trainer.context_axis_size=2", ["code of your own", "context_axis_size=2"]),
    ],
)
def test_a_wrong_section_is_refused_when_it_is_read(
    lmt: Lmt, examples: Path, name: str, override: str, words: list[str]
) -> None:
    refused(lmt("config", "check", f"{name}.yaml", override), *words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.evry=4", ["model.evry: unknown key; did you mean 'every'?"]),
        ("model.every=some", ["model.every: Input should be a valid integer"]),
        ("model.factory=hybrid.py:Absent", ["there is no function or class Absent in hybrid.py"]),
        ("model.factory=hybrid.py:ShortConvolution", ["hybrid.py:ShortConvolution failed: TypeError"]),
        ("model.mlp=hybrid.py:replace", ["hybrid.py:replace is not a class derived from flax.nnx.Module"]),
    ],
)
def test_a_factory_refuses_its_keys_when_the_model_is_built(
    lmt: Lmt, examples: Path, override: str, words: list[str]
) -> None:
    refused(lmt("train", "hybrid.yaml", override, "--dry-run"), *words)


def train(lmt: Lmt, name: str, run: str, *overrides: str) -> list[float]:
    """Trains an example, and returns the losses of its steps."""
    result = lmt("train", f"{name}.yaml", f"trainer.id={run}", *overrides)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in Path(f"logs/{run}/metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gated"])
def test_a_run_trains_gathers_layer_by_layer_and_writes(lmt: Lmt, examples: Path, name: str) -> None:
    losses = train(lmt, name, "one", "trainer.max_devices=1")
    gathered = train(lmt, name, "two", "trainer.max_devices=2", "trainer.gather=layer")
    assert np.allclose(losses, gathered, rtol=1e-4)
    with on_one_device():
        written = lmt("generate", "one", "--prompt", "The", "--max-new-tokens", "3")
    assert written.returncode == 0, written.stderr
    assert (examples / f"logs/one/artifacts/{name}.py").read_text() == FILES[f"{name}.py"]


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("mlp", "gated")),
        pytest.param("hybrid", marks=pytest.mark.slow),
    ],
)
def test_every_command_works_on_a_run(lmt: Lmt, run_lmt: RunLmt, examples: Path, name: str) -> None:
    losses = train(lmt, name, "one", "trainer.max_devices=1")
    two, four = (
        train(lmt, name, run, "trainer.gather=layer", f"trainer.max_devices={devices}")
        for run, devices in (("two", 2), ("four", 4))
    )
    # The first run gathers the whole model: other programs, with equal results up to rounding.
    assert np.allclose(losses, two, rtol=1e-4)
    assert two == four
    planned = run_lmt("plan", f"{name}.yaml", "--devices", "8xH100")  # which emulates devices of its own
    assert planned.returncode == 0, planned.stderr
    with on_one_device():
        for command in (
            ("diff", "two", "four"),
            ("verify", "one"),
            ("generate", "one", "--prompt", "The", "--max-new-tokens", "3"),
            ("eval", "one"),
            ("report", "one"),
        ):
            outcome = lmt(*command)
            assert outcome.returncode == 0, (command, outcome.stderr)
        assert (examples / f"logs/one/artifacts/{name}.py").read_text() == FILES[f"{name}.py"]
        refused(lmt("export-hf", "two", "out"), "no Hugging Face format")
        # Another version of the code is not the model of the run.
        (examples / f"{name}.py").write_text(FILES[f"{name}.py"] + "\n# another version\n")
        refused(lmt("train", f"{name}.yaml", "trainer.id=one", "trainer.num_train_steps=6"), "model.sha256")
        refused(lmt("generate", "one", "--prompt", "The"), "is not the code that this model was made with")


def test_a_model_that_hears_is_refused(examples: Path) -> None:
    section = {"type": "custom", "family": "whisper", "mlp": "mlp.py:SquaredRelu"}
    with pytest.raises(ValueError, match="whisper is not a model of text alone"):
        RunConfig.model_validate({"model": section})


def test_a_family_without_own_code_is_unchanged() -> None:
    spec = LlamaConfig(hidden_dim=32, num_heads=2, num_kv_heads=2, num_layers=2).spec(7)
    assert {block.attention.module for block in spec.blocks} == {block.mlp.module for block in spec.blocks} == {None}  # pyright: ignore
