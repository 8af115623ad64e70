"""One of several processes that train with programs of all devices. Prints, as JSON, the class of its dispatch, a hash
of the weights, the work of the host in the last step, and flags of all processes.

Usage: `python -m tests.step.mesh_wide_process ADDRESS PROCESSES INDEX`
"""

from __future__ import annotations

import hashlib
import json
import sys

import jax
import numpy as np
import pytest

from lm_trainer.parallel.flags import HostFlags
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import build_setup
from lm_trainer.step.dispatch.mesh_group import dispatching_for
from lm_trainer.step.state.train_state import to_host
from tests.host_work import count_host_work
from tests.step.test_layerwise import LLAMA, VOCAB, config_of

ROWS, LENGTH, STEPS = 8, 16, 2


def main(address: str, num_processes: int, index: int) -> None:
    if num_processes > 1:
        jax.distributed.initialize(address, num_processes, index)
    with dispatching_for("gpu"):
        setup = build_setup(config_of({**LLAMA, "num_layers": 4}), VOCAB)
    rows = np.asarray(setup.step.local_rows())
    local_batch = jax.tree.map(lambda x: x[rows], random_batch(ROWS, LENGTH, VOCAB))
    setup.step.compile(local_batch)
    state = setup.init()
    work = count_host_work(pytest.MonkeyPatch())
    flags, agreed = HostFlags(), list[dict[str, bool]]()
    for step in range(STEPS):
        work.clear()
        state, _ = setup.step(state, setup.step.put(local_batch, state.step), 1e-2)
        last = index == num_processes - 1
        agreed.append(flags.combine({"lead": index == 0, "last": last, "none": False, "once": last and step == 0}))
    # Also of the exchange of flags.
    programs, waits = dict(work.programs), dict(work.waits)
    params = {name: np.asarray(x) for name, x in to_host(state.params).items()}
    digest = hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params))).hexdigest()
    computing = type(setup.step._computing).__name__  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    print(json.dumps({"computing": computing, "digest": digest, "programs": programs, "waits": waits, "flags": agreed}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
