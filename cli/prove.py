"""`lmt prove`: writes a signed proof of a run, from which others can recompute it."""

from pathlib import Path
from typing import Annotated

import typer

from cli import clean
from cli.common import JsonOption, RunArgument, check_is_run, path_option


def prove(
    ctx: typer.Context,
    run: RunArgument,
    output: Annotated[Path, path_option("--output", "-o", metavar="DIR", help="A new directory.", show_default=False)],
    key: Annotated[
        Path, path_option("--key", metavar="FILE", help="PEM file with your Ed25519 key.", show_default=False)
    ],
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Copy the checkpoints too, to verify segments from there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a signed proof of a run: configuration, digests of data and checkpoints, losses and fingerprints, versions.

    `lmt verify DIR --segments 3` checks the signature and recomputes random segments from it, on another machine of the
    same kind with the same data. Without --checkpoints, segments can only begin at the start of the run. Make a key
    with: openssl genpkey -algorithm ed25519 -out key.pem

    For example:

        lmt prove my-run -o proof --key key.pem --checkpoints
    """
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    prepare_process()
    check_is_run(ctx, run)
    import json

    from lm_trainer.reproduce.proof import read_proof, summary_lines, write_proof
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.trackers.jsonl import encode_non_finite

    statement = write_proof(RunRecord.read(run), output, key, checkpoints=checkpoints)
    # Read again, so that a proof that cannot be verified is never handed on.
    proof = read_proof(output)
    if as_json:
        clean.echo(json.dumps(encode_non_finite({"directory": str(output), "key": proof.key, **statement})))
        return
    for line in summary_lines(proof):
        clean.echo(line)
    clean.echo(f"to check it: lmt verify {output} --segments 3 --signed-by {proof.key}")
