"""Starting from a Hugging Face checkpoint: what is taken over, what is refused, and what arrives on the devices."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import nest_named_leaves
from lm_trainer.data.tokenizer import HfTokenizer, load_tokenizer
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.huggingface import ExportOptions, TextModel, read_hf, write_hf
from lm_trainer.models import ApertusConfig, DecoderConfig, LlamaConfig, Phi3Config, Qwen2Config, hf
from lm_trainer.models.rope import Llama3Rope, LongRope
from lm_trainer.parallel import sharded_array
from lm_trainer.profile.flops import parameter_count
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig, config_hash
from lm_trainer.run.weights.hf_transfer import import_model
from lm_trainer.run.weights.pretrained import HfCheckpoint, HfStart, find_hf_start, resolve_model
from tests.conftest import Lmt, MakeHfModel, refused
from tests.data.test_formats import with_specials
from tests.export.test_peft_files import LLAMA as LLAMA_FIELDS

LLAMA = LlamaConfig(
    seq_len=64,
    hidden_dim=32,
    intermediate_dim=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    layer_norm_epsilon=1e-6,
    rope=Llama3Rope(original_max_position_embeddings=16),
)
KEYS = {
    "type": "llama",
    "seq_len": 64,
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "layer_norm_epsilon": 1e-6,
    "rope": {"type": "llama3", "original_max_position_embeddings": 16},
}
"""The same as somebody writes it."""
DEFAULT = {"type": "default", "theta": 5e5}


def write_checkpoint(out: Path, config: DecoderConfig = LLAMA, vocab_size: int = 260) -> dict[str, np.ndarray]:
    """A random model in several files; its parameters by name."""
    rng = np.random.default_rng(0)
    leaves = hf.param_infos(config, vocab_size)
    params = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in leaves.items()}
    model = TextModel(config, vocab_size, nest_named_leaves(params), ByteTokenizer(), "base")
    write_hf(out, model, ExportOptions(max_shard_size=20_000))
    return params


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    out = tmp_path_factory.mktemp("hub") / "base"
    return out, write_checkpoint(out)


@pytest.fixture(scope="module")
def base(params: tuple[Path, dict[str, np.ndarray]]) -> Path:
    return params[0]


@pytest.fixture(autouse=True)
def _run_in_tmp_path(in_tmp_path: Path) -> None:
    del in_tmp_path


def config(base: Path | bool | str, **sections: Any) -> RunConfig:
    source = str(base) if isinstance(base, Path) else base
    data = {"tokenizer": "bytes", **sections.pop("data", {})}
    return RunConfig.model_validate({"initialize_from_hf": source, "data": data, **sections})


def resolve_start(run: RunConfig) -> HfStart:
    hf_start = find_hf_start(run, "run")
    assert hf_start is not None
    return hf_start


def test_the_model_section_comes_from_config_json(base: Path) -> None:
    hf_start = resolve_start(config(base, use_hf_model_config=True))
    assert hf_start.config.model.spec(260) == LLAMA.spec(260)
    assert hf_start.vocab_size == 260
    (note,) = hf_start.notes
    assert f"{base}: llama, {parameter_count(LLAMA.spec(260)):,} parameters" in note
    assert "F32" in note
    # What is saved with the run says the same again.
    reread = RunConfig.model_validate(hf_start.config.model_dump(mode="json"))
    assert resolve_start(reread).config.model == hf_start.config.model
    assert resolve_model(config(base, use_hf_model_config=True), "x").model == hf_start.config.model
    assert resolve_model(config(base), "x").model.type == "gpt2"


def test_keys_beside_config_json_are_kept_and_contradictions_named(base: Path) -> None:
    beside = {"type": "llama", "seq_len": 16, "gradient_checkpointing": False, "hidden_dim": 32, "head_dim": 8}
    model = resolve_start(config(base, use_hf_model_config=True, model=beside)).config.model
    assert (model.seq_len, model.gradient_checkpointing) == (16, False)
    assert model.model_copy(update={"seq_len": 64}).spec(260).blocks == LLAMA.spec(260).blocks
    with pytest.raises(UserError, match=r"model.num_layers is 8, but 3 in config.json; model.rope is ") as caught:
        resolve_start(config(base, use_hf_model_config=True, model={"type": "llama", "num_layers": 8, "rope": DEFAULT}))
    assert str(base / "config.json") in str(caught.value)
    with pytest.raises(UserError, match=r"model.type: llama"):
        resolve_start(config(base, use_hf_model_config=True, model={"type": "gpt2", "seq_len": 16}))


def test_positions_that_are_learned_cannot_become_fewer(tmp_path: Path) -> None:
    from tests.export.test_huggingface import SMALL

    write_checkpoint(tmp_path / "gpt2", SMALL)
    with pytest.raises(UserError, match=r"model.seq_len is 16, but 40"):
        resolve_start(config(tmp_path / "gpt2", use_hf_model_config=True, model={"type": "gpt2", "seq_len": 16}))
    with pytest.raises(UserError, match=r"model.seq_len is 1024, but 40"):
        resolve_start(config(tmp_path / "gpt2", model={**SMALL.model_dump(exclude={"seq_len"}), "type": "gpt2"}))


def test_a_model_section_of_its_own_must_describe_the_checkpoint(base: Path) -> None:
    assert resolve_start(config(base, model=KEYS)).config.model.spec(260).blocks == LLAMA.spec(260).blocks
    assert len(resolve_start(config(base, model={**KEYS, "seq_len": 128})).notes) == 1
    # What the user wrote is what the user wants; a default is not.
    note = resolve_start(config(base, model={**KEYS, "rope": DEFAULT})).notes[1]
    assert "model.rope is {'type': 'default', 'theta': 500000.0, 'factor': 1.0}, but {'type': 'llama3', " in note
    with pytest.raises(UserError, match=r"model.layer_norm_epsilon is 1e-05, but 1e-06 in config.json"):
        resolve_start(config(base, model={k: v for k, v in KEYS.items() if k != "layer_norm_epsilon"}))
    with pytest.raises(UserError, match=r"is a llama model, but model.type is gpt2"):
        resolve_start(config(base))
    with pytest.raises(UserError, match=r"embed_tokens.weight has .* \[260, 32\], expected \[260, 16\] \(in model-"):
        resolve_start(config(base, model={**KEYS, "hidden_dim": 16, "head_dim": 8}))
    with pytest.raises(UserError, match=r"no place for .*q_norm"):
        resolve_start(config(base, model={**KEYS, "use_qk_norm": True}))


def test_true_is_the_reference_checkpoint(base: Path) -> None:
    reference = {"type": "llama", "reference_checkpoint": str(base)}
    assert resolve_start(config(True, use_hf_model_config=True, model=reference)).config.model.hidden_dim == 32  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match="NousResearch/Llama-2-7b-hf"):  # the hub is switched off
        resolve_start(config(True, model={"type": "llama"}))
    with pytest.raises(UserError, match=r"model\.reference_checkpoint"):
        resolve_start(config(True, model={"type": "mpt"}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"initialize_from_hf": "x", "trainer": {"initialize_from": "y"}}, "remove one of them"),
        ({"initialize_from_hf": "x", "trainer": {"load_checkpoint_path": "y"}}, "remove one of them"),
        ({"initialize_from_hf": ""}, "empty"),
        ({"use_hf_model_config": True}, "initialize_from_hf"),
        ({"hf_upload": True}, "hf_save_path"),
        ({"hf_save_dtype": "f64"}, "f32"),
        ({"hf_save_steps": 0}, "greater than 0"),
    ],
)
def test_keys_that_contradict_each_other(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(keys)


def test_only_where_a_run_starts_decides_its_numbers() -> None:
    plain, other = RunConfig(), RunConfig(initialize_from_hf="x")
    exporting = RunConfig(hf_save_path="x", hf_save_steps=7, hf_save_dtype="bf16", hf_upload="a/b")
    assert config_hash(plain) == config_hash(exporting) != config_hash(other)


# The tokenizer.


def edit_tokenizer(tokenizer: HfTokenizer, edit: Any) -> HfTokenizer:
    content = json.loads(tokenizer.files()["tokenizer.json"])
    edit(content)
    return HfTokenizer(json.dumps(content))


def swap(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def drop(content: dict[str, Any]) -> None:
    del content["model"]["vocab"]["z"]


def cut_otherwise(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [(swap, r"its token 97 is 'b', not 'a'"), (drop, r"it has 256 tokens, not 257"), (cut_otherwise, "cuts text")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_another_tokenizer_is_refused_with_the_remedy(base: Path, tmp_path: Path, edit: Any, message: str) -> None:
    hf_start = resolve_start(config(base, model=KEYS))
    base_tokenizer = load_tokenizer(base)
    assert isinstance(base_tokenizer, HfTokenizer)
    assert hf_start.check_tokenizer(base_tokenizer) == 260
    assert (
        hf_start.check_tokenizer(HfTokenizer(json.dumps(json.loads(base_tokenizer.files()["tokenizer.json"])))) == 260
    )
    other = edit_tokenizer(base_tokenizer, edit)
    with pytest.raises(UserError, match=message) as caught:
        hf_start.check_tokenizer(other)
    assert f"write data.tokenizer: {base}" in str(caught.value)
    # One that is a file is compared before any text is read.
    other.save(tmp_path / "other")
    with pytest.raises(UserError, match=message):
        resolve_start(config(base, model=KEYS, data={"tokenizer": str(tmp_path / "other")}))


def test_more_tokens_than_rows_and_no_tokenizer_to_compare_with(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base")
    source = resolve_start(config(tmp_path / "base", model=KEYS)).source
    assert source is not None
    with pytest.raises(UserError, match=r"ids up to 256, but .* has 200 rows"):
        dataclasses.replace(source, vocab_size=200).check_tokenizer(ByteTokenizer())
    (tmp_path / "base" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        source.check_tokenizer(ByteTokenizer())


def test_added_tokens_may_have_no_rows(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base")
    tokenizer = with_specials(*(f"<added {i}>" for i in range(9)))
    tokenizer.save(tmp_path / "base")
    hf_start = resolve_start(config(tmp_path / "base", model=KEYS, data={"tokenizer": str(tmp_path / "base")}))
    assert tokenizer.vocab_size == 266 > hf_start.check_tokenizer(tokenizer) == 260


@pytest.mark.slow
def test_an_added_token_without_a_row_ends_training_where_it_comes(lmt: Lmt, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base")
    with_specials(*(f"<added {i}>" for i in range(9))).save(tmp_path / "base")
    records = [{"input_ids": [1, 2, 265 if i == 60 else 3] * 20} for i in range(80)]
    Path("ids.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"train_urls": ["ids.jsonl"], "format": {"type": "ids"}, "tokenizer": "base", "shuffle": False}
    trainer = {"num_train_steps": 60, "train_batch_size": 1, "elastic_shards": 1, "max_devices": 1, "sample_tokens": 0}
    run = {"initialize_from_hf": "base", "use_hf_model_config": True, "data": {**data, "cache_dir": "cache"}}
    Path("run.yaml").write_text(json.dumps({**run, "trainer": {**trainer, "tracker": []}}))
    refused(lmt("train", "run.yaml"), "row 60 of shard 0 has the token 265", "but the model knows 0 to 259")


# The weights.


@pytest.mark.parametrize("host_bytes", [2**20, 512], ids=["on the host", "on the devices"])
def test_the_weights_arrive_cut_over_the_devices(
    params: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch, host_bytes: int
) -> None:
    base, expected = params
    monkeypatch.setattr(sharded_array.make_sharded_array, "__kwdefaults__", {"host_bytes": host_bytes})
    monkeypatch.setattr("lm_trainer.run.weights.pretrained.HOST_BYTES", host_bytes)
    hf_start = resolve_start(config(base, model=KEYS, trainer={"train_batch_size": 8, "elastic_shards": 8}))
    setup = build_setup(hf_start.config, hf_start.vocab_size)
    assert hf_start.source is not None
    loaded = hf_start.source.load(hf_start.config.model, setup.model.shapes, setup.sharding.storage)
    assert loaded.keys() == expected.keys()
    assert len(jax.devices()) == 8
    for name, x in loaded.items():
        assert x.sharding == setup.sharding.storage[name]
        np.testing.assert_array_equal(np.asarray(x), expected[name], err_msg=name)
    assert any(not x.sharding.is_fully_replicated for x in loaded.values())


def test_a_copy_of_a_tied_tensor_must_be_one(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tied = LLAMA.model_copy(update={"tie_word_embeddings": True, "num_layers": 1})
    write_checkpoint(tmp_path / "base", tied)
    source = HfCheckpoint.open(config(tmp_path / "base"))
    file = source.weights.stored["model.embed_tokens.weight"].file
    tensors = load_file(file)
    copy = tensors["model.embed_tokens.weight"].copy()
    index = json.loads((tmp_path / "base" / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = file.name
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = hf.param_infos(tied, 260)
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, np.float32) for name, leaf in leaves.items()}
    for change, fails in ((0.0, False), (1.0, True)):
        copy[-1, -1] += change
        save_file({**tensors, "lm_head.weight": copy}, file)
        source = HfCheckpoint.open(config(tmp_path / "base"))
        if fails:
            with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
                source.load(tied, shapes, dict.fromkeys(leaves, sharding))
        else:
            assert source.load(tied, shapes, dict.fromkeys(leaves, sharding)).keys() == leaves.keys()


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    write_checkpoint(tmp_path / "base")
    name = "model.layers.1.mlp.down_proj.weight"
    file = HfCheckpoint.open(config(tmp_path / "base")).weights.stored[name].file
    tensors = load_file(file)
    tensors[name][3, 5] = np.nan
    save_file(tensors, file)
    source = HfCheckpoint.open(config(tmp_path / "base"))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = hf.param_infos(LLAMA, 260)
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, np.float32) for path, leaf in leaves.items()}
    message = rf"{file.name}: {name} holds NaN or infinite values; use a sound copy"
    with pytest.raises(UserError, match=message):
        source.load(LLAMA, shapes, dict.fromkeys(leaves, sharding))
    with pytest.raises(UserError, match=message):
        import_model(str(tmp_path / "base"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_constants_of_a_checkpoint_are_checked(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model = ApertusConfig(**LLAMA.model_dump(include={*KEYS} - {"type", "rope"}))
    write_checkpoint(tmp_path / "base", model)
    name = "model.layers.1.mlp.act_fn.beta"
    source = HfCheckpoint.open(config(tmp_path / "base"))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = hf.param_infos(model, 260)
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, np.float32) for path, leaf in leaves.items()}
    assert source.load(model, shapes, dict.fromkeys(leaves, sharding)).keys() == leaves.keys()
    file = source.weights.stored[name].file
    save_file({**load_file(file), name: np.asarray(0.25, np.float32)}, file)
    changed = HfCheckpoint.open(config(tmp_path / "base"))
    with pytest.raises(UserError, match=rf"base: {name} is 0.25; only 0.5 is supported"):
        changed.load(model, shapes, dict.fromkeys(leaves, sharding))
    with pytest.raises(UserError, match=rf"base: {name} is 0.25; only 0.5 is supported"):
        import_model(str(tmp_path / "base"), tmp_path / "out")


def test_longrope_that_takes_one_table_for_all_lengths_is_said(tmp_path: Path) -> None:
    short, long = (1.0,) * 4, (2.0,) * 4
    rope = LongRope(short_factor=short, long_factor=long, factor=2.0, original_max_position_embeddings=32)
    phi = Phi3Config(**LLAMA.model_dump(include={*KEYS} - {"type", "rope"}), rope=rope)
    write_checkpoint(tmp_path / "base", phi)
    assert (
        "as a run with model.seq_len: 32 does"
        in resolve_start(config(tmp_path / "base", use_hf_model_config=True)).notes[1]
    )
    shorter = {"type": "phi3", "seq_len": 32}
    assert len(resolve_start(config(tmp_path / "base", use_hf_model_config=True, model=shorter)).notes) == 1


def test_what_is_no_checkpoint(tmp_path: Path, base: Path) -> None:
    with pytest.raises(UserError, match=r"missing/dir"):
        resolve_start(config("./missing/dir", model=KEYS))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        resolve_start(config("org/name@main", model=KEYS))
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto" / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}')
    with pytest.raises(UserError, match="auto_map"):
        resolve_start(config(tmp_path / "auto", model=KEYS))
    qwen = Qwen2Config(**LLAMA.model_dump(include={*KEYS} - {"type", "rope"}))
    assert "q.bias" in str(sorted(hf.param_infos(qwen, 260)))
    raw = json.loads((base / "config.json").read_text()) | {"model_type": "qwen2"}
    (tmp_path / "qwen").mkdir()
    for file in base.iterdir():
        (tmp_path / "qwen" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.k_proj\.bias is missing"):
        resolve_start(config(tmp_path / "qwen", use_hf_model_config=True))


@pytest.mark.slow
def test_a_head_that_differs_from_the_embedding_is_one_of_its_own(make_hf_model: MakeHfModel, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    base = make_hf_model("Llama", **LLAMA_FIELDS, tie_word_embeddings=True)
    tensors = load_file(base / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    raw = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ByteTokenizer().save(tmp_path)
    ids = np.arange(24)[None]
    positions = np.arange(24, dtype=np.int32)[None]
    for change in (0.0, 0.5):
        save_file({**tensors, "lm_head.weight": embedding + np.float32(change)}, tmp_path / "model.safetensors")
        read = read_hf(tmp_path)
        assert read.config.tie_word_embeddings is (change == 0), change  # pyright: ignore[reportAttributeAccessIssue]
        model = jax.jit(read.build(jax.local_devices()[:1]))
        with torch.no_grad():
            expected_logits = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(
                torch.from_numpy(ids)
            ).logits.numpy()
        np.testing.assert_allclose(
            model(ids.astype(np.int32), positions, np.zeros_like(positions)), expected_logits, atol=1e-4
        )
    # The run has the head as well, and says so in what it exports.
    assert resolve_start(config(tmp_path, use_hf_model_config=True)).config.model.tie_word_embeddings is False  # pyright: ignore[reportAttributeAccessIssue]
    write_hf(tmp_path / "out", read_hf(tmp_path), ExportOptions())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **raw,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def test_a_dropout_that_is_not_known_here_is_no_obstacle(base: Path, tmp_path: Path) -> None:
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((base / "config.json").read_text()) | {"attention_dropout": 0.1, "pretraining_tp": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert resolve_start(config(tmp_path, use_hf_model_config=True)).config.model.spec(260) == LLAMA.spec(260)
