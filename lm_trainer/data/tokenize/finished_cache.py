"""Cache that was built elsewhere, in place of a build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import read_manifest
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.formats import FormatConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.tokenize.progress import BuildCallbacks
from lm_trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class FinishedCache:
    """A cache that is opened as it is. It answers as a `Build` does, and builds nothing."""

    name: str
    store: KvStore
    shards: Sequence[Shard]
    tokenizer: Tokenizer
    format: FormatConfig

    def run(self, callbacks: BuildCallbacks | None = None) -> Ledger:
        """Returns the ledger, as `look` does."""
        del callbacks
        return self.look()

    def look(self) -> Ledger:
        """Returns the finished ledger.

        Raises:
            UserError: if the cache is not finished, or was built with another tokenizer.
        """
        ledger, manifest = Ledger.read(self.store), self.manifest()
        if not ledger.finished:
            raise UserError(f"{self.store.url} is not finished; build it where it was begun, with: lmt data build")
        # Identities, not fingerprints: which package encoded the text does not matter to a reader.
        found, wanted = manifest["tokenizer"], self.tokenizer.identity()
        wrong = [key for key in wanted if found.get(key) != wanted[key]]
        if wrong:
            lines = "\n".join(f"  {key}: the cache has {found.get(key)}, now {wanted[key]}" for key in wrong)
            raise UserError(f"{self.store.url} was built with another tokenizer than data.tokenizer:\n{lines}")
        return ledger

    def manifest(self) -> dict[str, Any]:
        """Returns everything that decided the bytes of the cache."""
        return read_manifest(self.store) or {}
