"""Ready-made rows, which are used like a finished build without tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm_trainer.data.cache.format import fingerprint
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.formats import FormatConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenize.manifest import Manifest, make_manifest
from lm_trainer.data.tokenize.progress import BuildCallbacks
from lm_trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReadyRows:
    """Has the interface of a finished `Build`. Its cache is empty and is identified by the sources of the rows."""

    name: str
    store: KvStore
    shards: Sequence[Shard]
    tokenizer: Tokenizer
    format: FormatConfig

    def run(self, callbacks: BuildCallbacks | None = None) -> Ledger:
        """Returns the ledger, like `read_ledger`."""
        del callbacks
        return self.read_ledger()

    def read_ledger(self) -> Ledger:
        """Returns a finished ledger without parts."""
        return Ledger(sha256=[fingerprint(self.manifest())], finished=True)

    def manifest(self) -> Manifest:
        """Returns everything that identifies the rows."""
        return make_manifest(self.shards, self.tokenizer)
