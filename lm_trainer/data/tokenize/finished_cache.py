"""A cache that was built elsewhere and is used like a finished build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import read_manifest
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.formats import FormatConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenize.manifest import Manifest
from lm_trainer.data.tokenize.progress import BuildCallbacks
from lm_trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class FinishedCache:
    """A cache that is opened without building it. Has the interface of a `Build`."""

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
        """Returns the finished ledger.

        Raises:
            UserError: if the cache is not finished, or was built with another tokenizer.
        """
        ledger, manifest = Ledger.read(self.store), self.manifest()
        if not ledger.finished:
            raise UserError(f"{self.store.url} is not finished; build it where it was begun, with: lmt data build")
        # Compares identities, not fingerprints, because it does not matter to a reader which package encoded the text.
        recorded, expected = manifest["tokenizer"], self.tokenizer.identity()
        different = [key for key in expected if recorded.get(key) != expected[key]]
        if different:
            lines = "\n".join(f"  {key}: the cache has {recorded.get(key)}, now {expected[key]}" for key in different)
            raise UserError(f"{self.store.url} was built with another tokenizer than data.tokenizer:\n{lines}")
        return ledger

    def manifest(self) -> Manifest:
        """Returns everything that determined the bytes of the cache."""
        return read_manifest(self.store) or {}
