"""What `lmt bench` measures of a configuration, one file for each command, and what `--dry-run` describes."""

from lm_trainer.bench.session import BenchSession, bench_session, dry_run, random_batch
from lm_trainer.bench.vocabulary import Vocabulary, find_vocabulary

__all__ = ["BenchSession", "Vocabulary", "bench_session", "dry_run", "find_vocabulary", "random_batch"]
