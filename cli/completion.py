"""Configuration keys for shell completion. They are cached, because finding them imports all config classes."""

import json
import os
from contextlib import suppress
from pathlib import Path


def config_keys() -> list[str]:
    """Lists every dotted key that can be set. Returns [] if that fails."""
    import lm_trainer

    package = Path(lm_trainer.__file__).parent
    newest = max(path.stat().st_mtime_ns for path in package.rglob("*.py"))
    cache = _cache_directory() / "config-keys.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(cache.read_text(encoding="utf-8"))
        if saved["package"] == str(package) and saved["newest"] == newest:
            return saved["keys"]
    try:
        keys = _find_keys()
    except Exception:  # never print an error into the user's command line
        return []
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        # Written under a unique name and renamed, because two shells may complete at the same time.
        new = cache.with_suffix(f".{os.getpid()}.tmp")
        new.write_text(json.dumps({"package": str(package), "newest": newest, "keys": keys}), encoding="utf-8")
        new.replace(cache)
    return keys


def _find_keys() -> list[str]:
    from lm_trainer.config.config_node import ConfigNode, all_keys
    from lm_trainer.run.config.run_config import RunConfig

    return all_keys(ConfigNode.root(RunConfig), all_classes=True)


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm_trainer"
