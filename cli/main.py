"""`lmt`: the command group, which turns errors into messages and exit codes."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli import (
    bench,
    bisect,
    branch,
    chat,
    clean,
    config,
    data,
    diff,
    eval,
    generate,
    golden,
    help_text,
    hf,
    ladder,
    launch,
    plan,
    prove,
    replay,
    report,
    runs,
    sweep,
    tokens,
    train,
    transcribe,
    usage,
    verify,
    without,
)
from cli.common import OVERRIDES, print_error
from cli.log_lines import show_log_lines
from lm_trainer.core.errors import UserError, translate_disk_error, translate_out_of_memory

EXIT_INTERRUPTED = 130
"""Exit code 128 + SIGINT, as shells report it."""

_EXIT_CODES = (
    "Exit codes: 0 done; 1 crash, or the machine failed (disk full, not writable); 2 wrong usage or configuration; "
    "3 stopped on a non-finite loss, or by a rule of trainer.alerts; 4 out of memory; 75 stopped from outside with "
    "everything saved, or by the watchdog: start it again; 76 stopped by the file stop-after-save; 77 a device "
    "computes wrong results; 130 interrupted."
)


class _Commands(TyperGroup):
    """Prints user errors without a traceback. Any other error is a crash with exit code 1."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        help_text.reflow_group(self)

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Prints usage errors like all other errors, instead of in boxes."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **options)
        try:
            code = super().main(*args, standalone_mode=False, **options)
        except usage.UsageError as error:
            if message := usage.describe_usage_error(error):
                print_error(UserError(message))
            code = error.exit_code
        # The return value of a command is not an exit code. The code of `typer.Exit` is.
        raise SystemExit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and (suggestion := usage.find_equivalent_command(args)):
            raise usage.wrong_command_error(args[0], suggestion)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise typer.Exit(print_error(error)) from None
        except OSError as error:
            # A full disk is never a bug. Any other OSError is a crash with a traceback.
            if message := translate_disk_error(error):
                raise typer.Exit(print_error(message)) from None
            raise
        except KeyboardInterrupt:
            clean.echo("interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except (MemoryError, RuntimeError, ValueError) as error:
            if message := translate_out_of_memory(error):
                raise typer.Exit(print_error(message)) from None
            raise


app = typer.Typer(
    cls=_Commands,
    name="lmt",
    no_args_is_help=True,
    help="Train language models in JAX from one YAML file.",
    epilog=_EXIT_CODES,
    # Tracebacks go into bug reports, so they are plain text without local variables, which may contain secrets.
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)
TRAIN, LOOK, MODELS, DATA = "Train", "Look at runs and configurations", "Use models", "Data and machines"
"""Headings of the groups of commands in `lmt --help`, in their order."""

app.command(context_settings=OVERRIDES, rich_help_panel=TRAIN)(train.train)
app.command(context_settings=OVERRIDES, rich_help_panel=TRAIN)(branch.branch)
app.command(rich_help_panel=TRAIN)(without.without)
app.command(context_settings=OVERRIDES, rich_help_panel=TRAIN)(sweep.sweep)
app.command(context_settings=OVERRIDES, rich_help_panel=TRAIN)(plan.plan)
app.add_typer(ladder.app, name="ladder", rich_help_panel=TRAIN)
app.add_typer(launch.app, name="launch", rich_help_panel=TRAIN)
app.add_typer(config.app, name="config", rich_help_panel=LOOK)
app.command(rich_help_panel=LOOK)(runs.runs)
app.command(rich_help_panel=LOOK)(report.report)
app.command(rich_help_panel=LOOK)(tokens.tokens)
app.command(rich_help_panel=LOOK)(diff.diff)
app.command(context_settings=OVERRIDES, rich_help_panel=LOOK)(verify.verify)
app.command(rich_help_panel=LOOK)(prove.prove)
app.command(context_settings=OVERRIDES, rich_help_panel=LOOK)(replay.replay)
app.add_typer(bisect.app, name="bisect", rich_help_panel=LOOK)
app.add_typer(golden.app, name="golden", rich_help_panel=LOOK)
app.command("eval", context_settings=OVERRIDES, rich_help_panel=MODELS)(eval.evaluate)
app.command(rich_help_panel=MODELS)(generate.generate)
app.command(rich_help_panel=MODELS)(chat.chat)
app.command(rich_help_panel=MODELS)(transcribe.transcribe)
app.command("export-hf", rich_help_panel=MODELS)(hf.export_hf)
app.command("import-hf", rich_help_panel=MODELS)(hf.import_hf)
app.add_typer(data.app, name="data", rich_help_panel=DATA)
app.add_typer(bench.app, name="bench", rich_help_panel=DATA)


def _print_version(version_requested: bool) -> None:
    if version_requested:
        from lm_trainer import __version__

        clean.echo(f"lmt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """The console script."""
    show_log_lines()
    app(prog_name="lmt")
