"""Volumes of a pod, from `lmt launch k8s --volume SOURCE:/MOUNT`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.errors import UserError


@dataclass(frozen=True)
class Volume:
    """One volume, its mount, and the required pod annotations, as Kubernetes fields."""

    source: Mapping[str, Any]
    mount: Mapping[str, Any]
    annotations: Mapping[str, str]


def parse_volumes(texts: Sequence[str]) -> tuple[Volume, ...]:
    """Parses volumes: `CLAIM:/MOUNT` (a PersistentVolumeClaim), `gs://BUCKET:/MOUNT` (GKE's Cloud Storage FUSE driver)
    or `/DIRECTORY:/MOUNT` (of the node).

    Raises:
        UserError: for anything else.
    """
    return tuple(_parse_volume(text, f"volume-{index}") for index, text in enumerate(texts))


def _parse_volume(text: str, name: str) -> Volume:
    source, _, target = text.rpartition(":")
    if not source or not target.startswith("/"):
        raise UserError(f"--volume {text!r}: expected CLAIM:/MOUNT, gs://BUCKET:/MOUNT or /DIRECTORY:/MOUNT")
    mount = {"name": name, "mountPath": target}
    if source.startswith("gs://"):
        bucket, _, directory = source.removeprefix("gs://").strip("/").partition("/")
        options = ["implicit-dirs", *([f"only-dir={directory}"] if directory else [])]
        attributes = {"bucketName": bucket, "mountOptions": ",".join(options)}
        csi = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
        return Volume({"name": name, "csi": csi}, mount, {"gke-gcsfuse/volumes": "true"})
    if source.startswith("/"):
        return Volume({"name": name, "hostPath": {"path": source}}, mount, {})
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", source):
        raise UserError(f"--volume {text!r}: {source!r} is no name of a PersistentVolumeClaim")
    return Volume({"name": name, "persistentVolumeClaim": {"claimName": source}}, mount, {})
