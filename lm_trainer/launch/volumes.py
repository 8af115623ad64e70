"""Parses the volumes of a pod, given by `lmt launch k8s --volume SOURCE:/MOUNT`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.errors import UserError


@dataclass(frozen=True)
class Volume:
    """A volume, its mount, and the pod annotations that it requires, as Kubernetes fields."""

    source: Mapping[str, Any]
    mount: Mapping[str, Any]
    annotations: Mapping[str, str]


def parse_volumes(texts: Sequence[str]) -> tuple[Volume, ...]:
    """Parses the volumes of a pod.

    Args:
        texts: one text per volume: `CLAIM:/MOUNT` for a PersistentVolumeClaim, `gs://BUCKET:/MOUNT` for a bucket
            mounted by the Cloud Storage FUSE driver of GKE, or `/DIRECTORY:/MOUNT` for a directory of the node.

    Raises:
        UserError: if a text has another form.
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
