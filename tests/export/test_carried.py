"""Files and fields beside the weights of a published model, on their way through import, training and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.huggingface import ExportOptions, read_hf, write_hf
from tests.conftest import Lmt, MakeHfModel
from tests.export.test_peft_files import LLAMA as LLAMA_FIELDS

ENDS = [256, 258]
LLAMA: dict[str, Any] = {**LLAMA_FIELDS, "initializer_range": 0.3, "eos_token_id": ENDS}
OTHER_FIELDS: dict[str, Any] = {
    "attention_dropout": 0.1,
    "pretraining_tp": 2,
    "transformers_version": "4.40.0",
    # A field of tomorrow that is off: with a value, it might change results.
    "a_field_of_tomorrow": None,
    "_private": {"with": ["a", "value"], "limits": [0.0, float("inf")]},
}
GENERATION: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": ENDS,
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "transformers_version": "4.40.0",
    "a_field_of_tomorrow": [1, None],
}
CARRIED: dict[str, bytes] = {
    "tokenizer.model": b"\x00\x01 not UTF-8 \xff",
    "vocab.json": b'{"a": 0}',
    "merges.txt": b"#version: 0.2\n",
    "added_tokens.json": b'{"<tool>": 299}',
    "special_tokens_map.json": b'{"eos_token": "<|endoftext|>"}',
    "chat_template.jinja": b"{{ messages[0].content }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "chat_template.json": b'{"chat_template": "x"}',
    "preprocessor_config.json": b'{"sampling_rate": 16000}',
    "processor_config.json": b'{ "processor_class": "P"}',
}
TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "GPT2Tokenizer",
    "eos_token": {"content": "<|endoftext|>", "lstrip": False, "rstrip": True, "__type": "AddedToken"},
    "model_max_length": 1000000000000000019884624838656,
    "a_field_of_tomorrow": None,
}


@pytest.fixture(scope="module")
def source(make_hf_model: MakeHfModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as somebody publishes it."""
    hf_model, out = make_hf_model("Llama", **LLAMA), tmp_path_factory.mktemp("published") / "model"
    ByteTokenizer().save(out)
    (out / "model.safetensors").write_bytes((hf_model / "model.safetensors").read_bytes())
    config = json.loads((hf_model / "config.json").read_text()) | OTHER_FIELDS
    # The form of transformers 4, which the source keeps.
    config.pop("rope_parameters")
    (out / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0, "rope_scaling": None}))
    (out / "generation_config.json").write_text(json.dumps(GENERATION))
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    for name, content in CARRIED.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content)
    return out


def content(file: Path) -> Any:
    fields = json.loads(file.read_text())
    if file.name == "config.json":
        # What the files of weights decide.
        for name in ("dtype", "torch_dtype", "architectures"):
            fields.pop(name, None)
    return fields


def assert_carried(source: Path, out: Path, **changed: Any) -> None:
    for name, expected in CARRIED.items():
        if not name.endswith(".json"):
            assert (out / name).read_bytes() == expected, name
    for file in source.glob("*.json"):
        expected = content(file)
        if file.name == "config.json":
            expected |= changed
        assert content(out / file.name) == expected, file.name
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()} | {
        "README.md"
    }


def test_import_and_export_keep_every_field_and_file(lmt: Lmt, source: Path, tmp_path: Path) -> None:
    assert lmt("import-hf", source, "imported").returncode == 0
    assert lmt("export-hf", "imported", "out").returncode == 0
    assert_carried(source, tmp_path / "out")
    # Again over it, with a directory in it, and from it.
    assert lmt("export-hf", "out", "out-2").returncode == 0
    assert lmt("export-hf", "out-2", "out", "--overwrite").returncode == 0
    assert_carried(source, tmp_path / "out")


def test_transformers_reads_what_was_carried(source: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_hf(tmp_path / "out", read_hf(source), ExportOptions())
    original, exported = (transformers.GenerationConfig.from_pretrained(path) for path in (source, tmp_path / "out"))
    assert exported.to_dict() == original.to_dict()
    assert exported.eos_token_id == ENDS
    original, exported = (transformers.AutoConfig.from_pretrained(path) for path in (source, tmp_path / "out"))
    differing = {key for key, value in original.to_dict().items() if exported.to_dict()[key] != value}
    assert differing <= {"dtype", "architectures", "_name_or_path"}


def test_without_a_generation_config_its_fields_are_those_of_config_json(source: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for path in source.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text()) | {"temperature": 0.3, "eos_token_id": [258, 7]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_hf(tmp_path)
    assert read.end_ids == (256, 258, 7)
    write_hf(tmp_path / "out", read, ExportOptions())
    # What transformers makes of a config.json alone.
    expected = transformers.GenerationConfig.from_pretrained(tmp_path, config_file_name="config.json")
    written = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    for name in ("eos_token_id", "bos_token_id", "pad_token_id", "temperature"):
        assert getattr(written, name) == getattr(expected, name), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [258, 7]


@pytest.mark.parametrize("value", ["</s>", [256, "<eos>"], 1.5])
def test_an_end_that_is_no_id_is_named(source: Path, tmp_path: Path, value: Any) -> None:
    for path in source.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id=.* is no id"):
        read_hf(tmp_path)


RUN = """
initialize_from_hf: {source}
use_hf_model_config: true
model: {{type: llama, seq_len: 16, gradient_checkpointing: false}}
data: {{tokenizer: {{type: hf, name: {source}}}, train_urls: [text.txt]}}
optimizer: {{learning_rate: 1e-3, warmup: 0}}
trainer: {{id: {id}, num_train_steps: 1, train_batch_size: 8, max_devices: 1, token_probabilities: 0, sample_tokens: 0,
  tracker: []}}
{more}
"""


def train(lmt: Lmt, source: Path, name: str, *overrides: str, more: str = "") -> str:
    Path("text.txt").write_text("import os\nimport sys\n\ndef f(x):\n    return x\n" * 20)
    Path("run.yaml").write_text(RUN.format(source=source, id=name, more=more))
    result = lmt("train", "run.yaml", *overrides)
    assert result.returncode == 0, result.stderr
    return result.stderr + result.stdout


@pytest.mark.slow
def test_a_fine_tune_keeps_what_it_does_not_change(lmt: Lmt, source: Path, tmp_path: Path) -> None:
    shown = train(lmt, source, "tuned", more="hf_save_path: exports")
    assert "exports keep its context of 64 tokens" in shown
    assert_carried(source, tmp_path / "exports" / "tuned" / "step-1")
    assert lmt("export-hf", "tuned", "out").returncode == 0
    assert_carried(source, tmp_path / "out")
    # A context that is asked for is written.
    assert lmt("export-hf", "tuned", "short", "--context", "32").returncode == 0
    assert_carried(source, tmp_path / "short", max_position_embeddings=32)


@pytest.mark.slow
def test_adapters_averages_and_later_runs_carry_it_on(lmt: Lmt, source: Path, tmp_path: Path) -> None:
    train(lmt, source, "adapted", more="adapter: {rank: 2}")
    assert lmt("export-hf", "adapted", "merged", "--merge").returncode == 0
    assert_carried(source, tmp_path / "merged")
    assert lmt("export-hf", "adapted", "adapter").returncode == 0
    for name, expected in CARRIED.items():
        if not name.startswith("pre") and not name.startswith("processor"):
            assert (tmp_path / "adapter" / name).read_bytes() == expected, name
    averaging = "trainer.model_averaging={type: ema}"
    train(lmt, source, "averaged", averaging, more="hf_save_path: exports")
    # A later attempt, in which the source is not read.
    resumed = lmt("train", "run.yaml", averaging, "trainer.num_train_steps=2", "--allow-config-change")
    assert resumed.returncode == 0, resumed.stderr
    assert_carried(source, tmp_path / "exports" / "averaged" / "step-2")
    later = ("initialize_from_hf=false", "use_hf_model_config=false", "hf_save_path=null", "trainer.id=later")
    result = lmt("train", "checkpoints/averaged/config.yaml", *later, "trainer.initialize_from=averaged")
    assert result.returncode == 0, result.stderr
    assert lmt("export-hf", "later", "out").returncode == 0
    assert_carried(source, tmp_path / "out")


def test_a_token_that_the_user_chose_ends_texts_as_well(lmt: Lmt, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    ByteTokenizer().save(other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    turn = {**tokenizer["added_tokens"][0], "id": 257, "content": "<|turn|>"}
    tokenizer["added_tokens"].append(turn)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|turn|>"}))
    assert lmt("import-hf", source, "imported", "--tokenizer", other).returncode == 0
    assert lmt("export-hf", "imported", "out").returncode == 0
    for name in ("config.json", "generation_config.json"):
        fields, original = content(tmp_path / "out" / name), content(source / name)
        assert fields == {**original, "eos_token_id": [256, 258, 257]}, name
    assert read_hf(tmp_path / "out").end_ids == (257, 256, 258)
