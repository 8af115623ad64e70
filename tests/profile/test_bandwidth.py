"""The copy that rooflines are drawn with moves what it says, and nothing else."""

from __future__ import annotations

import jax

from lm_trainer.profile.bandwidth import CopyProbe


def test_a_copy_reads_one_array_and_writes_over_another():
    probe = CopyProbe(jax.devices()[0], num_bytes=1 << 20)
    assert probe.num_bytes == 2 << 20
    assert probe.run() > 0
    memory = probe.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes == 0, "an array beside the two would be moved as well"
    assert memory.alias_size_in_bytes == 1 << 20, "the result would come to lie in fresh pages"
