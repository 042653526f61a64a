import platform
import resource

import pytest
import torch

from autopipe.runtime.ranks import launch

LARGE = 40 << 20
"""More bytes than 32 MiB, from which on glibc gives each allocation a mapping of its own."""


def _faults() -> int:
    """The pages that a tensor of ones fetches from the system where many of its size were made and freed before."""
    for _ in range(50):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(LARGE, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are of glibc's malloc")
def test_a_rank_keeps_what_it_freed() -> None:
    pages = LARGE // resource.getpagesize()
    (fetched,) = launch.launch(_faults, (), ranks=1, timeout_s=60)
    assert fetched < pages / 100
