"""Settings on the command line, as shells pass them on."""

import pytest

from tests.config.samples import Board, Cloud, Files, WideModel

FILE = """
model: {num_layers: 3}
trainer:
  seed: 5
  tracker:
    - {type: cloud, project: p}
    - {logdir: x}
data: {tokenizer: bytes}
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["trainer.num_train_steps=100"],
        ["--trainer.num_train_steps", "100"],
        ["--trainer.num_train_steps=100"],
        ["--trainer.num-train-steps", "100"],
        ["trainer.num_train_steps=1e2"],
        ["trainer.num_train_steps=7", "trainer.num_train_steps=100"],
    ],
)
def test_both_spellings_set_a_value_and_the_last_one_counts(files: Files, arguments: list[str]) -> None:
    loaded = files.load(FILE, *arguments)
    assert loaded.config.trainer.num_train_steps == 100
    assert (
        loaded.origin("trainer.num_train_steps")
        == f"override `{' '.join(arguments[-2:] if arguments[-1] == '100' else arguments[-1:])}`"
    )
    assert loaded.origin("trainer.seed") == "run.yaml:3:9"


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--trainer.seed", "-1"], "seed", -1),
        (["trainer.seed=-1"], "seed", -1),
        (["trainer.id=a=b"], "id", "a=b"),
        (["--trainer.id=a=b"], "id", "a=b"),
        (["--trainer.id", "a=b"], "id", "a=b"),
        (["trainer.id=123"], "id", "123"),
        (["trainer.id=1e5"], "id", "1e5"),
        (["trainer.id=007"], "id", "007"),
        (["trainer.id=true"], "id", "true"),
        (["trainer.id=null"], "id", None),
        (["trainer.id='null'"], "id", "null"),
        (['trainer.id=""'], "id", ""),
        (["trainer.id=two words"], "id", "two words"),
        (["trainer.id=a: b"], "id", "a: b"),
        (["trainer.id=a #b"], "id", "a #b"),
        (["trainer.id=[a]"], "id", "[a]"),
        (["trainer.id=@a"], "id", "@a"),
        (['trainer.jax_config={"a":1,"b":null}'], "jax_config", {"a": 1, "b": None}),
        (["trainer.crash_on_nan=false"], "crash_on_nan", False),
        (["trainer.jax_config.jax_num_cpu_devices=8"], "jax_config", {"jax_num_cpu_devices": 8}),
        (["trainer.jax_config={a: 1, b: x}"], "jax_config", {"a": 1, "b": "x"}),
    ],
)
def test_values(files: Files, arguments: list[str], key: str, value: object) -> None:
    assert getattr(files.load(FILE, *arguments).config.trainer, key) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('["a.jsonl","b.jsonl"]', ["a.jsonl", "b.jsonl"]),
        ("[a.jsonl,b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("[gs://b/x.{1..8}.jsonl, y]", ["gs://b/x.{1..8}.jsonl", "y"]),
        ("[x.{a,b}.jsonl,'y']", ["x.{a,b}.jsonl", "y"]),
        ("['x.{1..8}.jsonl']", ["x.{1..8}.jsonl"]),
        ("[]", []),
        ("x.{1..8}.jsonl", ["x.{1..8}.jsonl"]),
    ],
)
def test_lists_with_and_without_the_quotes_that_a_shell_removes(files: Files, text: str, value: list[str]) -> None:
    assert files.load(FILE, f"data.train_urls={text}").config.data.train_urls == value


def test_items_of_a_list_by_number(files: Files) -> None:
    loaded = files.load(
        FILE, "trainer.tracker.0.project=q", "trainer.tracker.1.type=cloud", "trainer.tracker.1.mode=offline"
    )
    assert loaded.config.trainer.tracker == (Cloud(project="q"), Cloud(mode="offline"))
    assert loaded.origin("trainer.tracker.0.project") == "override `trainer.tracker.0.project=q`"


def test_blocks_that_the_file_lacks_are_made(files: Files) -> None:
    loaded = files.load(
        "{}", "trainer.checkpointer.keep=[{every: 3}]", "trainer.tracker.logdir=x", "optimizer.warmup=5"
    )
    assert loaded.config.trainer.checkpointer.keep[0].every == 3
    assert loaded.config.trainer.tracker == Board(logdir="x")
    assert loaded.origin("trainer.checkpointer.keep.0.every") == "override `trainer.checkpointer.keep=[{every: 3}]`"


class TestTypes:
    def test_another_type_starts_a_new_block_and_says_what_it_drops(self, files: Files) -> None:
        loaded = files.load("model: {hidden_dim: 32, num_layers: 3}", "model.type=wide")
        assert loaded.config.model == WideModel()
        assert loaded.notes == (
            "override `model.type=wide` starts a new block, without model.hidden_dim, model.num_layers of the file",
        )
        assert loaded.origin("model.hidden_dim") == "default"

    def test_the_same_type_keeps_the_block(self, files: Files) -> None:
        loaded = files.load(FILE, "model.type=small")
        assert loaded.config.model.num_layers == 3
        assert loaded.notes == ()

    @pytest.mark.parametrize("reverse", [False, True])
    def test_the_type_is_settled_before_the_keys_whatever_the_order(self, files: Files, reverse: bool) -> None:
        arguments = ["model.type=wide", "model.rope_theta=3.5"]
        loaded = files.load(FILE, *(reversed(arguments) if reverse else arguments))
        assert loaded.config.model == WideModel(rope_theta=3.5)

    def test_a_whole_block_is_replaced_and_single_keys_go_on_top(self, files: Files) -> None:
        loaded = files.load(FILE, "model.hidden_dim=8", "model={type: small, num_heads: 2}")
        assert (loaded.config.model.hidden_dim, loaded.config.model.num_heads, loaded.config.model.num_layers) == (
            8,
            2,
            2,
        )

    def test_a_short_form_gives_way_to_a_type(self, files: Files) -> None:
        loaded = files.load(FILE, "data.tokenizer.type=trained", "data.tokenizer.vocab_size=300")
        assert loaded.config.data.tokenizer.vocab_size == 300

    def test_a_short_form_does_not_give_way_to_a_key(self, files: Files) -> None:
        assert files.problems(FILE, "data.tokenizer.vocab_size=300") == [
            "override `data.tokenizer.vocab_size=300`: data.tokenizer.vocab_size: data.tokenizer is 'bytes', "
            "not a block of keys; set data.tokenizer.type too"
        ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--dry-rnu"], "--dry-rnu: no such option; did you mean '--dry-run'?"),
        (["--dry_run"], "--dry_run: no such option; did you mean '--dry-run'?"),
        (["--seed", "3"], "--seed: no such option; did you mean '--trainer.seed'?"),
        # As nanoGPT spells it.
        (["--max_iters=3"], "override `--max_iters=3`: no such option; did you mean '--trainer.num_train_steps'?"),
        # A batch of all devices is not another name for the batch of one.
        (
            ["--per_device_train_batch_size=8"],
            "override `--per_device_train_batch_size=8`: no such option; trainer.train_batch_size counts the rows",
        ),
        (["--num_train_epochs", "3"], "--num_train_epochs: no such option; write data.epochs and data.stop_strategy="),
        (["--verbose"], "--verbose: no such option"),
        (["-d"], "-d: no such option; did you mean '--dry-run'?"),
        (["-dx"], "-dx: no such option; did you mean '--dry-run'?"),
        (["-q", "gpu"], "-q: no such option"),
        (["--trainer.seed"], "--trainer.seed: a value is missing"),
        (["--trainer.seed", "--model.num_layers=3"], "--trainer.seed: a value is missing"),
        (["model.num_layers", "4"], "model.num_layers: expected KEY=VALUE; did you mean model.num_layers=4?"),
        (["model.num_layers", "=", "4"], "model.num_layers: expected KEY=VALUE; did you mean model.num_layers=4?"),
        (["model.num_layers", "=4"], "model.num_layers: expected KEY=VALUE; did you mean model.num_layers=4?"),
        (["other.yaml"], "other.yaml: expected KEY=VALUE, such as trainer.num_train_steps=100"),
        (["trainer..seed=3"], "override `trainer..seed=3`: a key has no empty parts"),
        (["=3"], "override `=3`: expected KEY=VALUE, such as trainer.num_train_steps=100"),
        (["trainer.id="], 'override `trainer.id=`: has no value; write null to unset the key, or "" for empty text'),
    ],
)
def test_what_is_no_setting(files: Files, arguments: list[str], problem: str) -> None:
    problems = files.problems(FILE, *arguments)
    assert len(problems) == 1, problems
    assert problems[0].startswith(problem), problems


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("trainer.seed=x", "expected a whole number, got 'x'"),
        ("trainer.seed=010", "010 has a leading zero"),
        ("trainer.seed=[1", "is not valid YAML: "),
        ("trainer.seed=!!python/none", "the tag !!python/none is not supported"),
        ("model.hiden_dim=3", "unknown key; did you mean 'model.hidden_dim'?"),
        ("tracker.logdir=3", "unknown key; did you mean 'trainer.tracker'?"),
        ("optimizer.seed=3", "unknown key; did you mean 'trainer.seed'?"),
        ("model.num_train_step=3", "unknown key; did you mean 'trainer.num_train_steps'?"),
        ("modle.hidden_dim=3", "unknown key; did you mean 'model"),
        ("trainer.seed.x=3", "trainer.seed is 5, not a block of keys"),
        ("trainer.train_batch_size.x=3", "trainer.train_batch_size has no keys"),
        ("trainer.train_batch_size.0=3", "trainer.train_batch_size is not a list"),
        ("trainer.0=3", "trainer is one block, not a list; name a key of it"),
        ("trainer.tracker.5.project=x", "trainer.tracker has 2 items, counted from 0"),
        ("trainer.tracker.2={}", "trainer.tracker has 2 items, counted from 0"),
        (
            "trainer.tracker.project=x",
            "trainer.tracker is a list; name an item by its number: trainer.tracker.0.project",
        ),
        (
            "trainer.checkpointer.keep.0.every=5",
            "trainer.checkpointer.keep is not set, so no item of it can be changed; give the whole list",
        ),
    ],
)
def test_a_setting_that_does_not_fit(files: Files, setting: str, problem: str) -> None:
    problems = files.problems(FILE, setting)
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"override `{setting}`: {setting.split('=')[0]}: {problem}"), problems


def test_an_item_of_what_is_one_block(files: Files) -> None:
    assert files.problems("trainer: {tracker: {logdir: x}}", "trainer.tracker.0.logdir=y") == [
        "override `trainer.tracker.0.logdir=y`: trainer.tracker.0.logdir: trainer.tracker is one block, not a list; "
        "use trainer.tracker.logdir=..."
    ]


def test_problems_of_overrides_come_last_and_all_at_once(files: Files) -> None:
    problems = files.problems("trainer: {seed: x}", "model.num_layers=0", "--nope", "optimizer.lr=3", "trainer.id=")
    assert [problem.split(":")[0] for problem in problems] == [
        "1", "override `model.num_layers=0`", "--nope", "override `optimizer.lr=3`", "override `trainer.id=`",
    ]  # fmt: skip


def test_an_override_mends_what_the_file_has_wrong(files: Files) -> None:
    assert files.load("trainer: {seed: x}", "trainer.seed=3").config.trainer.seed == 3


def test_an_override_may_include_a_file(files: Files) -> None:
    files.write("train_urls: [a]\n", "sub/data.yaml")
    loaded = files.load(FILE, "data=!include sub/data.yaml")
    assert loaded.config.data.train_urls == ["a"]
    assert loaded.origin("data.train_urls") == "override `data=!include sub/data.yaml`"
    assert files.problems(FILE, "data=!include elsewhere.yaml") == [
        "override `data=!include elsewhere.yaml`: data: cannot include elsewhere.yaml: no such file"
    ]
