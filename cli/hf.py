"""`lmt export-hf` and `lmt import-hf`: convert models to and from the Hugging Face format."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli import clean
from cli.common import CheckpointOption, ExportedArgument, hub_argument, path_argument, path_option, storage_argument


class ExportDtype(StrEnum):
    """The values of `--dtype`."""

    F32 = "f32"
    BF16 = "bf16"


def export_hf(
    run: ExportedArgument,
    out: Annotated[
        str,
        storage_argument(
            metavar="OUT",
            help="Output directory, local or a bucket URL; must be new or empty.",
            show_default=False,
        ),
    ],
    step: CheckpointOption = None,
    dtype: Annotated[ExportDtype, typer.Option(help="Dtype of the exported weights.")] = ExportDtype.F32,
    max_shard_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Maximum size of a weight file; larger models are sharded, with an index."),
    ] = "5GB",
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="ORG/NAME",
            help="Upload the result to the hub; reads the token from the environment variable HF_TOKEN.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public/--private", help="Visibility of a newly created repository.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in OUT.")] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write the full model, with the run's adapter merged into the weights.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Context length to write to config.json.",
            show_default="the initial model's, or the run's row length if longer",
        ),
    ] = None,
) -> None:
    """Write a checkpoint as a directory that `transformers` loads: safetensors, configuration, tokenizer and card.

    For a run that trains an adapter, writes a directory that `peft` loads. OUT is written atomically, so a crash leaves
    no partial export.

    For example:

        lmt export-hf my-run out/

        lmt export-hf my-run out/ --step 1000 --dtype bf16 --max-shard-size 2GB

        lmt export-hf my-run out/ --push-to-hub my-org/my-model

        lmt export-hf my-adapter out/ --merge
    """
    from lm_trainer.core.bucket import storage_path
    from lm_trainer.export.huggingface import ExportOptions
    from lm_trainer.export.weights import parse_size
    from lm_trainer.run.weights.hf_transfer import check_export, export_model
    from lm_trainer.run.weights.open_model import open_for_export

    options = ExportOptions(
        dtype=dtype.value,
        max_shard_size=parse_size(max_shard_size),
        overwrite=overwrite,
        hub_name=push_to_hub,
        context=context,
    )
    # Checked before the weights are loaded, which takes a while for a large model.
    destination = storage_path(out)
    check_export(destination, options)
    result = export_model(open_for_export(run, step=step, merge=merge), destination, options, public=public)
    clean.echo(f"exported to {out}")
    if result:
        clean.echo(f"pushed to {result.url} ({'private' if result.private else 'public'})")


def import_hf(
    model: Annotated[
        str,
        hub_argument(
            metavar="DIR_OR_NAME", help="A Hugging Face model directory, or ORG/NAME on the hub.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        path_argument(metavar="OUT", help="Output checkpoint directory; must be new or empty.", show_default=False),
    ],
    tokenizer: Annotated[
        Path | None,
        path_option(metavar="DIR", help="Read the tokenizer from this directory.", show_default="the model's own"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit on the hub; a commit is reproducible.")
    ] = None,
) -> None:
    """Convert a `transformers` model to a checkpoint, for training, generation and export.

    Reads config.json, safetensors weights and tokenizer.json. Refuses pickles, and executes no code of the model.

    For example:

        lmt import-hf path/to/gpt2 checkpoints/gpt2

        lmt import-hf org/model checkpoints/model --revision 0123abc
    """
    from lm_trainer.run.weights.hf_transfer import import_model

    imported = import_model(model, out, tokenizer=tokenizer, revision=revision)
    clean.echo(f"imported a {imported.config.type} model to {out}")
    if (note := imported.config.describe_difference_from_hf()) is not None:
        clean.echo(note)
    clean.echo(f"train on from it with trainer.initialize_from={out}")
