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
    backend_for,
    prepare,
    select,
)
from syncline.model_ops_rocm.registry import BACKENDS, LOADED, OPS

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
    assert all(line.why_not is None for line in lines if line.backend == "torch")
    assert all(line.why_not is not None for line in lines if line.backend == "aiter")


def test_the_listing_says_what_is_offered_somewhere_and_what_nowhere() -> None:
    for line in available(op="rms_norm", backend="triton"):
        assert line.is_offered == (line.arch != "cpu")
    # Without AITER, and with it, the reason is that there is nothing to install for it.
    for line in available(op="gather_rows", backend="aiter"):
        assert not line.is_offered
        assert line.why_not == "AITER has no function for it that is on record"
    assert all(line.is_offered for line in available(backend="torch"))


def test_an_architecture_or_a_dtype_that_nobody_has_is_refused_for_every_op() -> None:
    for op in OPS:
        for backend in BACKENDS:
            with pytest.raises((BackendUnavailableError, NoImplementationError)) as caught:
                select(op, backend=backend, arch="sm_80", dtype=torch.float32)
            assert "sm_80" in str(caught.value)
        with pytest.raises(
            NoImplementationError, match=r"for arch 'cpu' and torch.float64"
        ) as none:
            select(op, dtype=torch.float64)
        assert any(existing.startswith("torch on cpu") for existing in none.value.existing)


def test_a_backend_is_named_by_what_it_can_do_here() -> None:
    for op in OPS:
        assert backend_for(op, arch="cpu", dtype=torch.float32) == "torch"
    # In the order that is asked for, of what is installed and fits the machine.
    on_a_gpu = available(op="linear", arch="sm_90", dtype=torch.bfloat16)
    able = [one.backend for one in on_a_gpu if one.why_not is None]
    for preferred in (("aiter", "triton", "torch"), ("torch", "triton"), able[::-1]):
        name = backend_for("linear", arch="sm_90", dtype=torch.bfloat16, preferred=preferred)
        assert name == next(backend for backend in preferred if backend in able)


def test_where_no_preferred_backend_can_do_it_each_reason_is_given() -> None:
    message = (
        r"backend 'aiter' has no linear for arch 'cpu' and .*; for linear there is: aiter, but "
    )
    with pytest.raises(NoImplementationError, match=message):
        backend_for("linear", arch="cpu", dtype=torch.float32, preferred=("aiter",))
    with pytest.raises(
        ValueError, match=r"^preferred must be one of torch, triton, aiter, got 'tr"
    ):
        backend_for("linear", arch="cpu", dtype=torch.float32, preferred=("trition",))
    for names in (("torch", "trition"), ()):
        with pytest.raises(ValueError, match=r"^preferred must be one of torch, triton, aiter"):
            backend_for("linear", arch="cpu", dtype=torch.float32, preferred=names)
    with pytest.raises(ValueError, match=r"^op must be one of .*, got 'liner'"):
        backend_for("liner", arch="cpu", dtype=torch.float32)


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
    assert "0.1.21" in caught.value.version
    assert "gfx942, gfx950, not on cpu" in caught.value.why
    assert "amd-aiter" in str(caught.value)


def test_the_other_project_named_aiter_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "aiter", "aiter", "raise AssertionError('imported')")
    (line,) = available(op="linear", backend="aiter", arch="gfx942", dtype=torch.bfloat16)
    assert line.why_not == (
        "distribution amd-aiter is not installed;"
        " distribution aiter 9.9 is an unrelated library of the same import name"
    )
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


def test_a_backend_without_a_dtype_says_what_else_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "amd-aiter", "aiter", "")
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    monkeypatch.setitem(LOADED, "aiter", {})
    (line,) = available(op="rms_norm", backend="aiter", arch="gfx942", dtype=torch.float32)
    assert line.why_not == "it has no rms_norm for gfx942 and torch.float32 in this version"
    with pytest.raises(NoImplementationError) as caught:
        select("rms_norm", backend="aiter", arch="gfx942", dtype=torch.float32)
    assert caught.value.existing == (
        "torch on cpu, gfx942, gfx950, sm_90 (float32, bfloat16, float16)",
        "triton on gfx942, gfx950, sm_90 (float32, bfloat16, float16)",
        "aiter on gfx942, gfx950 (bfloat16, float16)",
    )
    monkeypatch.delitem(sys.modules, "aiter", raising=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_triton_without_a_gpu_is_refused_by_package_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "pytorch-triton-rocm", "not_triton", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (line,) = available(op="rms_norm", backend="triton", arch="gfx950", dtype=torch.float16)
    assert line.why_not == f"PyTorch {torch.__version__} sees no GPU"
    with pytest.raises(BackendUnavailableError) as caught:
        prepare("rms_norm", (), backend="triton", arch="gfx950", dtype=torch.float16)
    assert (caught.value.package, caught.value.version) == ("triton", ">=3.6,<3.8")
    assert caught.value.why == line.why_not
    (line,) = available(op="rms_norm", backend="triton", arch="cpu", dtype=torch.float16)
    assert line.why_not == "it runs on gfx942, gfx950, sm_90, not on cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendUnavailableError, match=r"TRITON_INTERPRET is set"):
        select("rms_norm", backend="triton", arch="gfx950", dtype=torch.float16)


def test_preparing_the_torch_backend_runs_nothing() -> None:
    residual = torch.ones(2, 4)
    example = {"x_TH": residual, "weight_H": torch.ones(4), "eps": 1.0, "residual_TH": residual}
    prepare("rms_norm", [example], dtype=torch.float32)
    assert torch.equal(residual, torch.ones(2, 4))
    with pytest.raises(NoImplementationError):
        prepare("rms_norm", (), dtype=torch.int32)


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
