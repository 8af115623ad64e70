"""`lmt data`: builds caches ahead of training, and inspects them."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean, data_at, data_dedup, data_find, data_overlap
from cli.build_progress import build_progress
from cli.common import (
    OVERRIDES,
    CharsOption,
    ConfigArgument,
    JsonOption,
    OverridesArgument,
    load_resolved_config,
    load_run_config,
    path_option,
)
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.files import expand_home

if TYPE_CHECKING:
    from lm_trainer.data.cache.kvstore import KvStore
    from lm_trainer.data.inspect import CacheStats, CacheStatus, PairStats
    from lm_trainer.data.tokenizer import TokenizerConfig, TrainedBpe

app = typer.Typer(no_args_is_help=True, help="Build caches of tokenised text ahead of training, and inspect them.")

app.command(context_settings=OVERRIDES)(data_at.at)
app.command(context_settings=OVERRIDES)(data_find.find)
app.command(context_settings=OVERRIDES)(data_dedup.dedup)
app.command(context_settings=OVERRIDES)(data_overlap.overlap)

_CACHE = typer.Option(
    "--cache", metavar="NAME", help="`train`, `validation`, or in a mixture `NAME/train`.", show_default="train"
)


@app.command(context_settings=OVERRIDES)
def build(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Tokenise on a Ray cluster: the one in trainer.ray, or a local one that this command starts."
        ),
    ] = False,
) -> None:
    """Tokenise all text of a configuration. An interrupted build resumes where it stopped.

    For example:

        lmt data build my.yaml data.num_workers=8
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.core.runtime import keep_freed_memory
    from lm_trainer.data.tokenize.first_row import build_notes
    from lm_trainer.data.tokenize.plan import plan_caches
    from lm_trainer.data.tokenize.progress import BuildCallbacks, Stopped
    from lm_trainer.health.signals import InterruptHandler

    # Tokenisation constantly allocates and frees batches of text.
    keep_freed_memory()
    # Without an address, --ray starts a cluster on the cores of this machine.
    cluster = run.trainer.ray if ray else None
    message = "what was tokenised is kept, and the same command goes on"
    with InterruptHandler(message) as signals, build_progress() as show:
        plan = plan_caches(run.data, show, cluster)
        for note in build_notes(plan.builds):
            clean.echo(note, err=True)
        callbacks = BuildCallbacks(show, stopped=signals.is_interrupted)
        try:
            ledgers = [(cache, cache.run(callbacks)) for cache in plan.builds.values()]
        except Stopped:
            # The build noticed the signal itself, because the exception that Python raised was lost.
            raise signals.to_exception() from None
    for cache, ledger in ledgers:
        bad = f", {ledger.bad} bad rows left out" if ledger.bad else ""
        documents = cache.format.describe_count(ledger.num_documents)
        clean.echo(f"{cache.name}: {documents}, {ledger.num_tokens:,} tokens{bad}")
    clean.echo(f"in {', '.join(plan.directories)}")


@app.command(context_settings=OVERRIDES)
def status(
    ctx: typer.Context, config: ConfigArgument, overrides: OverridesArgument = None, as_json: JsonOption = False
) -> None:
    """Show the progress of each cache, and whether it still matches the configuration."""
    import json

    run = load_run_config(ctx, config, overrides)
    from lm_trainer.data import inspect as report

    caches = report.cache_statuses(run.data)
    if as_json:
        clean.echo(json.dumps({"caches": [_status_as_dict(cache) for cache in caches]}))
    else:
        clean.echo("\n".join(map(str, caches)))
    _refuse_mismatched_caches(caches)


def _status_as_dict(cache: "CacheStatus") -> dict[str, Any]:
    ledger = cache.ledger
    status = {
        "url": cache.url,
        "fingerprint": cache.fingerprint,
        "shards": cache.num_shards,
        "shards_done": cache.num_shards if ledger.finished else ledger.next[0],
        "parts": len(ledger.parts),
        "documents": ledger.num_documents,
        "tokens": ledger.num_tokens,
        "text_bytes": sum(ledger.text_bytes),
        "bad_rows": ledger.bad,
        "builder": cache.builder,
        "misfit": cache.misfit,
    }
    return _named(cache, status)


def _named(cache: "CacheStatus", values: dict[str, Any]) -> dict[str, Any]:
    return {"name": cache.name, "finished": cache.ledger.finished, **values}


def _refuse_mismatched_caches(caches: "list[CacheStatus]") -> None:
    if misfits := dict.fromkeys(cache.misfit for cache in caches if cache.misfit):
        raise UserError("\n".join(misfits))


@app.command(context_settings=OVERRIDES)
def verify(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove damaged parts, so lmt data build rebuilds them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every cache file against the digest recorded when it was written.

    Also fails if a cache is unfinished or does not match the configuration.
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.core.terminal import json_line
    from lm_trainer.data import inspect as report
    from lm_trainer.data.cache.kvstore import KvStore

    caches = report.cache_statuses(run.data)
    if repair:
        # A cache that does not match the configuration would not be rebuilt.
        _refuse_mismatched_caches(caches)
    wrong: list[str] = []
    results: list[dict[str, Any]] = []
    for cache in caches:
        store = KvStore(cache.url)
        damaged = report.find_damaged_parts(store, cache.ledger) if cache.begun else {}
        problems = [line for lines in damaged.values() for line in lines]
        wrong += problems
        removed = _remove_damaged(cache, store, damaged) if repair and damaged else 0
        parts = len(cache.ledger.parts)
        results.append(_named(cache, {"parts": parts, "problems": problems, "removed_parts": removed}))
        if not as_json:
            _print_verified(cache, problems, removed)
    if as_json:
        clean.echo(json_line({"caches": results}))
    if wrong and not repair:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise MachineError(
            f"the caches are damaged:\n{lines}\nRemove the directory to build it again, or the parts alone, with: lmt "
            f"data verify {config} --repair"
        )
    _refuse_mismatched_caches(caches)
    if missing := [cache.name for cache in caches if not cache.ledger.finished]:
        raise UserError(f"not finished: {', '.join(missing)}; run: lmt data build")


def _print_verified(cache: "CacheStatus", problems: list[str], removed: int) -> None:
    if not cache.begun:
        clean.echo(f"{cache.name}: not built")
        return
    parts = len(cache.ledger.parts)
    outcome = f"{parts} parts, {f'{len(problems)} files wrong' if problems else 'all whole'}" if parts else "no parts"
    clean.echo(f"{cache.name}: {outcome}{'' if cache.ledger.finished else ', not finished'}")
    if removed:
        clean.echo(f"{cache.name}: {removed} damaged parts removed; lmt data build makes them again")


def _remove_damaged(cache: "CacheStatus", store: "KvStore", parts: Collection[int]) -> int:
    """Removes damaged parts, and returns their number."""
    from lm_trainer.data.inspect import remove_parts

    if cache.prebuilt:
        raise UserError(f"{cache.url} was built elsewhere; repair it where it was built")
    return remove_parts(store, cache.ledger, parts)


@app.command(context_settings=OVERRIDES)
def inspect(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    cache: Annotated[str, _CACHE] = "train",
    first: Annotated[int, typer.Option("--first", metavar="N", min=0, help="Index of the first document or pair.")] = 0,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="Number of documents or pairs.")] = 3,
    chars: CharsOption = 300,
    as_json: JsonOption = False,
) -> None:
    """Print documents, or pairs of answers, as they are stored in the cache: source, tokens and text.

    For formats that mask tokens, the part with a loss is between ⟦ and ⟧.
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.data import inspect as report

    documents = report.inspect_documents(run.data, cache, first, count, chars)
    if as_json:
        from lm_trainer.core.terminal import json_line

        clean.echo(json_line({"documents": [{**x._asdict(), "text": x.text[: chars or None]} for x in documents]}))
        return
    for shown in documents:
        name = f"{shown.number} {shown.role}".rstrip()
        clean.echo(f"[{name}] {shown.where}: {shown.tokens} tokens, {shown.in_loss} of them learnt")
        truncate = chars and len(shown.text) > chars
        clean.echo(shown.text[:chars] + " ..." if truncate else shown.text)


@app.command(context_settings=OVERRIDES)
def stats(
    ctx: typer.Context, config: ConfigArgument, overrides: OverridesArgument = None, as_json: JsonOption = False
) -> None:
    """Print the number of documents and tokens, document lengths, and how well they pack into rows."""
    import json

    run = load_resolved_config(ctx, config, overrides)
    from lm_trainer.data import inspect as report
    from lm_trainer.data.cache.kvstore import KvStore
    from lm_trainer.data.tokenize.open_cache import read_excluded_documents

    run.data.require_documents()
    seq_len, caches, excluded = run.model.seq_len, report.cache_statuses(run.data), read_excluded_documents(run.data)
    _refuse_mismatched_caches(caches)
    listed: list[dict[str, Any]] = []
    for cache in caches:
        if cache.format.is_paired:
            pairs = report.pair_stats(KvStore(cache.url), cache.ledger, seq_len)
            if as_json:
                listed.append(_named(cache, pairs._asdict()))
            else:
                _print_pair_stats(cache, pairs, seq_len)
            continue
        # Each recording is one row.
        packed_into = None if cache.features else seq_len
        store, too_long = KvStore(cache.url), run.data.too_long_of(cache.key.rpartition("/")[0])
        statistics = report.cache_stats(store, cache.ledger, packed_into, excluded.get(cache.key), too_long=too_long)
        if as_json:
            packing = {name: packed._asdict() for name, packed in statistics.packing.items()}
            listed.append(_named(cache, {**statistics._asdict(), "packing": packing}))
        else:
            _print_statistics(cache, statistics, seq_len, too_long)
    if as_json:
        clean.echo(json.dumps({"seq_len": seq_len, "caches": listed}))


def _print_statistics(cache: "CacheStatus", statistics: "CacheStats", seq_len: int, too_long: str) -> None:
    counts = f"{statistics.documents:,} documents, {statistics.tokens:,} tokens"
    so_far = "" if cache.ledger.finished else " (so far)"
    per_token = "" if statistics.bytes_per_token is None else f", {statistics.bytes_per_token:.2f} bytes per token"
    clean.echo(f"{cache.name}: {counts}{so_far}{per_token}")
    if statistics.left_out:
        clean.echo(
            f"  without {statistics.left_out:,} documents of {statistics.left_out_tokens:,} tokens (data.exclude)"
        )
    lengths = ", ".join(f"{name} {tokens:,}" for name, tokens in statistics.quantiles.items())
    clean.echo(f"  tokens per document: {lengths}")
    if cache.features:
        clean.echo(f"  {cache.features.describe(statistics.documents)}, each document a row of {seq_len}")
    for name, packed in statistics.packing.items():
        separated = ""
        if packed.without_start is not None:
            separated = f", {packed.without_start:.1%} of tokens in the loss without the beginning of their document"
        clean.echo(
            f"  packing {name}: {packed.rows:,} rows of {seq_len}, {packed.used:.1%} of positions used, "
            f"{packed.cut:.1%} of documents cut{separated}"
        )
    if cache.format.has_prompts and statistics.too_long:
        left_out = statistics.packing["best_fit"].left_out
        share = statistics.too_long / statistics.documents
        clean.echo(
            f"  {statistics.too_long:,} documents ({share:.1%}) are longer than a row; with on_too_long: {too_long}, "
            f"{left_out:.1%} of the tokens in the loss are left out"
        )


def _print_pair_stats(cache: "CacheStatus", statistics: "PairStats", seq_len: int) -> None:
    noun = cache.format.content
    so_far = "" if cache.ledger.finished else " (so far)"
    labels = f", {statistics.desirable:,} of them desirable" if noun == "examples" else ""
    clean.echo(f"{cache.name}: {statistics.pairs:,} {noun}{labels}, {statistics.tokens:,} tokens{so_far}")
    lengths = ", ".join(f"{name} {positions:,}" for name, positions in statistics.quantiles.items())
    clean.echo(f"  positions per {noun[:-1]}: {lengths}")
    share = statistics.too_long / statistics.pairs
    clean.echo(
        f"  packing best_fit: {statistics.rows:,} rows of {seq_len}, {statistics.filled:.1%} of positions filled; "
        f"{statistics.too_long:,} {noun} ({share:.1%}) are longer than a row"
    )


def _tokenizer_to_train(config: "TokenizerConfig", output: Path, vocab_size: int | None) -> "TrainedBpe":
    """Returns the tokenizer settings of the configuration, with the requested vocabulary size."""
    from lm_trainer.data.tokenizer import Pretrained, TrainedBpe

    if isinstance(config, Pretrained) and Path(expand_home(config.name)).absolute() == output.absolute():
        config = TrainedBpe()
    if not isinstance(config, TrainedBpe):
        kind = config.model_dump()["type"]
        named = f" ({config.name})" if isinstance(config, Pretrained) else ""
        raise UserError(
            f"data.tokenizer is {kind}{named}, which is not trained; set data.tokenizer.type=trained_bpe, or name with "
            "--output the directory that data.tokenizer names"
        )
    return (
        config if vocab_size is None else TrainedBpe.model_validate({**config.model_dump(), "vocab_size": vocab_size})
    )


@app.command("train-tokenizer", context_settings=OVERRIDES)
def train_tokenizer(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    output: Annotated[
        Path, path_option("--output", "-o", metavar="DIRECTORY", help="Output directory.", show_default=False)
    ] = Path("tokenizer"),
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            metavar="N",
            min=257,
            help="Vocabulary size.",
            show_default="of data.tokenizer, or 4096",
        ),
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer on the training text, and write a directory for data.tokenizer.

    data.tokenizer may already name the new directory. For example:

        lmt data train-tokenizer my.yaml -o words --vocab-size 8192
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.data.tokenize.cache_spec import find_caches
    from lm_trainer.data.tokenizer import train_bpe

    settings = _tokenizer_to_train(run.data.tokenizer_config, output, vocab_size)
    # Checked before training the tokenizer, which may take minutes.
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise UserError(f"{output} exists; choose another directory with --output")
    caches = find_caches(run.data)[1]
    shards = [shard for name, cache in caches.items() if name.endswith("/train") for shard in cache.shards]
    tokenizer = train_bpe(settings, shards)
    tokenizer.save(output)
    clean.echo(f"{tokenizer.vocab_size} tokens in {output}; use it with data.tokenizer: {output}")
