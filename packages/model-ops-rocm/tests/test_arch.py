"""Names of architectures, from what drivers report."""

import pytest
import torch

from syncline.model_ops_rocm import KNOWN_ARCHS, detect_arch
from syncline.model_ops_rocm.arch import gfx_name, sm_name


def test_a_cpu_is_cpu() -> None:
    assert detect_arch("cpu") == "cpu"
    assert detect_arch(torch.device("cpu")) == "cpu"


def test_without_a_gpu_the_machine_is_a_cpu() -> None:
    if torch.cuda.is_available():
        assert detect_arch() in KNOWN_ARCHS
    else:
        assert detect_arch() == "cpu"


def test_driver_names_are_reduced_to_the_architecture() -> None:
    assert gfx_name("gfx942:sramecc+:xnack-") == "gfx942"
    assert gfx_name("gfx950") == "gfx950"
    assert sm_name((9, 0)) == "sm_90"
    assert sm_name((10, 3)) == "sm_103"
    assert {"gfx942", "gfx950", "sm_90", "cpu"} == set(KNOWN_ARCHS)


def test_what_is_no_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 'Radeon'"):
        gfx_name("Radeon")
    with pytest.raises(ValueError, match=r"device must be cpu or cuda, got meta"):
        detect_arch("meta")
