"""Keys of other frameworks' configurations: read as ours, dropped with a note, or refused."""

from lm_trainer.config.loader import load
from tests.config.samples import Board, Cloud, Files, Run


def test_a_renamed_key_is_read_as_ours_with_its_positions(files: Files) -> None:
    loaded = files.load("trainer:\n  steps: 3\n  boards:\n    - {type: board, logdir: x}\n")
    assert loaded.config.trainer.num_train_steps == 3
    assert loaded.config.trainer.tracker == (Board(logdir="x"),)
    assert loaded.notes == (
        "run.yaml:2:3: trainer.steps is read as num_train_steps",
        "run.yaml:3:3: trainer.boards is read as tracker",
    )
    assert loaded.origin("trainer.num_train_steps") == "run.yaml:2:10"
    assert loaded.origin("trainer.tracker.0.logdir") == "run.yaml:4:29"
    assert files.problems("trainer: {steps: x}") == ["1:18: trainer.num_train_steps: expected a whole number, got 'x'"]


def test_a_key_and_its_old_name_at_once_are_refused(files: Files) -> None:
    message = "trainer.steps: means the same as num_train_steps, which is set too; remove one of them"
    assert files.problems("trainer: {steps: 3, num_train_steps: 4}") == [f"1:11: {message}"]


def test_a_key_without_effect_is_dropped_with_a_note(files: Files) -> None:
    loaded = files.load("trainer: {tuning: {size: 8}, eager: false, wandb: null}")
    assert loaded.config == Run()
    assert loaded.notes == (
        "run.yaml:1:11: trainer.tuning has no effect: nothing needs tuning",
        "run.yaml:1:30: trainer.eager has no effect: everything is compiled",
    )


def test_a_value_that_would_have_an_effect_is_refused(files: Files) -> None:
    assert files.problems("trainer: {eager: true}") == ["1:11: trainer.eager: refused: everything is compiled"]


def test_the_same_note_on_many_keys_is_one(files: Files) -> None:
    class Several(Run):
        more: dict[str, Run] = {}

    text = "more: {a: {trainer: {tuning: 1}}, b: {trainer: {tuning: 2}}, c: {trainer: {tuning: 3}}}"
    (note,) = load(files.write(text), [], Several).notes
    assert note == "run.yaml:1:22: more.a.trainer.tuning (and 2 more) has no effect: nothing needs tuning"


def test_overrides_may_use_them_too(files: Files) -> None:
    loaded = files.load(
        "{}",
        "trainer.steps=3",
        "--trainer.tuning.size",
        "8",
        "trainer.wandb=null",
        "trainer.boards.type=cloud",
        "--trainer.boards.project",
        "p",
        "trainer.checkpointer={keep: [{every: 3}]}",
    )
    assert loaded.config.trainer.num_train_steps == 3
    assert loaded.config.trainer.tracker == Cloud(project="p")
    assert "override `trainer.steps=3`: trainer.steps is read as num_train_steps" in loaded.notes
    assert "override `--trainer.tuning.size 8`: trainer.tuning has no effect: nothing needs tuning" in loaded.notes
    assert loaded.origin("trainer.num_train_steps") == "override `trainer.steps=3`"

    loaded = files.load("{}", "trainer={steps: 4, tuning: x}")
    assert loaded.config.trainer.num_train_steps == 4
    assert len(loaded.notes) == 2

    assert files.problems("{}", "trainer.eager=true") == [
        "override `trainer.eager=true`: trainer.eager: refused: everything is compiled"
    ]
