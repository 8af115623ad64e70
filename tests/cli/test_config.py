"""`lmt config` and the handling of settings that every command with a configuration shares."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cli.config_file import names_for_completion
from cli.main import app
from lm_trainer.config.loader import load
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import ROOT, RunLmt, lmt_environment

FILE = """\
model: {num_layers: 2, hidden_dim: 64, num_heads: 4}
trainer:
  num_train_steps: 50
optimizer:
  learning_rate: 6E-4
"""


def lmt(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture
def config(in_tmp_path: Path) -> str:
    Path("run.yaml").write_text(FILE, encoding="utf-8")
    return "run.yaml"


@pytest.mark.parametrize("options", [[], ["--origin"]])
def test_show_prints_a_configuration_that_means_the_same(config: str, options: list[str]) -> None:
    done = lmt("config", "show", config, "trainer.seed=3", "--trainer.train_batch_size", "64", *options)
    assert done.exit_code == 0, done.output
    Path("shown.yaml").write_text(done.stdout, encoding="utf-8")
    expected = load(Path(config), ["trainer.seed=3", "trainer.train_batch_size=64"], RunConfig).config
    assert load(Path("shown.yaml"), [], RunConfig).config == expected


def test_show_origin_says_where_each_value_comes_from(config: str) -> None:
    shown = lmt("config", "show", config, "--origin", "--trainer.seed", "-1", "trainer.seed=4").stdout.splitlines()
    lines = {" ".join(line.split()) for line in shown}
    assert "num_layers: 2 # run.yaml:1:21" in lines
    assert "seed: 4 # override `trainer.seed=4`" in lines
    assert "learning_rate: 0.0006 # run.yaml:5:18" in lines
    assert "warmup: 0.01 # default" in lines
    assert all("  # " in line or line.endswith(":") for line in shown)


def test_check(config: str) -> None:
    done = lmt("config", "check", config)
    assert (done.exit_code, done.stdout) == (0, "run.yaml: ok\n")


def test_check_finds_what_is_not_there(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("here.jsonl").write_text('{"text": "a"}\n')
    Path("far.yaml").write_text(
        "data:\n  tokenizer: some/where\n  configs:\n    a: {train_urls: ['no/*.jsonl']}\n"
        "    b: {train_urls: here.jsonl, validation_urls: [her.jsonl]}\n    c: {train_urls: 'gs://not/asked/for.jsonl'}\n"
        "  train_weights: {a: 1, b: 1, c: 1}\n"
    )
    done = lmt("config", "check", "far.yaml")
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "error: far.yaml:2:14: data.tokenizer: 'some/where' is neither a file or directory here nor in the hub's cache"
        ", and HF_HUB_OFFLINE is set in the environment. Without network use a local directory or `bytes`",
        "error: far.yaml:4:21: data.configs.a.train_urls: no file matches no/*.jsonl",
        f"error: far.yaml:5:50: data.configs.b.validation_urls: there is no file her.jsonl; did you mean "
        f"{Path('here.jsonl').absolute()}?",
        "3 problems; nothing was started.",
    ]
    assert lmt("config", "check", "far.yaml", "--no-files").stdout == "far.yaml: ok\n"
    # The check before a run asks for all of it, and for the devices.
    planned = lmt("train", "--dry-run", config, "data.train_urls=no/*.jsonl", "data.tokenizer=bytes")
    assert (planned.exit_code, planned.stderr.splitlines()[0]) == (
        2,
        "error: data.train_urls: no file matches no/*.jsonl",
    )


def test_an_attention_that_cannot_be_had_is_found_before_the_run(config: str) -> None:
    done = lmt("config", "check", config, "model.attn_backend=cudnn")
    assert (done.exit_code, "it computes in bfloat16 or float16, not float32" in done.stderr) == (2, True)
    able = (config, "model.attn_backend=cudnn", "trainer.mp=c=bfloat16")
    assert lmt("config", "check", *able).exit_code == 0
    # Which is right on a GPU, and not here.
    done = lmt("train", "--dry-run", *able)
    assert (done.exit_code, "the platform is cpu" in done.stderr) == (2, True)


@pytest.mark.parametrize("command", [["check"], pytest.param(["show", "--decays"], marks=pytest.mark.slow)])
def test_configurations_are_read_without_jax_unless_it_is_needed(config: str, command: list[str]) -> None:
    program = """
import sys
sys.argv = ["lmt", "config", *sys.argv[1:]]
from cli.main import main
try:
    main()
finally:
    packages = {"flax", "grain", "jax", "optax", "orbax", "scipy", "ssl", "tokenizers", "transformers"}
    print(*sorted(packages & sys.modules.keys()), file=sys.stderr)
"""
    Path("main.py").write_text(program)
    arguments = [sys.executable, "main.py", command[0], config, *command[1:]]
    done = subprocess.run(arguments, env=lmt_environment(), capture_output=True, text=True, check=True)
    assert ("jax" in done.stderr.split()) == bool(command[1:])
    assert bool(done.stderr.split()) == bool(command[1:])
    assert done.stdout == lmt("config", command[0], config, *command[1:]).stdout


@pytest.mark.slow
def test_a_dry_run_loads_nothing_that_saves_or_reads_rows_and_seldom_collects_garbage(config: str) -> None:
    program = """
import gc
import sys
from lm_trainer.__main__ import main
sys.argv = ["lmt", "train", "--dry-run", *sys.argv[1:]]
try:
    main()
finally:
    packages = {"grain", "jax", "orbax", "tensorstore", "tokenizers", "torch", "transformers"}
    print(*sorted(packages & sys.modules.keys()), gc.get_stats()[0]["collections"], file=sys.stderr)
"""
    arguments = [sys.executable, "-c", program, config, "data.tokenizer=bytes"]
    done = subprocess.run(arguments, env=lmt_environment(), capture_output=True, text=True, check=True)
    *packages, collections = done.stderr.splitlines()[-1].split()
    assert packages == ["jax"]
    # With Python's default threshold there are more than 600.
    assert int(collections) < 100


MISTAKES = [
    *("optimizer.learning_rate=fast", "optimizer.type=adamm", "model.hiden_dim=3", "trainer.seed=-1"),
    *("data.source.type=jsn", "trainer.tracker={type: wandbb}", "data.format={type: chatt}"),
]


@pytest.mark.slow
def test_no_configuration_and_no_mistake_needs_jax() -> None:
    program = """
import sys
from cli.main import app
for arguments in sys.argv[1:]:
    try:
        app(["config", "check", *arguments.split("|")])
    except SystemExit as ended:
        print(ended.code)
print("jax" in sys.modules)
"""
    # Recipes name files of the hub, which are not looked up here.
    shipped = [path for path in sorted((ROOT / "configs").glob("*_nano.yaml")) if not path.stem.startswith("ladder_")]
    calls = [*(path.name for path in shipped), *(f"gpt2_nano.yaml|{mistake}" for mistake in MISTAKES), "no.yaml"]
    done = subprocess.run(
        [sys.executable, "-c", program, *calls],
        cwd=ROOT / "configs",
        env=lmt_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    codes = [line for line in done.stdout.splitlines() if line.isdecimal()]
    # A configuration that starts from another run, or learns from one, is refused without that run.
    expected = ["2" if re.search(r"^ *(initialize_from|teacher):", path.read_text(), re.M) else "0" for path in shipped]
    assert codes == [*expected, *["2"] * (len(MISTAKES) + 1)]
    assert done.stdout.splitlines()[-1] == "False"


def test_check_lists_every_problem_and_exits_with_2(config: str) -> None:
    Path("bad.yaml").write_text("model: {hiden_dim: 3}\ntrainer: {seed: x}\n", encoding="utf-8")
    done = lmt("config", "check", "bad.yaml", "optimizer.lr=1")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: bad.yaml:1:9: model.hiden_dim: unknown key; did you mean 'hidden_dim'?",
        "error: bad.yaml:2:17: trainer.seed: expected a whole number, got 'x'",
        "error: override `optimizer.lr=1`: optimizer.lr: unknown key; did you mean 'optimizer.learning_rate'?",
        "3 problems; nothing was started.",
    ]


def test_a_configuration_of_another_framework_is_told_by_its_keys(in_tmp_path: Path) -> None:
    Path("a.yaml").write_text("train: {global_batch_size: 4, lr_warmup_steps: 2}\n", encoding="utf-8")
    done = lmt("config", "check", "a.yaml")
    assert (done.exit_code, done.stderr) == (
        2,
        "error: a.yaml: a configuration of litgpt; `lmt config import a.yaml -o my.yaml` turns it into one of ours\n",
    )


@pytest.mark.parametrize(
    ("arguments", "stderr"),
    [
        (
            ["check", "nun.yaml"],
            f"error: nun.yaml: no such file here, in configs or in {ROOT / 'configs'}; did you mean run.yaml?\n"
            "1 problem; nothing was started.\n",
        ),
        (
            ["show", "run.yaml", "--orign"],
            "error: --orign: no such option; did you mean '--origin'?\n1 problem; nothing was started.\n",
        ),
        (
            ["check", "--trainer.seed", "3", "run.yaml"],
            "error: --trainer.seed: no such option; a configuration file comes first, then settings (KEY=VALUE)\n",
        ),
        (
            ["check", "run.yaml", "optimizer.cooldown=3"],
            "error: override `optimizer.cooldown=3`: optimizer.cooldown: refused: deprecated; use `decay`\n"
            "1 problem; nothing was started.\n",
        ),
    ],
)
def test_mistakes_on_the_command_line(config: str, arguments: list[str], stderr: str) -> None:
    done = lmt("config", *arguments)
    assert (done.exit_code, done.stderr) == (2, stderr)


def test_a_configuration_of_others_is_imported_and_pointed_to(in_tmp_path: Path) -> None:
    Path("train.py").write_text("n_layer = 2\nn_head = 2\nn_embd = 64\nbatch_size = 8\ndevice = 'cuda'\n")
    done = lmt("train", "train.py")
    assert done.exit_code == 2
    assert "`lmt config import train.py -o my.yaml`" in done.stderr
    done = lmt("config", "import", "train.py", "-o", "my.yaml")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "note: device: all devices that are there are used" in done.stderr
    assert lmt("config", "import", "train.py").stdout == Path("my.yaml").read_text()
    assert lmt("config", "check", "my.yaml", "--no-files").stdout == "my.yaml: ok\n"


def test_notes_go_to_stderr(config: str) -> None:
    Path("tracked.yaml").write_text("trainer: {tracker: {type: tensorboard, logdir: x}}", encoding="utf-8")
    done = lmt("config", "show", "tracked.yaml", "trainer.tracker.type=wandb")
    assert done.exit_code == 0
    assert "type: wandb" in done.stdout
    assert done.stderr == (
        "note: override `trainer.tracker.type=wandb` starts a new block, without trainer.tracker.logdir of the file\n"
    )


def test_diff_from_the_defaults_and_between_two(config: str) -> None:
    assert lmt("config", "diff", config).stdout.splitlines() == [
        "model.num_layers: 12 -> 2",
        "model.hidden_dim: 768 -> 64",
        "model.num_heads: 12 -> 4",
        "trainer.num_train_steps: 400000 -> 50",
    ]
    Path("logs/run-1").mkdir(parents=True)
    saved = lmt("config", "show", config, "trainer.seed=3").stdout
    Path("logs/run-1/config.yaml").write_text(saved, encoding="utf-8")
    assert lmt("config", "diff", config, "logs/run-1").stdout == "trainer.seed: 0 -> 3\n"
    assert json.loads(lmt("config", "diff", config, "logs/run-1", "--json").stdout) == {
        "differences": [{"key": "trainer.seed", "old": "0", "new": "3"}]
    }
    assert lmt("config", "diff", config, "logs/run-1", "trainer.seed=0").stdout == "no differences\n"
    assert "trainer.seed: 0 -> 9\n" in lmt("config", "diff", config, "--trainer.seed", "9").stdout
    Path("empty.yaml").write_text("{}", encoding="utf-8")
    assert lmt("config", "diff", "empty.yaml").stdout == "all defaults\n"
    assert lmt("config", "diff", "logs").exit_code == 2


def test_schema_accepts_the_shipped_configurations(config: str) -> None:
    done = lmt("config", "schema", "-o", "schema.json")
    assert (done.exit_code, done.stdout) == (0, "")
    schema = json.loads(Path("schema.json").read_text(encoding="utf-8"))
    assert json.loads(lmt("config", "schema").stdout) == schema
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    shipped = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if not path.stem.startswith("ladder_")]
    assert shipped
    for path in shipped:
        assert validator.is_valid(load(path, [], RunConfig).data), path
    assert validator.is_valid(RunConfig().model_dump(mode="json"))
    assert not validator.is_valid({"model": {"hiden_dim": 3}})
    assert lmt("config", "schema", "-o", "nowhere/x.json").exit_code == 2


def test_every_default_of_a_run_is_written_and_read_back(in_tmp_path: Path) -> None:
    Path("empty.yaml").write_text("{}", encoding="utf-8")
    Path("all.yaml").write_text(lmt("config", "show", "empty.yaml").stdout, encoding="utf-8")
    assert load(Path("all.yaml"), [], RunConfig).config == RunConfig()


@pytest.mark.slow
def test_keys_complete_in_the_shell_without_the_configuration(run_lmt: RunLmt, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def complete(shell: str, word: str, **environment: str) -> list[str]:
        words = f"lmt train x.yaml {word}"
        done = run_lmt(
            env={
                "XDG_CACHE_HOME": str(cache),
                "_LMT_COMPLETE": f"complete_{shell}",
                "COMP_WORDS": words,
                "COMP_CWORD": "3",
                "_TYPER_COMPLETE_ARGS": words,
                "_TYPER_COMPLETE_FISH_ACTION": "get-args",
                **environment,
            }
        )
        assert "Traceback" not in done.stderr
        return done.stdout.splitlines()

    assert "model.hidden_dim=" in complete("bash", "model.hidden")
    (saved,) = cache.rglob("*.json")
    keys = json.loads(saved.read_text(encoding="utf-8"))["keys"]
    assert {"trainer.num_train_steps", "data.train_urls", "optimizer.learning_rate"} <= set(keys)
    # From now on the answer comes from the cache, even where no configuration can be imported.
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "pydantic.py").write_text("raise ImportError", encoding="utf-8")
    without_classes = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), str(ROOT)])}
    assert complete("bash", "trainer.se", **without_classes) == ["trainer.seed="]
    assert complete("fish", "trainer.se", **without_classes) == ["trainer.seed="]
    assert "trainer.seed=" in complete("zsh", "trainer.se", **without_classes)[0]
    # A cache that cannot be read, and no configuration: no keys, but no noise in the terminal either.
    saved.write_text("{", encoding="utf-8")
    assert not any(complete("bash", "trainer.se", **without_classes))


def test_a_large_run_as_it_is_commonly_written(in_tmp_path: Path) -> None:
    Path("data.yaml").write_text(
        "train_urls:\n"
        '  - "gs://my_bucket/openwebtext-sharded/openwebtext_train.{1..128}-of-128.jsonl.gz"\n'
        "validation_urls:\n"
        '  -  "gs://my_bucket/openwebtext-sharded/openwebtext_val.{1..8}-of-8.jsonl.gz"\n'
        'cache_dir: "gs://my_bucket/tokenized/openwebtext_2/"\n',
        encoding="utf-8",
    )
    Path("run.yaml").write_text(
        "data: !include data.yaml\n"
        "model:\n"
        "  type: gpt2\n"
        "  hidden_dim: 768\n"
        "  num_heads: 12\n"
        "  num_layers: 12\n"
        "  seq_len: 1024\n"
        "  gradient_checkpointing: true\n"
        "  scale_attn_by_inverse_layer_idx: true\n"
        "trainer:\n"
        "  tracker:\n"
        "    type: wandb\n"
        '    project: "my-project"\n'
        '    tags: [ "openwebtext", "gpt2"]\n'
        "  mp: p=f32,c=bfloat16\n"
        "  model_axis_size: 1\n"
        "  per_device_parallelism: 4\n"
        "  train_batch_size: 512\n"
        "  checkpointer:\n"
        "    keep:\n"
        "      - every: 1000  # steps\n"
        "        until: 10000 # step\n"
        "      - every: 5000  # steps\n"
        "        until: 40000 # step\n"
        "      - every: 10000\n"
        "optimizer:\n"
        "  learning_rate: 6E-4\n"
        "  weight_decay: 0.1\n"
        "  min_lr_ratio: 0.1\n",
        encoding="utf-8",
    )
    run = load(Path("run.yaml"), ["--trainer.num_train_steps", "1000000"], RunConfig).config
    assert run.optimizer.learning_rate == 6e-4
    assert (run.trainer.mp.param, run.trainer.mp.compute) == ("float32", "bfloat16")
    assert [entry.until for entry in run.trainer.checkpointer.keep] == [10000, 40000, None]
    assert [tracker.type for tracker in run.trainer.trackers] == ["wandb"]
    assert (run.data.train_urls or [""])[0].startswith("gs://my_bucket/")
    assert run.trainer.num_train_steps == 1_000_000


@pytest.mark.slow
def test_plot_draws_without_devices(run_lmt: RunLmt, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE + "  cycles: 2\n", encoding="utf-8")
    # Any use of a device would fail: there is no such platform.
    done = run_lmt("config", "plot", "run.yaml", "--optimizer.rewarmup", "5", env={"JAX_PLATFORMS": "none_such"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "~ warm-up: steps 25 to 30\n" in done.stdout
    assert "v lowest learning rate at the end of a cycle: step 25, 50\n" in done.stdout


def test_plot_writes_a_file(config: str) -> None:
    pytest.importorskip("matplotlib")
    done = lmt("config", "plot", config, "--out", "x.png")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "x.png: written\n")
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    file_and_terminal = lmt("config", "plot", config, "--out", "x.svg", "--terminal")
    assert "batch size: 512" in file_and_terminal.stdout
    assert "<svg" in Path("x.svg").read_text(encoding="utf-8")
    assert lmt("config", "plot", config, "--out", "x.gif").exit_code == 2


def test_names_of_configurations_complete_in_the_shell(in_tmp_path: Path) -> None:
    Path("llama_mine.yaml").touch()
    Path("llama_notes.txt").touch()
    Path("llama_runs").mkdir()
    assert [*names_for_completion("llama_")] == ["llama_1b", "llama_8b", "llama_mine.yaml", "llama_nano"]
    assert [*names_for_completion("configs/")] == []
    assert {"gpt2_nano", "llama_mine.yaml"} < {*names_for_completion("")}
    arguments = {parameter.name: parameter for parameter in typer.main.get_command(app).commands["train"].params}  # pyright: ignore[reportAttributeAccessIssue]
    items = arguments["config"].shell_complete(typer.Context(typer.main.get_command(app)), "llama_8")
    assert [item.value for item in items] == ["llama_8b"]
