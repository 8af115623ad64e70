"""What `lmt bench` measures of a configuration, one file for each command, and what `--dry-run` describes."""

from lm_trainer.bench.session import BenchSession, bench_session, dry_run, random_batch, usual_vocabulary

__all__ = ["BenchSession", "bench_session", "dry_run", "random_batch", "usual_vocabulary"]
