"""Models in Hugging Face's layout, checked by transformers itself."""

from __future__ import annotations

import dataclasses
import json
import stat
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer import load_tokenizer
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.card import TrainingFacts
from lm_trainer.export.huggingface import FILES, ExportOptions, TextModel, is_hf_directory, read_hf, write_hf
from lm_trainer.export.output import check_output
from lm_trainer.generate.engine import generate
from lm_trainer.generate.sampling import GenerateSettings
from lm_trainer.generate.score import Context, score
from lm_trainer.models import Gpt2Config
from tests.data.test_formats import with_specials

SMALL = Gpt2Config(seq_len=40, hidden_dim=32, num_layers=2, num_heads=4, initializer_range=0.2)


def make_model(config: Gpt2Config = SMALL, *, vocab_size: int | None = None) -> TextModel:
    tokenizer = ByteTokenizer()
    size = vocab_size or tokenizer.vocab_size

    @jax.jit
    def build() -> Any:
        return nnx.to_pure_dict(nnx.state(config.build(size, rngs=nnx.Rngs(0)), nnx.Param))

    # Biases and gains start as zeros and ones, which would hide a mix-up.
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: np.asarray(x) + rng.normal(0, 0.1, x.shape).astype(np.float32), build())
    return TextModel(config, size, params, tokenizer, "small", TrainingFacts(step=7))


@pytest.fixture(scope="module")
def model() -> TextModel:
    return make_model()


@pytest.fixture(scope="module")
def exported(model: TextModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "small"
    write_hf(out, model, ExportOptions())
    return out


def our_logits(model: TextModel, tokens_BS: np.ndarray) -> np.ndarray:
    positions_BS = np.broadcast_to(np.arange(tokens_BS.shape[1], dtype=np.int32), tokens_BS.shape)
    return np.asarray(jax.jit(model.build())(tokens_BS, positions_BS, jnp.zeros_like(positions_BS)))


def transformers_model(directory: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    return loaded.eval()


def their_logits(directory: Path, tokens_BS: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return transformers_model(directory).float()(torch.from_numpy(tokens_BS).long()).logits.numpy()


TOKENS_BS = np.random.default_rng(2).integers(0, 257, (2, 40)).astype(np.int32)


def test_transformers_computes_the_same_logits(model: TextModel, exported: Path) -> None:
    difference = np.abs(their_logits(exported, TOKENS_BS) - our_logits(model, TOKENS_BS)).max()
    assert difference <= 1e-5


def test_shards_mean_the_same(model: TextModel, exported: Path, tmp_path: Path) -> None:
    write_hf(tmp_path / "out", model, ExportOptions(max_shard_size=20_000))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    np.testing.assert_array_equal(their_logits(tmp_path / "out", TOKENS_BS), their_logits(exported, TOKENS_BS))


def test_bfloat16_is_the_rounded_model_and_loads_as_bfloat16(model: TextModel, exported: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    write_hf(tmp_path / "out", model, ExportOptions(dtype="bf16"))
    loaded = transformers_model(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    full = dict(transformers_model(exported).named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, full[name].to(torch.bfloat16)), name


def test_the_tokenizer_gives_transformers_the_same_ids(model: TextModel, exported: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = "Grüße, 世界! <|endoftext|> \n\tdef f(): 1e-5"
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert hf_tokenizer(text, split_special_tokens=True, add_special_tokens=False)[
        "input_ids"
    ] == model.tokenizer.encode(text)
    assert hf_tokenizer.eos_token_id == model.tokenizer.eos_id


def test_transformers_generates_and_knows_where_a_document_ends(exported: Path, model: TextModel) -> None:
    torch = pytest.importorskip("torch")
    hf_model = transformers_model(exported)
    assert hf_model.generation_config.eos_token_id == model.tokenizer.eos_id
    out = hf_model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, pad_token_id=model.tokenizer.eos_id)
    assert out.shape[1] > 3


def test_the_directory_holds_the_documented_files_readable_by_the_umask(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names >= {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    check_output(exported, overwrite=True, replaceable=FILES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in exported.iterdir()} == {
        stat.S_IMODE((exported / "config.json").stat().st_mode)
    }


def test_the_configuration_names_what_both_major_versions_read(model: TextModel, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["eos_token_id"] == model.tokenizer.eos_id
    assert config["vocab_size"] == model.vocab_size
    assert config.get("bos_token_id", 0) == model.tokenizer.bos_id


def test_the_card_states_the_model_and_its_training(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    weights = load_file(exported / "model.safetensors")
    assert f"| Parameters | {sum(tensor.size for tensor in weights.values()):,} |" in card
    assert "| Training steps | 7 |" in card
    assert "# small" in card


def test_reading_and_writing_again_gives_the_same_bytes(model: TextModel, exported: Path, tmp_path: Path) -> None:
    reread = read_hf(exported)
    assert reread.config.model_copy(update={"initializer_range": 0.2}).spec(1).blocks == SMALL.spec(1).blocks
    jax.tree.map(np.testing.assert_array_equal, reread.params, model.params)
    write_hf(tmp_path / "small", reread, ExportOptions())
    for path in exported.iterdir():
        if path.name != "README.md":
            assert (tmp_path / "small" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_bfloat16_model_survives_import_and_export_to_the_bit(model: TextModel, tmp_path: Path) -> None:
    write_hf(tmp_path / "a", model, ExportOptions(dtype="bf16"))
    imported = read_hf(tmp_path / "a")
    assert {leaf.dtype for leaf in jax.tree.leaves(imported.params)} == {np.dtype(np.float32)}
    write_hf(tmp_path / "b", imported, ExportOptions(dtype="bf16"))
    a, b = (tmp_path / name / "model.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_a_vocabulary_larger_than_the_tokenizer_is_kept(tmp_path: Path) -> None:
    padded = make_model(vocab_size=320)
    write_hf(tmp_path / "out", padded, ExportOptions())
    assert read_hf(tmp_path / "out").vocab_size == 320
    assert their_logits(tmp_path / "out", TOKENS_BS).shape == (2, 40, 320)


def test_an_export_that_has_no_place_in_the_format_leaves_nothing(tmp_path: Path) -> None:
    bare = make_model(SMALL.model_copy(update={"use_bias": False}))
    with pytest.raises(UserError, match="bias"):
        write_hf(tmp_path / "out", bare, ExportOptions())
    assert list(tmp_path.iterdir()) == []


# Checkpoints that others wrote.


@pytest.fixture
def foreign(tiny_gpt2: Path, tmp_path: Path) -> Path:
    """A copy of a transformers checkpoint, with a tokenizer, to be tampered with."""
    out = tmp_path / "foreign"
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        (out / name).write_bytes((tiny_gpt2 / name).read_bytes())
    ByteTokenizer().save(out)
    return out


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))


def test_a_transformers_checkpoint_computes_its_own_reference_logits(foreign: Path, tiny_gpt2: Path) -> None:
    reference = np.load(tiny_gpt2 / "reference.npz")
    actual = our_logits(read_hf(foreign), reference["input_ids"].astype(np.int32))
    assert np.abs(actual - reference["logits"]).max() <= 1e-5


def test_import_and_export_of_a_transformers_checkpoint_keep_every_tensor(foreign: Path, tmp_path: Path) -> None:
    write_hf(tmp_path / "out", read_hf(foreign), ExportOptions())
    before, after = (load_file(path / "model.safetensors") for path in (foreign, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].tobytes() == after[name].tobytes(), name


def test_a_half_precision_checkpoint_is_widened_exactly(foreign: Path) -> None:
    weights = {name: x.astype(np.float16) for name, x in load_file(foreign / "model.safetensors").items()}
    save_file(weights, foreign / "model.safetensors", metadata={"format": "pt"})
    params = jax.tree.leaves(read_hf(foreign).params)
    assert {leaf.dtype for leaf in params} == {np.dtype(np.float32)}
    assert all(np.array_equal(leaf, leaf.astype(np.float16).astype(np.float32)) for leaf in params)


def test_the_tokenizer_may_lie_elsewhere(foreign: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (foreign / name).unlink()
    with pytest.raises(UserError, match="--tokenizer"):
        read_hf(foreign)
    ByteTokenizer().save(tmp_path / "elsewhere")
    assert read_hf(foreign, tokenizer=tmp_path / "elsewhere").tokenizer.vocab_size == 257


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_hf(out, make_model(), ExportOptions())
    weights = load_file(out / "model.safetensors")
    name = next(name for name in weights if name.endswith("wte.weight"))
    weights[name] = weights[name][:200]
    save_file(weights, out / "model.safetensors")
    edit_config(out, vocab_size=200)
    with pytest.raises(UserError, match=r"257 tokens.* 200"):
        read_hf(out)


def test_added_tokens_may_have_no_rows(tmp_path: Path, model: TextModel) -> None:
    # As Gemma 3's <image_soft_token>, of which its models for text alone know nothing.
    tokenizer = with_specials("<image>", "<other>")
    assert tokenizer.vocab_size == model.vocab_size + 2
    write_hf(tmp_path / "out", dataclasses.replace(model, tokenizer=tokenizer), ExportOptions())
    loaded = read_hf(tmp_path / "out")
    assert (loaded.vocab_size, loaded.tokenizer.vocab_size) == (257, 259)
    assert loaded.tokenizer.identity() == tokenizer.identity()
    # A text is refused only if it has one.
    assert loaded.tokenizer.encode("<image>") == list(b"<image>")
    ids = loaded.tokenizer.encode_template("a<image>")[0]
    with pytest.raises(UserError, match="has the token 257, but the model knows 0 to 256"):
        generate(loaded.build(), [ids], GenerateSettings(max_new_tokens=1))
    for context in (Context(ids, [[1], [2]]), Context([1], [[2], ids])):
        with pytest.raises(UserError, match="has the token 257, but the model knows 0 to 256"):
            list(score(loaded.build(), [context]))
    # The token that ends documents has to have one.
    ending = with_specials("<image>", eos="<image>")
    write_hf(tmp_path / "other", dataclasses.replace(model, tokenizer=ending), ExportOptions())
    with pytest.raises(UserError, match=r"258 tokens.* 257"):
        read_hf(tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}, "auto_map"),
        ({"model_type": "frobnicator"}, "frobnicator"),
        ({"n_head": 7}, "7"),
        ({"n_embd": 128}, r"found|expected"),
        ({"n_layer": 5}, r"h\.4"),
        ({"n_layer": 3}, r"h\.3"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"n_layer": -1}, "config.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configurations_that_do_not_fit_are_refused_with_the_reason(
    foreign: Path, changes: dict[str, Any], words: str
) -> None:
    edit_config(foreign, **changes)
    with pytest.raises(UserError, match=words) as caught:
        read_hf(foreign)
    assert str(foreign) in str(caught.value)


def test_code_beside_a_model_is_never_run(foreign: Path) -> None:
    (foreign / "modeling_gpt2.py").write_text("raise SystemExit('ran')")
    (foreign / "tokenizer.py").write_text("raise SystemExit('ran')")
    (foreign / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    assert read_hf(foreign).vocab_size == 257


def test_a_missing_directory_and_a_missing_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        read_hf(tmp_path / "missing")
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        read_hf(tmp_path)


def test_what_counts_as_a_hugging_face_directory(exported: Path, tmp_path: Path) -> None:
    assert is_hf_directory(exported)
    assert not is_hf_directory(tmp_path)
    assert not is_hf_directory(tmp_path / "missing")


def test_the_saved_tokenizer_reads_back(exported: Path, model: TextModel) -> None:
    assert load_tokenizer(exported).fingerprint() == model.tokenizer.fingerprint()
