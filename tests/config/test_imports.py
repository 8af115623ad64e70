"""Configurations of other frameworks become ours: what has an equal is taken over, and all else is named."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.config.config_node import ConfigNode, all_keys
from lm_trainer.config.imports import DIALECTS
from lm_trainer.config.imports.base import flatten
from lm_trainer.config.imports.read import read_foreign
from lm_trainer.config.imports.translate import detect_framework, translate
from lm_trainer.config.loader import load
from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.sources import Row
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import Lmt, refused

EXAMPLES = Path(__file__).parent / "foreign"
CASES = {
    # nanoGPT: 12 rows x 40 turns; a batch of 480, and its own defaults where the file says nothing.
    "nanogpt.txt": (
        "nanoGPT",
        {"trainer.train_batch_size": 480, "trainer.num_train_steps": 600_000, "model.hidden_dim": 768},
        {
            "optimizer.min_lr_ratio": 0.1,
            "optimizer.learning_rate": 6e-4,
            "optimizer.warmup": 2000,
            "model.use_bias": False,
        },
        ["import time", "name = 'run-' + str(time.time())", "out_dir", "device", "use_svd"],
    ),
    "torchtitan.toml": (
        "torchtitan",
        {"model.hidden_dim": 4096, "model.num_kv_heads": 8, "model.seq_len": 8192, "trainer.model_axis_size": 2},
        {
            "optimizer.decay": 0.8,
            "optimizer.min_lr_ratio": 0.0,
            "trainer.num_train_steps": 1000,
            "data.id": "allenai/c4",
        },
        ["job.dump_folder", "training.local_batch_size", "activation_checkpoint.mode", "checkpoint.enable"],
    ),
    # 100,000,000 tokens in batches of 64 rows of 256.
    "litgpt.yaml": (
        "litgpt",
        {"trainer.num_train_steps": 6103, "model.num_kv_heads": 2, "trainer.train_batch_size": 64},
        {"optimizer.min_lr_ratio": 0.1, "optimizer.beta2": 0.95, "data.tokenizer": "bytes"},
        ["model_config.parallel_residual", "resume", "devices"],
    ),
    "axolotl.yaml": (
        "axolotl",
        {"initialize_from_hf": "NousResearch/Llama-3.2-1B", "adapter.rank": 16, "trainer.train_batch_size": 8},
        {
            "data.packing": "best_fit",
            "model.attn_backend": "auto",
            "trainer.num_train_steps": 500,
            # What the Trainer of transformers assumes.
            "optimizer.weight_decay": 0.0,
            "optimizer.beta2": 0.999,
            "optimizer.min_lr_ratio": 0.0,
        },
        ["val_set_size", "num_epochs"],
    ),
    # The alignment handbook's recipe, with accelerate's number of devices: 4 rows x 4 turns x 8 GPUs.
    "trl.yaml": (
        "TRL",
        {
            "initialize_from_hf": "HuggingFaceTB/SmolLM2-360M",
            "use_hf_model_config": True,
            "data.id": "HuggingFaceTB/smol-smoltalk",
            "data.splits": ["train", "test"],
            "data.format.type": "chat",
            "data.format.mask_user_turns": False,
            "model.seq_len": 8192,
        },
        {
            "trainer.train_batch_size": 128,
            "trainer.seed": 42,
            "trainer.mp": "p=float32,c=bfloat16,o=bfloat16",
            "optimizer.learning_rate": 1e-3,
            "optimizer.lr_schedule": "cosine",
            "optimizer.warmup": 0.1,
            "data.epochs": 2.0,
            "data.stop_strategy": "first_exhausted",
            # The defaults of TrainingArguments.
            "optimizer.weight_decay": 0.0,
            "optimizer.beta2": 0.999,
            "optimizer.min_lr_ratio": 0.0,
        },
        [
            "num_train_epochs",
            "output_dir",
            "push_to_hub",
            "hub_model_id",
            "save_strategy",
            "per_device_eval_batch_size",
        ],
    ),
    "levanter.yaml": (
        "Levanter",
        {"trainer.train_batch_size": 64, "model.hidden_dim": 768, "optimizer.learning_rate": 6e-4},
        {"optimizer.warmup": 0.01, "trainer.checkpointer.base_path": "ckpt"},
        ["trainer.per_device_train_batch_size", "made_up"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_foreign_configuration_becomes_one_of_ours(name: str, tmp_path: Path) -> None:
    dialect, first_settings, other_settings, lost = CASES[name]
    # Its ending would make it a module of these tests.
    file = tmp_path / name.replace("nanogpt.txt", "train.py")
    file.write_text((EXAMPLES / name).read_text())
    translation = translate(file, RunConfig)
    assert translation.dialect == dialect
    assert {*lost} <= {key for key, _ in translation.lost}
    assert all(reason for _, reason in translation.lost)
    written = tmp_path / "ours.yaml"
    written.write_text(translation.to_yaml(file.name))
    loaded = load(written, [], RunConfig)
    assert not loaded.notes
    settings = flatten(loaded.config.model_dump(mode="json"))
    assert {key: settings[key] for key in (*first_settings, *other_settings)} == {**first_settings, **other_settings}
    # Every key of the file is taken over, read by the rule of another, or named with a reason: none is lost in silence.
    rules = next(candidate for candidate in DIALECTS if candidate.name == dialect).keys
    for key in flatten(read_foreign(file)[0]) if dialect != "Levanter" else ():
        enclosing_keys = [key.rsplit(".", levels)[0] for levels in range(key.count(".") + 1)]
        assert any(enclosing_key in rules for enclosing_key in enclosing_keys) or key in {
            lost_key for lost_key, _ in translation.lost
        }, key


@pytest.mark.parametrize(
    ("name", "text", "lost"),
    [
        (
            "train.py",
            "learning_rate = 0\nbatch_size = 'x'\ngradient_accumulation_steps = 0.5\n",
            ["min_lr", "batch_size"],
        ),
        ("a.yaml", "base_model: a/b\nmicro_batch_size: {}\ndatasets: [org/chats]\n", ["micro_batch_size", "datasets"]),
        ("b.yaml", "lora_r: 4\noptimizer: {init_args: {betas: 0.9}}\n", ["optimizer.init_args.betas"]),
    ],
)
def test_values_of_no_known_kind_are_named(name: str, text: str, lost: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    reasons = dict(translate(tmp_path / name, RunConfig).lost)
    assert all("none of the values" in reasons[key] for key in lost)


@pytest.mark.parametrize(("text", "is_lost"), [("", True), ("lr_decay_iters = 5", False), ("decay_lr = False", False)])
def test_a_decay_beyond_the_last_step_is_named(text: str, is_lost: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"max_iters = 5\n{text}\n")
    lost = dict(translate(tmp_path / "train.py", RunConfig).lost)
    assert ("lr_decay_iters" in lost) == is_lost


def _translate_settings(name: str, text: str, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / name).write_text(text)
    return flatten(translate(tmp_path / name, RunConfig).data)


def test_what_litgpt_assumes_is_written_out(tmp_path: Path) -> None:
    # Its `pretrain` with nothing but a name: Pythia's architecture, torch's AdamW.
    settings = _translate_settings(
        "a.yaml", "model_name: EleutherAI/pythia-14m\ntrain: {micro_batch_size: 4}\neval: {max_iters: 5}\n", tmp_path
    )
    expected = {
        **{"model.type": "gpt_neox", "model.hidden_dim": 128, "model.intermediate_dim": 512, "model.rotary_pct": 0.25},
        **{"trainer.train_batch_size": 512, "trainer.seed": 42, "trainer.steps_per_eval": 1000},
        **{"optimizer.learning_rate": 1e-3, "optimizer.weight_decay": 0.01, "optimizer.beta2": 0.999},
        **{"optimizer.warmup": 2000, "optimizer.min_lr_ratio": 0.04, "optimizer.max_grad_norm": 1.0},
        # 3 trillion tokens in steps of 512 rows of 512.
        **{"trainer.num_train_steps": 3 * 10**12 // 512**2, "trainer.max_eval_batches": 5},
    }
    assert {key: settings[key] for key in expected} == expected
    # Its fine-tuning clips nothing, and decays to nothing.
    settings = _translate_settings(
        "b.yaml", "checkpoint_dir: checkpoints/a/b\nlora_r: 8\ntrain: {max_steps: 50, min_lr: 6e-5}\n", tmp_path
    )
    expected = {
        **{"trainer.train_batch_size": 16, "optimizer.max_grad_norm": None, "optimizer.min_lr_ratio": 0.0},
        **{"optimizer.warmup": 100, "trainer.num_train_steps": 50, "trainer.seed": 1337},
    }
    assert {key: settings[key] for key in expected} == expected


def test_axolotl_warms_up_unless_told_otherwise(tmp_path: Path) -> None:
    head = "base_model: a/b\nmicro_batch_size: 1\n"
    for text, warmup in [("", 0.03), ("max_steps: 1000", 30), ("max_steps: 9000", 100), ("warmup_ratio: 0.1", 0.1)]:
        assert _translate_settings("a.yaml", head + text, tmp_path)["optimizer.warmup"] == warmup
    (tmp_path / "a.yaml").write_text(head)
    assert any("at most 100" in note for note in translate(tmp_path / "a.yaml", RunConfig).notes)


def test_characters_of_nanogpt_are_read_as_text(tmp_path: Path) -> None:
    settings = _translate_settings("train.py", "dataset = 'shakespeare_char'\nblock_size = 250\n", tmp_path)
    assert settings["data.train_urls"] == ["data/shakespeare_char/input.txt"]
    assert (settings["data.tokenizer"], settings["data.num_validation_sequences"]) == ("bytes", 400)
    assert "data.source.type" not in settings
    assert "meta.pkl" in dict(translate(tmp_path / "train.py", RunConfig).lost)["dataset"]


def test_the_test_data_and_the_rows_of_torchtitan(tmp_path: Path) -> None:
    settings = _translate_settings("a.toml", "[training]\nlocal_batch_size = 8\ndataset = 'c4_test'\n", tmp_path)
    assert settings["data.train_urls"] == ["tests/assets/c4_test/*"]
    assert settings["trainer.train_batch_size"] == 8
    translation = translate(tmp_path / "a.toml", RunConfig)
    assert "one device" in dict(translation.lost)["training.local_batch_size"]


def test_notes_of_one_reason_are_one_line_and_missing_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[training]\nsteps = 5\n[float8]\na = 1\nb = 2\n[job]\ndump_folder = 'x'\n")
    notes = translate(tmp_path / "a.toml", RunConfig).notes
    assert "float8.a, float8.b: int8, fp8 and mxfp8 products are trainer.quantization" in notes
    assert any(note.startswith("training data: none") for note in notes)


def test_numbers_with_a_power_of_ten_are_numbers(tmp_path: Path) -> None:
    text = "train: {global_batch_size: 4, max_seq_length: 100, max_tokens: 3e9, learning_rate: 2e-5}\n"
    (tmp_path / "a.yaml").write_text(text)
    settings = flatten(translate(tmp_path / "a.yaml", RunConfig).data)
    assert (settings["trainer.num_train_steps"], settings["optimizer.learning_rate"]) == (7_500_000, 2e-5)


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("{type: alpaca}", {"instruction": "a", "input": "b", "output": "c"}),
        ("{type: sharegpt}", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
        (
            "{type: chat_template, field_messages: turns, message_property_mappings: {role: who, content: what},"
            " roles: {user: [person], assistant: [bot]}}",
            {"turns": [{"who": "person", "what": "a"}, {"who": "bot", "what": "b"}]},
        ),
    ],
)
def test_formats_of_axolotl_read_what_is_in_its_records(kind: str, record: dict[str, Any], tmp_path: Path) -> None:
    block = kind.replace("{", "{path: org/rows, ", 1)
    (tmp_path / "a.yaml").write_text(f"base_model: a/b\ndatasets: [{block}]\n")
    data = translate(tmp_path / "a.yaml", RunConfig).data["data"]
    format = DataConfig.model_validate({"source": {"type": "embedded"}, "format": data["format"]}).format
    value = format.prepare(Row(0, "here", "", record={name: record[name] for name in format.fields()})).value
    if "instruction" in record:
        assert value == ("a\n\nb\n\n", "c")
    else:
        assert value[0] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_a_python_file_is_read_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text("import os\nn_layer = 2 * 3\nn_head = n_layer // 2\nos.abort()\nn_embd = [x for x in (1,)]\n")
    data, skipped = read_foreign(file)
    assert data == {"n_layer": 6, "n_head": 3}
    assert skipped == ["import os", "os.abort()", "n_embd = [x for x in (1,)]"]
    assert len(ast.parse(file.read_text()).body) == len(data) + len(skipped)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "x: [1", "cannot be read"),
        ("a.toml", "x = ", "cannot be read"),
        ("a.json", "[1]", "expected a block of keys, found list"),
        ("a.py", "def (", "cannot be read"),
        ("a.py", "def llama3_debugmodel(): ...", "is not run"),
        ("a.yaml", "colour: red", "no key tells whose configuration it is"),
        ("a.yaml", "date: 2024-02-30", "cannot be read"),
        ("a.yaml", "x: !!timestamp foo", "a value is not what its tag says"),
        ("a.yaml", 'x: !!int ""', "a value is not what its tag says"),
        ("a.yaml", 'x: !!float ""', "a value is not what its tag says"),
        ("a.yaml", "x: !!bool foo", "a value is not what its tag says"),
        ("a.yaml", "x: !!timestamp [1]", "cannot be read"),
        ("a.yaml", "x: &a {b: *a}", "more than 50000 values"),
        (
            "a.yaml",
            "a: &a [1]\n" + "".join(f"b{i}: &b{i} [*{'a' if not i else f'b{i - 1}'}, 1]\n" for i in range(60)),
            "nested more than 50 levels",
        ),
        (
            "a.yaml",
            "a: &x0 {k: 1, l: 1}\n" + "".join(f"b{i}: &x{i + 1} {{k: *x{i}, l: *x{i}}}\n" for i in range(30)),
            "more than 50000 values",
        ),
        ("a.json", '{"a": ' * 200 + "1" + "}" * 200, "nested more than 50 levels"),
        ("a.json", '{"a": ' * 99999 + "1" + "}" * 99999, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        translate(tmp_path / name, RunConfig)
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(UserError, match="there are nanoGPT, torchtitan, litgpt, axolotl, TRL, Levanter"):
        translate(tmp_path / "b.json", RunConfig, "megatron")


TRAINING_ARGUMENTS = {
    **{"output_dir": "out", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "learning_rate": 2e-5},
    **{
        "weight_decay": 0.01,
        "num_train_epochs": 3.0,
        "max_steps": -1,
        "warmup_steps": 100,
        "lr_scheduler_type": "cosine",
    },
    **{"adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0, "seed": 42, "bf16": True, "eval_steps": 500},
    **{"logging_steps": 10, "save_steps": 500, "optim": "adamw_torch", "torch_compile": False, "deepspeed": None},
}
GPT2_CONFIG = {
    **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768},
    **{"n_positions": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5},
}
MEGATRON = {
    **{"micro_batch_size": 4, "global_batch_size": 64, "num_layers": 12, "hidden_size": 768, "seq_length": 1024},
    **{"learning_rate": 1e-4, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "seed": 1},
}
DEEPSPEED = {
    **{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "gradient_clipping": 1.0},
    **{"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}},
}
LLAMA_FACTORY = {
    **{"model_name_or_path": "a/b", "stage": "sft", "lora_rank": 8, "dataset": "x", "cutoff_len": 2048, "bf16": True},
    **{"gradient_accumulation_steps": 8, "learning_rate": 1e-4, "warmup_ratio": 0.1, "output_dir": "out"},
}


def test_training_arguments_alone_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(TRAINING_ARGUMENTS))
    assert translate(tmp_path / "a.json", RunConfig).dialect == "TRL"


@pytest.mark.parametrize("keys", [GPT2_CONFIG, MEGATRON, DEEPSPEED, LLAMA_FACTORY, {"lora_r": 8}])
@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_a_file_of_something_else_is_not_taken_for_one_of_these(
    keys: dict[str, Any], name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    # A part of it as well: guesses from few keys are the least certain.
    for some in (keys, dict([*keys.items()][:5])):
        file.write_text(json.dumps(some))
        with pytest.raises(UserError, match=r"--from NAME"):
            translate(file, RunConfig)
        assert detect_framework(file, RunConfig) is None


def test_keys_that_are_unknown_in_number_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("base_model: a/b\nsequence_len: 8\n" + "".join(f"k{i}: 1\n" for i in range(9)))
    message = (
        r"axolotl has 2 of its 11 keys \(base_model, sequence_len\), and not the others \(k0, .*\.\.\.\), so it may be"
    )
    with pytest.raises(UserError, match=message):
        translate(file, RunConfig)
    assert translate(file, RunConfig, "axolotl").dialect == "axolotl"


def test_every_setting_that_a_rule_names_is_a_key_of_ours() -> None:
    our_keys = {*all_keys(ConfigNode.root(RunConfig), all_classes=True)}
    for dialect in DIALECTS:
        named = {rule for rule in dialect.keys.values() if isinstance(rule, str)} | dialect.always.keys()
        assert named <= our_keys, dialect.name
        sentences = " ".join(dialect.flags.values())
        assert {*re.findall(r"\b(?:trainer|data|optimizer)\.[\w.]*\w", sentences)} <= our_keys
        assert dialect.flags.keys() <= dialect.keys.keys()


def test_the_batch_of_trl_is_multiplied_by_the_devices(tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    text = "model_name_or_path: a/b\ndataset_name: a/pairs\nbeta: 0.05\nper_device_train_batch_size: 2\nmax_steps: 90\n"
    file.write_text(f"{text}precompute_ref_log_probs: true\n")
    alone = translate(file, RunConfig)
    assert "for each device, and the file does not give their number" in dict(alone.lost)["per_device_train_batch_size"]
    settings = flatten(translate(file, RunConfig, processes=16).data)
    expected = {
        **{"trainer.train_batch_size": 32, "trainer.num_train_steps": 90, "optimizer.learning_rate": 1e-6},
        **{"loss.type": "dpo", "loss.beta": 0.05, "loss.precompute": True, "data.format.type": "preference"},
    }
    assert {key: settings[key] for key in expected} == expected
    assert "data.epochs" not in settings, "max_steps gives the length"
    (tmp_path / "a.yaml").write_text("base_model: a/b\nmicro_batch_size: 2\ndatasets: []\nsample_packing: true\n")
    with pytest.raises(UserError, match="--processes: the batch of axolotl does not depend on it"):
        translate(tmp_path / "a.yaml", RunConfig, processes=2)


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("load_in_4bit: true", "load_in_4bit", "for the frozen base of an adapter"),
        ("fp16: true", "fp16", "weights stay in float32"),
        ("lr_scheduler_type: polynomial", "lr_scheduler_type", "schedule polynomial"),
        ("neftune_noise_alpha: 5", "neftune_noise_alpha", "no noise is added"),
        ("loss_type: hinge", "loss_type", "loss.type is dpo, ipo, simpo, orpo or kto"),
    ],
)
def test_what_trl_has_and_we_have_not_is_named(text: str, key: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"model_name_or_path: a/b\ndataset_name: a/c\nreport_to: none\n{text}\n")
    assert reason in dict(translate(tmp_path / "a.yaml", RunConfig).lost)[key]


@pytest.mark.parametrize(
    "settings",
    [
        # LLaMA-Factory's, and transformers' examples of classification and speech.
        {"model_name_or_path": "a/b", "stage": "sft", "finetuning_type": "lora", "dataset": "c", "template": "llama3",
         "cutoff_len": 2048, "output_dir": "o", "learning_rate": 1e-4, "num_train_epochs": 3, "bf16": True,
         "per_device_train_batch_size": 1, "lr_scheduler_type": "cosine"},
        {"model_name_or_path": "bert", "task_name": "mnli", "learning_rate": 5e-5, "num_train_epochs": 3,
         "per_device_train_batch_size": 32, "pad_to_max_length": True, "max_train_samples": 5},
        {"model_name_or_path": "openai/whisper", "language": "hi", "predict_with_generate": True, "dataset_name": "cv",
         "generation_max_length": 225, "per_device_train_batch_size": 16, "max_steps": 5000},
    ],
)  # fmt: skip
def test_programs_that_share_training_arguments_are_not_taken_for_trl(
    lmt: Lmt, in_tmp_path: Path, settings: dict[str, Any]
) -> None:
    (in_tmp_path / "a.json").write_text(json.dumps(settings))
    refused(lmt("config", "import", "a.json"), "and not the others", "say whose it is with --from NAME")
    result = lmt("config", "import", "a.json", "--from", "TRL")
    assert result.returncode == 0
    assert "no key of ours is known for it" in result.stderr


@pytest.mark.parametrize("command", ["check", "import"])
def test_a_file_with_characters_that_yaml_does_not_have_is_refused(lmt: Lmt, in_tmp_path: Path, command: str) -> None:
    (in_tmp_path / "a.yaml").write_bytes(b"trainer:\n  seed: \x00\n")
    refused(lmt("config", command, "a.yaml"), "a.yaml")
