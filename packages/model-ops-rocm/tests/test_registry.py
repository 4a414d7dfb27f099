"""select and available: what is there, why the rest is not, and when a library is imported."""

import sys
from pathlib import Path

import pytest
import torch

from syncline.model_ops_rocm import (
    KNOWN_ARCHS,
    BackendUnavailableError,
    NoImplementationError,
    available,
    select,
)
from syncline.model_ops_rocm.registry import OPS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, code: str
) -> None:
    """A distribution `name` whose import name is `module`, as pip would leave it."""
    info = folder / f"{name.replace('-', '_')}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))


def test_the_torch_backend_has_every_op() -> None:
    for op in OPS:
        for dtype in DTYPES:
            assert callable(select(op, dtype=dtype))
            assert select(op, dtype=dtype) is select(op, backend="torch", arch="cpu", dtype=dtype)


def test_the_listing_agrees_with_select_line_by_line() -> None:
    lines = available()
    assert len(lines) == len(OPS) * 3 * len(KNOWN_ARCHS) * len(DTYPES)
    for line in lines:
        if line.why_not is None:
            select(line.op, backend=line.backend, arch=line.arch, dtype=line.dtype)
        else:
            with pytest.raises((BackendUnavailableError, NoImplementationError)):
                select(line.op, backend=line.backend, arch=line.arch, dtype=line.dtype)
    assert all((line.why_not is None) == (line.backend == "torch") for line in lines)


def test_the_listing_can_be_narrowed() -> None:
    (line,) = available(op="linear", backend="torch", arch="gfx950", dtype=torch.bfloat16)
    assert (line.op, line.backend, line.arch, line.dtype, line.why_not) == (
        "linear",
        "torch",
        "gfx950",
        torch.bfloat16,
        None,
    )
    with pytest.raises(ValueError, match=r"backend must be one of torch, triton, aiter"):
        available(backend="cuda")


def test_aiter_on_a_cpu_is_refused_by_package_and_version() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        select("linear", backend="aiter", arch="cpu", dtype=torch.bfloat16)
    assert caught.value.backend == "aiter"
    assert caught.value.package == "amd-aiter"
    assert "0.1.22" in caught.value.version
    assert "gfx942, gfx950, not on cpu" in caught.value.why
    assert "amd-aiter" in str(caught.value)


def test_the_other_project_named_aiter_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "aiter", "aiter", "raise AssertionError('imported')")
    (line,) = available(op="linear", backend="aiter", arch="gfx942", dtype=torch.bfloat16)
    assert line.why_not == "distribution amd-aiter is not installed"
    with pytest.raises(BackendUnavailableError, match=r"distribution amd-aiter is not installed"):
        select("linear", backend="aiter", arch="gfx942", dtype=torch.bfloat16)


def test_an_aiter_that_cannot_be_imported_is_named_when_it_is_first_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "raise RuntimeError('ROCm version file not found')"
    install(tmp_path, monkeypatch, "amd-aiter", "aiter", code)
    available()
    with pytest.raises(BackendUnavailableError) as caught:
        select("linear", backend="aiter", arch="gfx942", dtype=torch.bfloat16)
    assert caught.value.why == ("import aiter raised RuntimeError: ROCm version file not found")
    assert isinstance(caught.value.__cause__, RuntimeError)
    # On a CPU the architecture is refused before anything is imported.
    with pytest.raises(BackendUnavailableError, match=r"not on cpu"):
        select("linear", backend="aiter", arch="cpu", dtype=torch.bfloat16)


def test_a_backend_without_kernels_says_what_else_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "triton", "triton", "")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    (line,) = available(op="rms_norm", backend="triton", arch="sm_90", dtype=torch.float16)
    assert line.why_not == "it has no rms_norm for sm_90 and torch.float16 in this version"
    with pytest.raises(NoImplementationError) as caught:
        select("rms_norm", backend="triton", arch="sm_90", dtype=torch.float16)
    assert caught.value.existing == (
        "torch on cpu, gfx942, gfx950, sm_90 (float32, bfloat16, float16)",
    )
    monkeypatch.delitem(sys.modules, "triton", raising=False)


def test_a_dtype_or_arch_nobody_has_is_refused_with_the_facts() -> None:
    with pytest.raises(NoImplementationError) as caught:
        select("linear", dtype=torch.float8_e4m3fn)
    assert caught.value.dtype is torch.float8_e4m3fn
    with pytest.raises(NoImplementationError, match=r"arch 'sm_80'"):
        select("linear", arch="sm_80", dtype=torch.float32)


def test_a_misspelt_name_is_a_value_error_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"op must be one of .*got 'linaer' \(nearest: linear\)"):
        select("linaer", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"backend must be one of torch, triton, aiter"):
        select("linear", backend="aitre", dtype=torch.float32)
